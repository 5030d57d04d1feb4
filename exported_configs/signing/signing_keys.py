"""Public keys and certificates, with the rules that the library that signs leaves out. Knows nothing of profiles."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from kvtuner.errors import SignatureError

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

MAX_KEY_BYTES: Final = 2**20
_CURVES: Final = ("secp256r1", "secp384r1", "secp521r1")
_ISSUER_OIDS: Final = ("1.3.6.1.4.1.57264.1.8", "1.3.6.1.4.1.57264.1.1")


def public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """The public key of a PEM file.

    Raises:
        SignatureError: no file, no PEM, or no key of P-256, P-384 or P-521.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    data = _read_pem(path, "a public key")
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SignatureError(f"{path} is no public key that can be read: {first(error)}; give a PEM file") from error
    return _elliptic(path, key)


def certificates(path: Path) -> list[x509.Certificate]:
    """The certificates of a PEM file, one at least.

    Raises:
        SignatureError: no file, or none in it.
    """
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(_read_pem(path, "certificates"))
    except ValueError as error:
        raise SignatureError(f"{path} holds no certificate that can be read: {first(error)}; give PEM") from error


def leaf(der: bytes) -> x509.Certificate:
    """The signer's certificate of a bundle, with a key that the library can check.

    Raises:
        SignatureError: no certificate, or one without a key of P-256, P-384 or P-521.
    """
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        certificate = x509.load_der_x509_certificate(der)
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SignatureError(f"the signature's certificate cannot be read: {first(error)}; sign again") from error
    _elliptic("the signature's certificate", key)
    return certificate


def check_use(certificate: x509.Certificate) -> None:
    """Check that a certificate's uses allow signatures, by the library's rule.

    Raises:
        SignatureError: they do not, so that no signature by it is ever good; or nobody can tell.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    try:
        extensions = certificate.extensions
    except (ValueError, x509.DuplicateExtension) as error:
        raise SignatureError(
            f"the signer's certificate has extensions that cannot be read ({first(error)}); use another"
        ) from error
    found = [extension.value for extension in extensions]
    uses = [use.digital_signature for use in found if isinstance(use, x509.KeyUsage)]
    uses += [ExtendedKeyUsageOID.CODE_SIGNING in use for use in found if isinstance(use, x509.ExtendedKeyUsage)]
    if not any(uses):
        raise SignatureError(
            f"the certificate of {subject(certificate)!a} is not for signing; use one with digital signature among its"
            " uses"
        )


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


def first(error: Exception) -> str:
    """The first sentence of what cryptography says: the others point to its documentation."""
    return str(error).partition(". ")[0] or type(error).__name__


def _read_pem(path: Path, what: str) -> bytes:
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


def _elliptic(place: Path | str, key: object) -> ec.EllipticCurvePublicKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES:
        return key
    found = f"one of {key.curve.name}" if isinstance(key, ec.EllipticCurvePublicKey) else type(key).__name__
    raise SignatureError(f"{place}: the key must be of P-256, P-384 or P-521, not {found}; make another")
