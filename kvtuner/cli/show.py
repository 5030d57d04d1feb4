"""``kvtuner show``: a profile, or the profiles of a run folder, in the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvtuner.cli.profile_text import describe, summary
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.load import load_profile

if TYPE_CHECKING:
    from argparse import Namespace


def run(args: Namespace) -> int:
    """Run the sub-command."""
    files = profile_files(Path(args.path))
    profiles = [load_profile(file) for file in files]
    if args.json:
        facts = [summary(profile) for profile in profiles]
        print(json.dumps(facts[0] if len(facts) == 1 else facts, indent=1))
        return 0
    print("\n\n".join(describe(profile) for profile in profiles))
    return 0


def profile_files(path: Path) -> list[Path]:
    """The file itself, or the profiles of a run folder.

    Raises:
        ProfileError: a folder without a profile.
    """
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("profile*.json"))
    if not files:
        raise ProfileError(f"{path} holds no profile.json yet; run `kvtuner search --out {path}` to its end first")
    return files
