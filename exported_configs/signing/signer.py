"""Signing and checking a file by OpenSSF's model-signing: a key, a certificate or Sigstore. Knows nothing of profiles.

The library does both; what it leaves out is here: bounds, and refusals in one line. Whoever calls this has asked
`require_library` for it.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from kvtuner.errors import SignatureError
from kvtuner.exported_configs.profile.document import first_bytes, one_line

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

        config, key, certificate = signing.Config(), self.private_key, self.certificate
        if key is None:
            seconds = PERSON_SECONDS if self.identity_token is None else NETWORK_SECONDS
            account = {"identity_token": self.identity_token, "use_ambient_credentials": True}
            return call_with_timeout(lambda: config.use_sigstore_signer(**account).sign(file, signature), seconds)
        if certificate is None:
            if self.password is None:
                password = "name its password's variable with --password-env if it has one"
            else:  # OpenSSL takes one wrong password in 256 for right, and then calls the key malformed
                password = "the right password if it has one, or none"
            advice = f"give the PEM file of a key {_CURVES}, and {password}"
        elif self.chain:
            advice = f"give the key of {certificate}, {_CURVES}"
        else:
            raise SignatureError("a certificate needs those above it: add --certificate-chain")
        with _refusing(f"{key} cannot sign", advice):
            if certificate is None:
                config.use_elliptic_key_signer(private_key=_bounded(key), password=self.password)
            else:
                _check_use(x509.load_pem_x509_certificate(_bounded(certificate).read_bytes()).extensions)
                config.use_certificate_signer(
                    private_key=_bounded(key),
                    signing_certificate=certificate,
                    certificate_chain=[*map(_bounded, self.chain)],
                )
            config.sign(file, signature)


@dataclass(frozen=True, slots=True)
class SignerIdentity:
    """Whose signature a file must have.

    Attributes:
        kind: The kind of the signature: ``key``, ``chain`` or ``sigstore``.
        parts: The path of a public key, or those of trusted certificates; for Sigstore a name, such as a mail address,
            and the service that vouched for it, such as ``https://accounts.google.com``.
    """

    kind: str
    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``key:PATH``, ``chain:PATH[,PATH]`` or ``sigstore:NAME,ISSUER``, or raise `SignatureError`."""
        kind, _, rest = text.partition(":")
        parts = tuple(rest.split(","))
        if "\0" not in text and all(part.strip() for part in parts):
            if (kind == "key" and len(parts) == 1) or kind == "chain":
                return cls(kind, tuple(map(os.path.expanduser, parts)))
            if kind == "sigstore" and len(parts) == 2 and parts[1].startswith("https://"):
                return cls(kind, parts)
        forms = "key:PUBLIC.pem, chain:ROOT.pem[,MORE.pem] or sigstore:NAME,https://ISSUER"
        raise SignatureError(f"an identity is {forms}, not {ascii(text)[:100]}")

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(self.parts)}"

    def verify(self, file: Path, signature: Path, certificate: bytes) -> None:
        """Check that this identity signed a file, or raise `SignatureError`; Sigstore's servers check theirs.

        The library takes a chain of certificates as of the day on which the signer's certificate began, so a
        certificate that has expired since is good, and none is looked up as revoked. `certificate` is the signer's in
        DER, for a chain.
        """
        from cryptography import x509
        from model_signing import verifying

        config = verifying.Config()

        def check_sigstore() -> None:
            name, issuer = self.parts
            config.use_sigstore_verifier(identity=name, oidc_issuer=issuer).verify(file, signature)

        with _refusing(f"it is not by {self}", f"trust only whom the publisher names, by a key {_CURVES}"):
            if self.kind == "sigstore":
                return call_with_timeout(check_sigstore, NETWORK_SECONDS)
            paths = [_bounded(Path(part)) for part in self.parts]
            if self.kind == "key":
                config.use_elliptic_key_verifier(public_key=paths[0])
            else:
                _check_use(x509.load_der_x509_certificate(certificate).extensions)
                config.use_certificate_verifier(certificate_chain=paths)
            config.verify(file, signature)


def certificate_name(der: bytes) -> str:
    """The name in a certificate: its alternative names with Sigstore's issuer, or its subject."""
    from cryptography import x509

    with _refusing("the signature's certificate cannot be read", "sign the profile again"):
        certificate = x509.load_der_x509_certificate(der)
        names: list[str] = []
        for extension in certificate.extensions:
            if isinstance(extension.value, x509.SubjectAlternativeName):
                kinds = x509.RFC822Name | x509.UniformResourceIdentifier
                names += [name.value for name in extension.value if isinstance(name, kinds)]
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
    # Its client's errors have no base of their own, and the network's are others.
    modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    if not isinstance(error, OSError | EOFError) and "sigstore" not in modules:
        raise error
    # The first error alone says little.
    reason = ": ".join(one_line(cause) for cause in (error, error.__cause__) if cause is not None)
    raise SignatureError(f"Sigstore refuses, or cannot be reached: {reason}; check the network") from error


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


def _bounded(path: Path) -> Path:
    """The path of a PEM file that the library may read whole."""
    read_bounded(path, MAX_PEM_BYTES, "PEM file")
    return path


def read_bounded(path: Path, max_bytes: int, noun: str, *, if_absent: str = "give its path") -> bytes:
    """The content of a file, or `SignatureError` where it is absent, unreadable or too large."""
    try:
        data = first_bytes(path, max_bytes + 1)
    except FileNotFoundError as error:
        raise SignatureError(f"{path}: there is no such {noun}; {if_absent}") from error
    except OSError as error:
        raise SignatureError(f"{path}: the {noun} cannot be read ({error.strerror}); give a file") from error
    if len(data) > max_bytes:
        raise SignatureError(
            f"{path}: a {noun} has at most {max_bytes} bytes, but this is larger; fetch it again, or give another file"
        )
    return data


def _check_use(extensions: Iterable[Any]) -> None:
    """Refuse what the library refuses only after signing, and with warnings beside its error."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    for extension in extensions:
        match extension.value:
            case x509.KeyUsage(digital_signature=True):
                return
            case x509.ExtendedKeyUsage() as uses if ExtendedKeyUsageOID.CODE_SIGNING in uses:
                return
    raise SignatureError("the certificate is not for signing; use one with digital signature among its uses")
