"""``kvtuner export``: a profile as another tool's file, or a refusal that says what would be lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvtuner.cli.output_file import check_new
from kvtuner.exported_configs.formats.translate import write
from kvtuner.pipeline.inputs import profile_of
from kvtuner.pipeline.progress import say
from kvtuner.report.formatting import printable
from kvtuner.run_folder import write_atomically

if TYPE_CHECKING:
    from argparse import Namespace


def run(args: Namespace) -> int:
    """Run the sub-command."""
    check_new(args.out, force=args.force)
    profile = profile_of(args.profile).profile
    exported = write(profile, args.format, lossy=args.lossy)
    for note in exported.notes:
        say(f"note: {printable(note)}")
    if args.out:
        write_atomically(Path(args.out), exported.text)
    if args.json:
        facts = {"format": args.format, "file": args.out, "digest": profile.digest, "notes": list(exported.notes)}
        print(json.dumps({**facts, "text": exported.text}, indent=1))
    elif args.out:
        print(f"{args.out}: {args.format} of {profile.digest}")
    else:
        print(exported.text, end="")
    return 0
