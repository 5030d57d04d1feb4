"""Elliptic-curve keys and certificates in PEM files, checked one rule at a time. Knows nothing of profiles.

The library that signs takes whatever a file holds; here every way in which it may not fit has its own words.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from kvtuner.errors import SignatureError

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

CURVES: Final = ("secp256r1", "secp384r1", "secp521r1")
MAX_KEY_BYTES: Final = 2**20
_ISSUER_OIDS: Final = ("1.3.6.1.4.1.57264.1.8", "1.3.6.1.4.1.57264.1.1")


def private_key(path: Path, password: bytes | None) -> ec.EllipticCurvePrivateKey:
    """The private key of a PEM file.

    Raises:
        SignatureError: no file, no PEM, a wrong password or none, or no key of P-256, P-384 or P-521.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    data = read_pem(path, "a private key")
    try:
        key = serialization.load_pem_private_key(data, password)
    except TypeError as error:
        way = "name its password's variable with --password-env" if password is None else "leave out --password-env"
        raise SignatureError(f"{path} cannot be opened: {error}; {way}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SignatureError(f"{path} is no private key that can be read: {_first(error)}; give a PEM file") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SignatureError(_no_curve(path, type(key).__name__))
    _check_curve(path, key.curve)
    return key


def public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """The public key of a PEM file.

    Raises:
        SignatureError: no file, no PEM, or no key of P-256, P-384 or P-521.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    data = read_pem(path, "a public key")
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SignatureError(f"{path} is no public key that can be read: {_first(error)}; give a PEM file") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise SignatureError(_no_curve(path, type(key).__name__))
    _check_curve(path, key.curve)
    return key


def certificates(path: Path) -> list[x509.Certificate]:
    """The certificates of a PEM file, one at least.

    Raises:
        SignatureError: no file, or none in it.
    """
    from cryptography import x509

    data = read_pem(path, "certificates")
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise SignatureError(f"{path} holds no certificate that can be read: {_first(error)}; give PEM") from error


def leaf(der: bytes) -> x509.Certificate:
    """The signer's certificate of a bundle, with a key that the library can check.

    Raises:
        SignatureError: no certificate, or one without a key of P-256, P-384 or P-521.
    """
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        certificate = x509.load_der_x509_certificate(der)
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SignatureError(f"the signature's certificate cannot be read: {_first(error)}; sign again") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise SignatureError(_no_curve("the signature's certificate", type(key).__name__))
    _check_curve("the signature's certificate", key.curve)
    return certificate


def may_sign(certificate: x509.Certificate) -> bool:
    """Whether a certificate's uses allow signatures, by the library's rule."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    extensions = certificate.extensions
    try:
        if extensions.get_extension_for_class(x509.KeyUsage).value.digital_signature:
            return True
    except x509.ExtensionNotFound:
        pass
    try:
        uses = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return False
    return ExtendedKeyUsageOID.CODE_SIGNING in uses


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """SHA-256 of a public key's PEM text, hexadecimal: what a signature calls the key by."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def subject(certificate: x509.Certificate) -> str:
    """Who a certificate is of: its alternative names with Sigstore's issuer, or its subject."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return certificate.subject.rfc4514_string() or "a certificate without a name"
    said = [*names.get_values_for_type(x509.RFC822Name), *names.get_values_for_type(x509.UniformResourceIdentifier)]
    issuer = _sigstore_issuer(certificate)
    return ", ".join(said + [issuer] * bool(issuer)) or certificate.subject.rfc4514_string()


def read_pem(path: Path, what: str) -> bytes:
    """The bytes of a small file.

    Raises:
        SignatureError: it cannot be read, or is larger than 1 MiB.
    """
    try:
        with path.open("rb") as handle:
            data = handle.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise SignatureError(f"{path} cannot be read ({error.strerror}); give the PEM file of {what}") from error
    if len(data) > MAX_KEY_BYTES:
        raise SignatureError(f"{path} has more than {MAX_KEY_BYTES} bytes; give the PEM file of {what}")
    return data


def _sigstore_issuer(certificate: x509.Certificate) -> str:
    """The extension is a text since 2022, in DER; the older one holds the bare text."""
    from cryptography import x509

    for oid in _ISSUER_OIDS:
        try:
            value = certificate.extensions.get_extension_for_oid(x509.ObjectIdentifier(oid)).value
        except x509.ExtensionNotFound:
            continue
        raw = value.value if isinstance(value, x509.UnrecognizedExtension) else b""
        start = raw.find(b"https://")
        return raw[start:].decode("utf-8", "replace") if start >= 0 else ""
    return ""


def _check_curve(place: Path | str, curve: ec.EllipticCurve) -> None:
    if curve.name not in CURVES:
        raise SignatureError(_no_curve(place, f"one of {curve.name}"))


def _no_curve(place: Path | str, found: str) -> str:
    return f"{place}: the key must be of P-256, P-384 or P-521 ({', '.join(CURVES)}), not {found}; make another"


def _first(error: Exception) -> str:
    """The first sentence of what cryptography says: the others point to its documentation."""
    return str(error).partition(". ")[0] or type(error).__name__
