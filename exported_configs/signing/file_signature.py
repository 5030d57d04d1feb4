"""Signing and checking a file by OpenSSF's model-signing: a key, a certificate or Sigstore. Knows nothing of profiles.

The library does both; what it leaves out is here: bounds, and refusals in one line. Whoever calls this has asked
`require_library` for it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kvtuner.errors import SignatureError
from kvtuner.exported_configs.profile.document import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cryptography import x509

    from kvtuner.exported_configs.signing.profile_signature import SignerIdentity

MAX_PEM_BYTES: Final = 2**20
NETWORK_SECONDS: Final = 60.0
"""The time that Sigstore's servers get: some of its requests have no end of their own."""
PERSON_SECONDS: Final = 600.0
"""The time that a person gets to log in."""
_CURVES: Final = "of P-256, P-384 or P-521"
_SIGSTORE_ISSUER: Final = "1.3.6.1.4.1.57264.1.8"


@dataclass(frozen=True, slots=True)
class Signer:
    """A private key in a PEM file, that key with a certificate, or, without a key, an account of Sigstore.

    Sigstore is a person or a CI job that logs in to its public servers, whose public log keeps the signature.

    Attributes:
        private_key: The key, of P-256, P-384 or P-521; beside a certificate it may not be encrypted.
        password: The password of the key's file; None where it is not encrypted.
        chain: The files of the certificates above it, the root's at least.
        identity_token: The token of OpenID Connect for Sigstore; None for the one of a CI job, or else a browser.
    """

    private_key: Path | None = None
    password: bytes | None = None
    certificate: Path | None = None
    chain: tuple[Path, ...] = ()
    identity_token: str | None = None

    def sign(self, file: Path, signature: Path) -> None:
        """Write the signature of a file, or raise `SignatureError`."""
        from cryptography import x509
        from model_signing import signing

        config = signing.Config()
        if self.private_key is None:
            seconds = PERSON_SECONDS if self.identity_token is None else NETWORK_SECONDS
            token = self.identity_token
            use_sigstore = partial(config.use_sigstore_signer, identity_token=token, use_ambient_credentials=True)
            return call_with_timeout(lambda: use_sigstore().sign(file, signature), seconds)
        advice = (
            f"give the PEM file of a key {_CURVES}, and name its password's variable with --password-env if it has one"
        )
        if self.certificate is not None:
            if not self.chain:
                raise SignatureError("a certificate needs those above it: add --certificate-chain")
            advice = f"give the key of {self.certificate}, {_CURVES}"
        for path in filter(None, (self.private_key, self.certificate, *self.chain)):
            _check_file(path)
        with _refusing(f"{self.private_key} cannot sign", advice):
            if self.certificate is None:
                config.use_elliptic_key_signer(private_key=self.private_key, password=self.password)
            else:
                _check_use(x509.load_pem_x509_certificate(self.certificate.read_bytes()))
                config.use_certificate_signer(
                    private_key=self.private_key, signing_certificate=self.certificate, certificate_chain=self.chain
                )
            config.sign(file, signature)


def check_signature(file: Path, signature: Path, identity: SignerIdentity, certificate: bytes) -> None:
    """Check that a signature of a file is by an identity, or raise `SignatureError`; Sigstore's servers check theirs.

    The library takes a chain of certificates as of the day on which the signer's certificate began, so a certificate
    that has expired since is good, and none is looked up as revoked. `certificate` is the signer's in DER, for a chain.
    """
    from cryptography import x509
    from model_signing import verifying

    config = verifying.Config()

    def check_sigstore() -> None:
        name, issuer = identity.parts
        config.use_sigstore_verifier(identity=name, oidc_issuer=issuer).verify(file, signature)

    for path in identity.paths:
        _check_file(path)
    with _refusing(f"it is not by {identity}", f"trust only whom the publisher names, by a key {_CURVES}"):
        if identity.kind == "sigstore":
            return call_with_timeout(check_sigstore, NETWORK_SECONDS)
        if identity.kind == "key":
            config.use_elliptic_key_verifier(public_key=identity.paths[0])
        else:
            _check_use(x509.load_der_x509_certificate(certificate))
            config.use_certificate_verifier(certificate_chain=identity.paths)
        config.verify(file, signature)


