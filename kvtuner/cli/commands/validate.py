"""``kvtuner validate``: schema, digest and inner consistency of profiles, and whether they are for a model."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any, Final

from kvtuner.cli.command import Command, add_profile
from kvtuner.errors import KVTunerError, ProfileError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator, Mapping

    from kvtuner.exported_configs.identity.mismatch import Policy
    from kvtuner.exported_configs.profile.profile import Profile


def _run(args: Namespace) -> int:
    """The status is 1 where a profile is valid, but not for the model; 2 where one of several is not valid."""
    from kvtuner.pipeline.profile_lookup import profiles_of

    policy = _policy(args)
    results: list[dict[str, Any]] = []
    for name in args.file:
        try:
            for resolved in profiles_of(name):
                file = str(resolved.path) if resolved.is_own else resolved.name
                results.append(_result(file, resolved.profile, args.model, policy))
        except KVTunerError as error:
            if len(args.file) == 1:
                raise
            results.append({"file": name, "valid": False, "error": " ".join(str(error).split())})
    lines = [line for result in results for line in _lines(result)]
    print(json.dumps(results, indent=1) if args.json else "\n".join(lines))
    if not all(result["valid"] for result in results):
        return 2
    return int(any(result["fits"] is False for result in results))


def _policy(args: Namespace) -> Policy:
    from kvtuner.exported_configs.identity.mismatch import Policy

    policy = Policy(strict=args.strict, allow_derived=args.allow_derived)
    for is_given, flag in ((policy.strict, policy.strict_flag), (policy.allow_derived, policy.allow_flag)):
        if is_given and not args.model:
            raise ProfileError(f"{flag} is about the model that a profile is for; give --model too")
    return policy


def _result(file: str, profile: Profile, model: str | None, policy: Policy) -> dict[str, Any]:
    from kvtuner.pipeline.profile_lookup import model_mismatches

    mismatches = model_mismatches(profile, model, policy) if model else []
    return {
        "file": file,
        "digest": profile.digest,
        "model": profile.model.id,
        "valid": True,
        "fits": all(mismatch.severity != "error" for mismatch in mismatches) if model else None,
        "mismatches": [mismatch._asdict() for mismatch in mismatches],
    }


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    from kvtuner.report.formatting import printable
    from kvtuner.report.layer_strip import Terminal

    if not result["valid"]:
        yield f"{result['file']}: refused: {printable(result['error'])}"
        return
    yield f"{result['file']}: valid, for {printable(str(result['model']))}"
    yield f"  {result['digest']}"
    width = Terminal.of_stdout().width
    for mismatch in result["mismatches"]:
        text = f"{mismatch['severity']}: {printable(mismatch['text'])}"
        yield from textwrap.wrap(
            text,
            width,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,  # of flags and names
        )


def _add_flags(parser: ArgumentParser) -> None:
    add_profile(parser, "file", nargs="+")
    parser.add_argument("--model", metavar="ID|FOLDER|demo", help="also check that it fits this model")
    parser.add_argument("--strict", action="store_true", help="allow no difference: what is warned of is an error")
    parser.add_argument(
        "--allow-derived",
        action="store_true",
        help="warn only of a fine-tune, or of another configuration with the same geometry",
    )


COMMANDS: Final = (Command("validate", "check a profile's schema, digest and inner consistency", _add_flags, _run),)
