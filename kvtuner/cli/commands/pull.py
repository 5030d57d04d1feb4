"""``kvtuner pull``: a profile of the hub, checked and kept."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.hub import pull
from kvtuner.exported_configs.sharing.reference import HubReference, parse_reference
from kvtuner.exported_configs.signing.signature_bundle import SUFFIX as SIGNATURE_SUFFIX
from kvtuner.pipeline.progress import say
from kvtuner.report.formatting import printable
from kvtuner.run_folder import write_atomically

if TYPE_CHECKING:
    from argparse import Namespace

    from kvtuner.exported_configs.sharing.profile_store import FetchedProfile


def run(args: Namespace) -> int:
    """Run the sub-command."""
    reference = parse_reference(args.reference)
    if not isinstance(reference, HubReference):
        there = f"; {args.reference} is on this machine, add @main for the hub's" if _is_here(args.reference) else ""
        raise ProfileError(f"{args.reference} is no profile of the hub; write owner/name[@revision][:path]{there}")
    copies = [] if args.out is None else [Path(args.out), Path(args.out + SIGNATURE_SUFFIX)]
    for copy in copies:
        if os.path.lexists(copy) and not args.force:
            raise ProfileError(f"{copy} is there already; name another --out, or overwrite it with --force")
    pulled = pull(reference)
    for note in pulled.notes:
        say(note)
    kept = pulled.stored
    if copies:
        _copy(kept, *copies)
    path, profile = (copies or [kept.path])[0], kept.load()
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


def _is_here(name: str) -> bool:
    return os.path.exists(name.partition("#")[0])


def _copy(kept: FetchedProfile, profile: Path, signature: Path) -> None:
    """Copy a kept profile with its signature; another's that lies there goes."""
    data = kept.path.read_bytes()
    load_profile(data)
    write_atomically(profile, data)
    source = kept.path.with_name(kept.path.name + SIGNATURE_SUFFIX)
    if source.exists():
        write_atomically(signature, source.read_bytes())
    else:
        signature.unlink(missing_ok=True)