def certificate_name(der: bytes) -> str:
    """The name in a certificate: its alternative names with Sigstore's issuer, or its subject."""
    from cryptography import x509

    with _refusing("the signature's certificate cannot be read", "sign the profile again"):
        certificate = x509.load_der_x509_certificate(der)
        names: list[str] = []
        for extension in certificate.extensions:
            if isinstance(extension.value, x509.SubjectAlternativeName):
                for kind in (x509.RFC822Name, x509.UniformResourceIdentifier):
                    names += extension.value.get_values_for_type(kind)
            elif extension.oid.dotted_string == _SIGSTORE_ISSUER:
                # A text in DER, whose type and length stand before it.
                issuer = extension.value.public_bytes().partition(b"https://")[2]
                names.append(f"https://{issuer.decode('utf-8', 'replace')}")
        return ", ".join(names) or certificate.subject.rfc4514_string() or "a certificate without a name"


def require_library() -> None:
    """Import what signatures need, or raise `SignatureError`."""
    try:
        import cryptography  # noqa: F401
        import OpenSSL  # noqa: F401  # model-signing 1.1 imports it and does not say so
        from model_signing import signing, verifying  # noqa: F401
    except ImportError as error:
        raise SignatureError(f"signatures need a library ({error}): pip install 'kvtuner[sign]'") from error


def call_with_timeout(call: Callable[[], object], seconds: float) -> None:
    """Call Sigstore's servers; `SignatureError` where that fails or takes longer."""
    result: Future[object] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # raised again below, in the thread that waits
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name="kvtuner-sigstore").start()
    wait([result], seconds)
    if not result.done():
        raise SignatureError(f"Sigstore did not answer within {seconds:g} s; check the network, or sign with a key")
    error = result.exception()
    if error is None:
        return
    if not _is_of_sigstore(error):
        raise error
    # The first error alone says little.
    reason = ": ".join(one_line(cause) for cause in (error, error.__cause__) if cause is not None)
    raise SignatureError(f"Sigstore refuses, or cannot be reached: {reason}; check the network") from error


def _is_of_sigstore(error: BaseException) -> bool:
    """Whether Sigstore's client raised an error: these have no base of their own, and the network's are others."""
    return isinstance(error, OSError | EOFError) or any(
        kind.__module__.partition(".")[0] == "sigstore" for kind in type(error).__mro__
    )


@contextmanager
def _refusing(refusal: str, advice: str) -> Iterator[None]:
    """Turn whatever the library raises into one refusal: its errors have no base, and none of them is a consent."""
    from cryptography.exceptions import InvalidSignature

    try:
        yield
    except SignatureError:
        raise
    except InvalidSignature as error:
        raise SignatureError(f"{refusal}: that key did not make it, so it is forged or damaged") from error
    except Exception as error:
        raise SignatureError(f"{refusal}: {one_line(error)}; {advice}") from error


def _check_file(path: Path) -> None:
    """Bound what the library will read whole."""
    try:
        with path.open("rb") as handle:
            size = len(handle.read(MAX_PEM_BYTES + 1))
    except OSError as error:
        raise SignatureError(f"{path} cannot be read ({error.strerror}); give a PEM file") from error
    if size > MAX_PEM_BYTES:
        raise SignatureError(f"{path} has more than {MAX_PEM_BYTES} bytes; give a PEM file")


def _check_use(certificate: x509.Certificate) -> None:
    """Refuse what the library refuses only after signing, and with warnings beside its error."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    values = [extension.value for extension in certificate.extensions]
    uses = [value.digital_signature for value in values if isinstance(value, x509.KeyUsage)]
    uses += [ExtendedKeyUsageOID.CODE_SIGNING in value for value in values if isinstance(value, x509.ExtendedKeyUsage)]
    if not any(uses):
        raise SignatureError("the certificate is not for signing; use one with digital signature among its uses")
