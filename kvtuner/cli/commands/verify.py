"""``kvtuner verify``: whether a profile is signed by who is asked for."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from kvtuner.errors import SignatureError
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.find import find_profile
from kvtuner.exported_configs.signing.signatures import SignerIdentity, verify_profile
from kvtuner.report.formatting import printable

if TYPE_CHECKING:
    from argparse import Namespace


def run(args: Namespace) -> int:
    """Run the sub-command."""
    identity = SignerIdentity.parse(args.identity)
    found = find_profile(args.path)
    for note in found.notes:
        print(printable(note), file=sys.stderr)
    path = found.path
    verified = verify_profile(path, identity)
    profile = load_profile(verified.data, path)
    if profile.digest != found.profile.digest:
        raise SignatureError(f"{path} changed while it was read; run the same command again")
    if args.json:
        facts = {
            "file": str(path),
            "digest": profile.digest,
            "model": profile.model.id,
            "identity": str(identity),
            "signed_by": verified.signed_by,
            "verified": True,
        }
        print(json.dumps(facts, indent=1))
    else:
        print(f"{path}: signed by {printable(verified.signed_by)}, {profile.digest}, for {printable(profile.model.id)}")
    return 0
