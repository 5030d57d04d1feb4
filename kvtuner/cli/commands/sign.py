"""``kvtuner sign``: a signature beside a profile, by a key, a certificate or Sigstore."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvtuner.errors import SignatureError
from kvtuner.exported_configs.sharing.find import find_profiles
from kvtuner.exported_configs.sharing.reference import FileReference, parse_reference
from kvtuner.exported_configs.signing.signature_bundle import read_bundle
from kvtuner.exported_configs.signing.signatures import sign_profile, signed_by
from kvtuner.exported_configs.signing.signers import CertificateSigner, KeySigner, SigstoreSigner
from kvtuner.report.formatting import printable

if TYPE_CHECKING:
    from argparse import Namespace

    from kvtuner.exported_configs.signing.signers import Signer


def run(args: Namespace) -> int:
    """Run the sub-command."""
    signer = signer_of(args)
    results = []
    if not isinstance(parse_reference(args.path), FileReference):
        raise SignatureError(f"a file of this machine can be signed, not {args.path}; kvtuner pull it with --out first")
    for found in find_profiles(args.path):
        signature = sign_profile(found.path, signer)
        bundle = read_bundle(signature.read_bytes())
        results.append({"file": str(found.path), "signature": str(signature), "signed_by": signed_by(bundle)})
    if args.json:
        print(json.dumps(results, indent=1))
    else:
        for result in results:
            print(f"{result['signature']}: signed by {printable(result['signed_by'])}")
    return 0


def signer_of(args: Namespace) -> Signer:
    """What the flags say to sign with.

    Raises:
        SignatureError: nothing, two ways at once, or a variable that is not set.
    """
    if bool(args.sigstore) == bool(args.private_key):
        raise SignatureError("give --private-key FILE (alone, or with --certificate), or --sigstore; one of the two")
    if args.sigstore:
        _refuse(args, "--sigstore", "password_env", "certificate", "certificate_chain")
        return SigstoreSigner(_variable(args.identity_token_env, "--identity-token-env"))
    _refuse(args, "--private-key", "identity_token_env")
    private_key = Path(args.private_key)
    if not args.certificate:
        _refuse(args, "--private-key without --certificate", "certificate_chain")
        password = _variable(args.password_env, "--password-env")
        return KeySigner(private_key, None if password is None else password.encode())
    if args.password_env:
        raise SignatureError(
            "model-signing opens no encrypted key beside a certificate: give --private-key an unencrypted one and leave"
            " out --password-env"
        )
    return CertificateSigner(private_key, Path(args.certificate), tuple(map(Path, args.certificate_chain or ())))


def _refuse(args: Namespace, way: str, *names: str) -> None:
    for name in names:
        if getattr(args, name):
            raise SignatureError(f"{way} does not take --{name.replace('_', '-')}; leave it out")


def _variable(name: str | None, flag: str) -> str | None:
    if name is None:
        return None
    if name not in os.environ:
        raise SignatureError(f"{flag} names the environment variable {name!a}, which is not set; export it first")
    return os.environ[name]
