"""``kvtuner show``: a profile, or the profiles of a run folder, in the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvtuner.cli.profile_text import describe, printable, summary
from kvtuner.errors import ProfileError
from kvtuner.evaluation.evaluation_text import evaluation_lines
from kvtuner.exported_configs.evaluation import SUFFIX, evaluation_files, load_evaluation
from kvtuner.exported_configs.load import load_profile

if TYPE_CHECKING:
    from argparse import Namespace

    from kvtuner.exported_configs.evaluation import Evaluation
    from kvtuner.exported_configs.profile import Profile


def run(args: Namespace) -> int:
    """Run the sub-command."""
    files = profile_files(Path(args.path))
    profiles = [load_profile(file) for file in files]
    evaluations = [_evaluations(file, profile) for file, profile in zip(files, profiles, strict=True)]
    if args.json:
        facts = [
            {**summary(profile), "evaluations": [each.model_dump(mode="json") for each in found]}
            for profile, found in zip(profiles, evaluations, strict=True)
        ]
        print(json.dumps(facts[0] if len(facts) == 1 else facts, indent=1))
        return 0
    for number, (profile, found) in enumerate(zip(profiles, evaluations, strict=True)):
        print("\n" * bool(number) + describe(profile))
        for evaluation in found:
            print("\n" + "\n".join(map(printable, evaluation_lines(evaluation, profile))))
    return 0


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


def profile_files(path: Path) -> list[Path]:
    """The file itself, or the profiles of a run folder.

    Raises:
        ProfileError: a folder without a profile.
    """
    if not path.is_dir():
        return [path]
    files = [file for file in sorted(path.glob("profile*.json")) if SUFFIX not in file.name]
    if not files:
        raise ProfileError(f"{path} holds no profile.json yet; run `kvtuner search --out {path}` to its end first")
    return files
