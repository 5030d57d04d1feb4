"""``kvtuner show``: a profile, or the profiles of a run folder, in the terminal and as a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvtuner.cli.output_file import check_page_file, write_page
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.evaluation_record import evaluation_files, load_evaluation
from kvtuner.pipeline.inputs import profiles_of
from kvtuner.report.evaluation_report import evaluation_lines
from kvtuner.report.formatting import printable
from kvtuner.report.layer_strip import profile_strip
from kvtuner.report.profile_report import ShownProfile, describe, profile_page, summary
from kvtuner.report.terminal import Terminal

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.evaluation_record import Evaluation
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.sharing.find import ResolvedProfile


def run(args: Namespace) -> int:
    """Run the sub-command."""
    found = profiles_of(args.path)
    files, profiles = [each.path for each in found], [each.profile for each in found]
    evaluations = [_evaluations(file, profile) for file, profile in zip(files, profiles, strict=True)]
    if args.html:
        _write_page(Path(args.html), found, evaluations)
    if args.json:
        page = {"page": args.html} if args.html else {}
        facts = [
            {**summary(profile), "evaluations": [each.model_dump(mode="json") for each in measured], **page}
            for profile, measured in zip(profiles, evaluations, strict=True)
        ]
        print(json.dumps(facts[0] if len(facts) == 1 else facts, indent=1))
        return 0
    terminal = Terminal.of_stdout()
    for number, (profile, measured) in enumerate(zip(profiles, evaluations, strict=True)):
        print("\n" * bool(number) + describe(profile))
        print("\n" + "\n".join(profile_strip(profile, terminal)))
        for evaluation in measured:
            print("\n" + "\n".join(map(printable, evaluation_lines(evaluation, profile))))
    if args.html:
        print(f"\npage: {args.html}")
    return 0


def _write_page(path: Path, found: Sequence[ResolvedProfile], evaluations: Sequence[list[Evaluation]]) -> None:
    check_page_file(path)
    shown = [
        ShownProfile(each.name, each.profile, tuple(measured))
        for each, measured in zip(found, evaluations, strict=True)
    ]
    write_page(path, profile_page(shown))


def _evaluations(path: Path, profile: Profile) -> list[Evaluation]:
    """Of this profile, beside its file; one that cannot be read is said and left out."""
    found = []
    for file in evaluation_files(path):
        try:
            evaluation = load_evaluation(file)
        except ProfileError as error:
            print(f"not shown: {printable(str(error))}", file=sys.stderr)
            continue
        if evaluation.profile_digest == profile.digest:
            found.append(evaluation)
    return found
