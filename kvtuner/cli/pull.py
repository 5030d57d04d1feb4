"""``kvtuner pull``: a profile of the hub, checked and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvtuner.cli.profile_text import printable
from kvtuner.cli.session import say
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.hub import pull
from kvtuner.exported_configs.reference import HubReference, parse_reference
from kvtuner.run_folder import write_atomically

if TYPE_CHECKING:
    from argparse import Namespace


def run(args: Namespace) -> int:
    """Run the sub-command."""
    reference = parse_reference(args.reference)
    if not isinstance(reference, HubReference):
        raise ProfileError(f"{args.reference} is no profile of the hub; write owner/name[@revision][:path]")
    pulled = pull(reference)
    for note in pulled.notes:
        say(note)
    kept, profile = pulled.stored, pulled.stored.load()
    path = kept.path
    if args.out:
        path = Path(args.out)
        write_atomically(path, kept.path.read_bytes())
    if args.json:
        facts = {
            "file": str(path),
            "digest": profile.digest,
            "model": profile.model.id,
            "repo": kept.origin.repo,
            "commit": kept.origin.commit,
            "path": kept.origin.path,
            "notes": list(pulled.notes),
        }
        print(json.dumps(facts, indent=1))
    else:
        print(f"{path}: valid, {profile.digest}, for {printable(profile.model.id)}, from {kept.origin}")
    return 0
