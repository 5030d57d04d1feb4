"""``kvtuner diff``: two profiles side by side, in the terminal and as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtuner.cli.command import Command, add_profile

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from kvtuner.exported_configs.sharing.reference import ResolvedProfile


def _run(args: Namespace) -> int:
    from kvtuner.cli.output_file import write_page
    from kvtuner.pipeline.profile_lookup import profile_of
    from kvtuner.report.layer_strip import Terminal
    from kvtuner.report.profile_difference import difference_lines, difference_of, difference_page

    first, second = profile_of(args.first), profile_of(args.second)
    difference = difference_of(first.profile, second.profile)
    names = _names(first, second)
    if args.html:
        write_page(Path(args.html), difference_page(difference, names))
    if args.json:
        page = {"page": args.html} if args.html else {}
        print(json.dumps({**difference.to_json(), **page}, indent=1))
    else:
        print("\n".join(difference_lines(difference, Terminal.of_stdout(), names)))
        if args.html:
            print(f"\npage: {args.html}")
    return int(bool(args.exit_code) and first.profile.digest != second.profile.digest)


def _names(first: ResolvedProfile, second: ResolvedProfile) -> tuple[str, str]:
    """The names of both, files with their folders where they are called alike."""
    if first.name != second.name:
        return first.name, second.name
    a, b = (f"{file.path.absolute().parent.name}/{file.path.name}" for file in (first, second))
    return a, b


def _add_flags(parser: ArgumentParser) -> None:
    add_profile(parser, "first")
    add_profile(parser, "second", help="profile to compare with the first")
    parser.add_argument("--exit-code", action="store_true", help="exit 1 if the layers differ")
    parser.add_argument("--html", metavar="FILE", help="write a page that needs nothing else")


COMMANDS: Final = (Command("diff", "two profiles: layers that changed, bytes, quality", _add_flags, _run),)
