"""``kvtuner diff``: two profiles side by side, in the terminal and as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvtuner.cli.output_file import check_page_file, write_page
from kvtuner.pipeline.inputs import profile_of
from kvtuner.report.difference_report import difference_lines, difference_page
from kvtuner.report.profile_difference import difference_of
from kvtuner.report.terminal import Terminal

if TYPE_CHECKING:
    from argparse import Namespace

    from kvtuner.exported_configs.sharing.find import ResolvedProfile
    from kvtuner.report.profile_difference import ProfileDifference


def run(args: Namespace) -> int:
    """Run the sub-command; 1 with ``--exit-code`` if the layers differ."""
    found = [profile_of(args.first), profile_of(args.second)]
    first, second = (each.profile for each in found)
    difference = difference_of(first, second)
    if args.html:
        _write_page(Path(args.html), difference, _names(*found))
    if args.json:
        page = {"page": args.html} if args.html else {}
        print(json.dumps({**difference.to_json(), **page}, indent=1))
    else:
        print("\n".join(difference_lines(difference, Terminal.of_stdout())))
        if args.html:
            print(f"\npage: {args.html}")
    return int(bool(args.exit_code) and first.digest != second.digest)


def _names(first: ResolvedProfile, second: ResolvedProfile) -> tuple[str, str]:
    """What they are called, files with their folders where they are called alike."""
    if first.name != second.name:
        return first.name, second.name
    a, b = (f"{each.path.absolute().parent.name}/{each.path.name}" for each in (first, second))
    return a, b


def _write_page(path: Path, difference: ProfileDifference, names: tuple[str, str]) -> None:
    check_page_file(path)
    write_page(path, difference_page(difference, names))
