"""``kvtuner list``: profiles at hand, of the catalogue, the cache and a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtuner.cli.command import Command

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from kvtuner.exported_configs.sharing.reference import ResolvedProfile

_COLUMNS: Final = ("profile", "model", "budget", "bits", "B/token", "of bf16", "KL", "digest")


def _run(args: Namespace) -> int:
    from kvtuner.pipeline.profile_lookup import list_profiles
    from kvtuner.report.layer_strip import Terminal
    from kvtuner.report.table import Table

    profiles = [
        _facts(listed) for listed in list_profiles(Path(args.folder) if args.folder else None, model=args.model)
    ]
    if args.json:
        print(json.dumps(profiles, indent=1))
    elif profiles:
        table = Table(_COLUMNS, list(map(_row, profiles)), left=tuple(range(len(_COLUMNS))))
        print("\n".join(table.lines(Terminal.of_stdout().width)))
    else:
        print("no profiles" + (f" that fit {args.model}" if args.model else ""))
    return 0


def _facts(listed: ResolvedProfile) -> dict[str, Any]:
    profile = listed.profile
    return {
        "name": listed.name,
        "where": listed.where,
        "model": profile.model.id,
        "budget": profile.budget.asked,
        "mean_bits": profile.budget.mean_bits,
        "bytes_per_token": profile.bytes_per_token(),
        "bf16_bytes_per_token": profile.bf16_bytes_per_token(),
        "kl": None if profile.quality is None else profile.quality.measured_kl.mean,
        "digest": profile.digest,
    }


def _row(facts: dict[str, Any]) -> tuple[str, ...]:
    from kvtuner.report.formatting import printable

    return (
        *(printable(facts[name]) for name in ("name", "model", "budget")),
        f"{facts['mean_bits']:.3g}",
        f"{facts['bytes_per_token']:,}",
        f"{facts['bytes_per_token'] / facts['bf16_bytes_per_token']:.1%}",
        "" if facts["kl"] is None else f"{facts['kl']:.3g}",
        facts["digest"].removeprefix("sha256:")[:12],
    )


def _add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", help="folder whose profiles are listed too, with those below it")
    parser.add_argument("--model", metavar="ID|FOLDER|demo", help="list only those that fit this model")


COMMANDS: Final = (Command("list", "profiles at hand: the catalogue, the local cache, a folder", _add_flags, _run),)
