"""``kvtuner sign`` and ``kvtuner verify``: a signature beside a profile, and whose it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtuner.cli.command import Command, add_profile
from kvtuner.errors import SignatureError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from kvtuner.exported_configs.signing.signer import Signer


def _sign(args: Namespace) -> int:
    from kvtuner.exported_configs.sharing.reference import FileReference, find_profiles, parse_reference
    from kvtuner.exported_configs.signing.profile_signature import sign_profile, signed_by
    from kvtuner.exported_configs.signing.signature_bundle import read_bundle
    from kvtuner.report.formatting import printable

    signer = _signer(args)
    results = []
    if not isinstance(parse_reference(args.path), FileReference):
        raise SignatureError(f"a file of this machine can be signed, not {args.path}; kvtuner pull it with --out first")
    for resolved in find_profiles(args.path):
        signature = sign_profile(resolved.path, signer)
        maker = signed_by(read_bundle(signature.read_bytes()))
        results.append({"file": str(resolved.path), "signature": str(signature), "signed_by": maker})
    lines = [f"{result['signature']}: signed by {printable(result['signed_by'])}" for result in results]
    print(json.dumps(results, indent=1) if args.json else "\n".join(lines))
    return 0


def _signer(args: Namespace) -> Signer:
    from kvtuner.exported_configs.signing.signer import Signer

    if bool(args.sigstore) == bool(args.private_key):
        raise SignatureError("give --private-key FILE (alone, or with --certificate), or --sigstore; one of the two")
    if args.sigstore:
        _refuse(args, "--sigstore", "password_env", "certificate", "certificate_chain")
        return Signer(identity_token=_variable(args.identity_token_env, "--identity-token-env"))
    _refuse(args, "--private-key", "identity_token_env")
    if args.certificate and args.password_env:
        raise SignatureError(
            "model-signing opens no encrypted key beside a certificate: give --private-key an unencrypted one and leave"
            " out --password-env"
        )
    if not args.certificate:
        _refuse(args, "--private-key without --certificate", "certificate_chain")
    password = _variable(args.password_env, "--password-env")
    return Signer(
        Path(args.private_key),
        password=None if password is None else password.encode(),
        certificate=Path(args.certificate) if args.certificate else None,
        chain=tuple(map(Path, args.certificate_chain or ())),
    )


def _refuse(args: Namespace, chosen: str, *names: str) -> None:
    for name in names:
        if getattr(args, name):
            raise SignatureError(f"{chosen} does not take --{name.replace('_', '-')}; leave it out")


def _variable(name: str | None, flag: str) -> str | None:
    if name is None:
        return None
    if name not in os.environ:
        raise SignatureError(f"{flag} names the environment variable {name!a}, which is not set; export it first")
    return os.environ[name]


def _verify(args: Namespace) -> int:
    from kvtuner.exported_configs.sharing.reference import find_profile
    from kvtuner.exported_configs.signing.profile_signature import verify_profile
    from kvtuner.exported_configs.signing.signer import SignerIdentity
    from kvtuner.pipeline.progress import say
    from kvtuner.report.formatting import printable

    identity = SignerIdentity.parse(args.identity)
    resolved = find_profile(args.path)
    for note in resolved.notes:
        say(printable(note))
    verified = verify_profile(resolved.path, identity)
    profile = verified.profile
    if profile.digest != resolved.profile.digest:
        raise SignatureError(f"{resolved.path} changed while it was read; run the same command again")
    facts = {
        "file": str(resolved.path),
        "digest": profile.digest,
        "model": profile.model.id,
        "identity": str(identity),
        "signed_by": verified.signed_by,
        "verified": True,
    }
    signed = f"signed by {printable(verified.signed_by)}"
    text = f"{resolved.path}: {signed}, {profile.digest}, for {printable(profile.model.id)}"
    print(json.dumps(facts, indent=1) if args.json else text)
    return 0


def _add_sign_flags(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PROFILE|RUN", help="profile.json or run folder; writes profile.json.sig")
    parser.add_argument("--private-key", metavar="FILE", help="PEM of a key of P-256, P-384 or P-521")
    parser.add_argument("--password-env", metavar="NAME", help="environment variable with the key's password")
    parser.add_argument("--certificate", metavar="FILE", help="PEM of the key's certificate; the key is not encrypted")
    parser.add_argument("--certificate-chain", metavar="FILE", nargs="+", help="PEMs of its issuers, the root's too")
    parser.add_argument("--sigstore", action="store_true", help="log in with a browser, no key; needs the network")
    parser.add_argument("--identity-token-env", metavar="NAME", help="variable with an OpenID token for --sigstore")


def _add_verify_flags(parser: ArgumentParser) -> None:
    add_profile(parser, "path")
    parser.add_argument(
        "--identity",
        metavar="WHO",
        required=True,
        help="expected signer: key:PUBLIC.pem, chain:ROOT.pem[,MORE.pem] or sigstore:NAME,https://ISSUER",
    )


COMMANDS: Final = (
    Command("sign", "sign a profile (OpenSSF model signing)", _add_sign_flags, _sign),
    Command("verify", "check a profile's signature", _add_verify_flags, _verify),
)
