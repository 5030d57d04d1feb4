"""Asking the library whether a signature is that of a key, of a certificate or of somebody whom Sigstore knows.

Every function returns if it is and raises `SignatureError` if it is not. What the signature says must have been read by
`read_bundle` before. Knows nothing of profiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtuner.errors import SignatureError
from kvtuner.exported_configs import signing_keys
from kvtuner.exported_configs.signing_library import NETWORK_SECONDS, bounded, library

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvtuner.exported_configs.signature_bundle import Bundle


def check_key(file: Path, signature: Path, bundle: Bundle, public_key: Path) -> None:
    """Check a signature by a key.

    Args:
        file: what was signed.
        signature: its signature.
        bundle: what that says.
        public_key: PEM file.

    Raises:
        SignatureError: it is not by that key.
    """
    verifying = library().verifying
    from cryptography.exceptions import InvalidSignature

    wanted = signing_keys.fingerprint(signing_keys.public_key(public_key))
    if bundle.key_hint != wanted:
        raise SignatureError(
            f"it is by another key, {bundle.key_hint[:12]}..., than {public_key}, {wanted[:12]}...; trust no other key"
            " than the one that its publisher names"
        )
    config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    try:
        config.verify(file, signature)
    except InvalidSignature as error:
        raise SignatureError(f"it names {public_key}, but that key did not make it: it is forged or damaged") from error
    except ValueError as error:
        raise SignatureError(_unread(error)) from error


def check_chain(file: Path, signature: Path, bundle: Bundle, trusted: Sequence[Path]) -> None:
    """Check a signature by a certificate whose chain ends in a trusted one.

    The library takes the chain as of the day on which the signer's certificate began, so a certificate that has expired
    since is good, and none is looked up as revoked.

    Args:
        file: what was signed.
        signature: its signature.
        bundle: what that says.
        trusted: PEM files of certificates, the root's among them.

    Raises:
        SignatureError: it is not by such a certificate.
    """
    verifying = library().verifying
    from cryptography.exceptions import InvalidSignature
    from OpenSSL import crypto

    for path in trusted:
        signing_keys.certificates(path)
    certificate = signing_keys.leaf(bundle.certificates[0])
    who = signing_keys.subject(certificate)
    if not signing_keys.may_sign(certificate):
        raise SignatureError(f"the certificate of {who!a} is not for signing (no digital signature among its uses)")
    config = verifying.Config().use_certificate_verifier(certificate_chain=trusted)
    try:
        config.verify(file, signature)
    except crypto.X509StoreContextError as error:
        names = ", ".join(map(str, trusted))
        raise SignatureError(f"the certificate of {who!a} is not below {names}: {error}; trust its root") from error
    except InvalidSignature as error:
        raise SignatureError(f"it names {who!a}, but that key did not make it: it is forged or damaged") from error
    except (ValueError, crypto.Error) as error:
        raise SignatureError(_unread(error)) from error


def check_sigstore(file: Path, signature: Path, name: str, issuer: str, seconds: float = NETWORK_SECONDS) -> None:
    """Check a signature by somebody whom Sigstore knows; asks its servers for the keys that they use now.

    Args:
        file: what was signed.
        signature: its signature.
        name: a mail address, or the address of a workflow.
        issuer: who vouched for it.
        seconds: that the servers get.

    Raises:
        SignatureError: it is by somebody else, or the servers cannot be reached.
    """
    verifying = library().verifying

    def check() -> None:
        verifying.Config().use_sigstore_verifier(identity=name, oidc_issuer=issuer).verify(file, signature)

    try:
        bounded(check, seconds)
    except ValueError as error:
        raise SignatureError(_unread(error)) from error


def _unread(error: Exception) -> str:
    return f"the library refuses it: {' '.join(str(error).split())[:200]}; sign the profile again"
