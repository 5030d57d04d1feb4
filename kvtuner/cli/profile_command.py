"""Commands as they may be shared: without places of this machine, and without what was not said."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

from kvtuner.bench.server_flags import ServerFlags
from kvtuner.cli.parser import build_parser
from kvtuner.exported_configs.identity.model_identity import public_name
from kvtuner.exported_configs.sharing.reference import FileReference, parse_reference

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Collection, Mapping

_PATHS: Final = ("model", "data", "include_path")
_UNSAID: Final = ("command", "json", "debug", "out", "endpoint", "profile")


def command_said(args: Namespace) -> list[str]:
    """A command about a profile, with the last parts of paths only. Call before flags get defaults."""
    usual = vars(build_parser().parse_args([args.command, "x"]))
    words = ["kvtuner", args.command, _profile(str(args.profile)), *_flags(vars(args), usual, _UNSAID)]
    return words + [word for way, _ in args.endpoint or () for word in ("--endpoint", f"{way}=URL")]


def _profile(text: str) -> str:
    """A profile's name: of a file its last part; a pin stays."""
    reference = parse_reference(text)
    if not isinstance(reference, FileReference):
        return text
    pin = f"#{reference.digest}" if reference.digest else ""
    path = reference.path
    return (public_name(str(path)) if path.exists() else path.name) + pin


def _flags(said: Mapping[str, Any], usual: Mapping[str, Any], left_out: Collection[str]) -> list[str]:
    words: list[str] = []
    for name, value in sorted(said.items()):
        if name in left_out or value in (None, usual[name]):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if name == "server_args":
            text = shlex.join(ServerFlags.parse(text).shared())
        words += [f"--{flag}", public_name(text) if name in _PATHS else text]
    return words
