"""Who signs a file, and whether they did: a key, a certificate, or Sigstore without a key. Knows nothing of profiles.

OpenSSF's model-signing does both. Whoever calls this has asked `require_library` for it.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvtuner.errors import SignatureError
from kvtuner.exported_configs.signing import signing_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvtuner.exported_configs.signing.signature_bundle import Bundle

NETWORK_SECONDS: Final = 60.0
"""That Sigstore's servers get: some of its requests have no end of their own."""
PERSON_SECONDS: Final = 600.0
"""That somebody gets to log in."""


class Signer(Protocol):
    """Signs one file."""

    def sign(self, file: Path, signature: Path) -> None:
        """Write the signature of a file.

        Raises:
            SignatureError: it cannot be made.
        """


@dataclass(frozen=True, slots=True)
class KeySigner:
    """A private key in a PEM file.

    Attributes:
        private_key: of P-256, P-384 or P-521.
        password: of the file; None where it is not encrypted.
    """

    private_key: Path
    password: bytes | None = None

    def sign(self, file: Path, signature: Path) -> None:
        """See `Signer`."""
        from model_signing import signing

        with _opening(self.private_key, "the PEM file of a key of P-256, P-384 or P-521"):
            config = _config(signing).use_elliptic_key_signer(private_key=self.private_key, password=self.password)
        config.sign(file, signature)


@dataclass(frozen=True, slots=True)
class CertificateSigner:
    """A private key with the certificate of its owner.

    Attributes:
        private_key: not encrypted: the library opens no others here.
        certificate: of that key.
        chain: files with the certificates above it, the root's at least.
    """

    private_key: Path
    certificate: Path
    chain: tuple[Path, ...]

    def sign(self, file: Path, signature: Path) -> None:
        """See `Signer`."""
        from model_signing import signing

        signing_keys.check_use(signing_keys.certificates(self.certificate)[0])
        if not self.chain:
            raise SignatureError("a certificate needs those above it: add --certificate-chain")
        for path in self.chain:
            signing_keys.certificates(path)
        with _opening(self.private_key, f"the key of {self.certificate}, of P-256, P-384 or P-521"):
            config = _config(signing).use_certificate_signer(
                private_key=self.private_key, signing_certificate=self.certificate, certificate_chain=self.chain
            )
        config.sign(file, signature)


@dataclass(frozen=True, slots=True)
class SigstoreSigner:
    """Sigstore's public servers: somebody logs in, and a log that everybody can read keeps the signature.

    Attributes:
        identity_token: of OpenID Connect; None for the one of a CI job, or else a browser.
    """

    identity_token: str | None = None

    def sign(self, file: Path, signature: Path) -> None:
        """See `Signer`."""
        from model_signing import signing

        def sign() -> None:
            config = _config(signing)
            config.use_sigstore_signer(identity_token=self.identity_token, use_ambient_credentials=True)
            config.sign(file, signature)

        bounded(sign, PERSON_SECONDS if self.identity_token is None else NETWORK_SECONDS)


def check_key(file: Path, signature: Path, bundle: Bundle, public_key: Path) -> None:
    """Check a signature by a key; `bundle` is what it says, as `read_bundle` read it.

    Raises:
        SignatureError: it is not by that key.
    """
    from model_signing import verifying

    wanted = signing_keys.fingerprint(signing_keys.public_key(public_key))
    if bundle.key_hint != wanted:
        raise SignatureError(
            f"it is by another key, {bundle.key_hint[:12]}..., than {public_key}, {wanted[:12]}...; trust no other key"
            " than the one that its publisher names"
        )
    with _refusals(str(public_key)):
        _config(verifying).use_elliptic_key_verifier(public_key=public_key).verify(file, signature)


def check_chain(file: Path, signature: Path, bundle: Bundle, trusted: Sequence[Path]) -> None:
    """Check a signature by a certificate whose chain ends in a trusted one.

    The library takes the chain as of the day on which the signer's certificate began, so a certificate that has expired
    since is good, and none is looked up as revoked.

    Raises:
        SignatureError: it is not by such a certificate.
    """
    from model_signing import verifying
    from OpenSSL import crypto

    for path in trusted:
        signing_keys.certificates(path)
    certificate = signing_keys.leaf(bundle.certificates[0])
    signing_keys.check_use(certificate)
    who = ascii(signing_keys.subject(certificate))
    try:
        with _refusals(who):
            _config(verifying).use_certificate_verifier(certificate_chain=trusted).verify(file, signature)
    except crypto.X509StoreContextError as error:
        names = ", ".join(map(str, trusted))
        raise SignatureError(f"the certificate of {who} is not below {names}: {error}; trust its root") from error


def check_sigstore(file: Path, signature: Path, name: str, issuer: str, seconds: float = NETWORK_SECONDS) -> None:
    """Check a signature by somebody whom Sigstore knows; asks its servers for the keys that they use now.

    Raises:
        SignatureError: it is by somebody else, or the servers cannot be reached.
    """
    from model_signing import verifying

    def check() -> None:
        _config(verifying).use_sigstore_verifier(identity=name, oidc_issuer=issuer).verify(file, signature)

    with _refusals(name):
        bounded(check, seconds)


def require_library() -> None:
    """Import what signatures need.

    Raises:
        SignatureError: it is not installed.
    """
    try:
        import cryptography  # noqa: F401  # for the keys
        import OpenSSL  # noqa: F401  # model-signing 1.1 imports it and does not say so
        from model_signing import signing, verifying  # noqa: F401
    except ImportError as error:
        raise SignatureError(f"signatures need a library ({error}): pip install 'kvtuner[sign]'") from error


def _config(module: Any) -> Any:
    """A configuration of the library, whose types are half a truth: it calls passwords texts."""
    return module.Config()


def bounded(call: Callable[[], object], seconds: float) -> None:
    """Call Sigstore's servers.

    Raises:
        SignatureError: the call fails, or takes longer.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # raised again below, in the thread that waits
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True, name="kvtuner-sigstore")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise SignatureError(f"Sigstore did not answer within {seconds:g} s; check the network, or sign with a key")
    for error in failures:
        if not _is_of_sigstore(error):
            raise error
        raise SignatureError(f"Sigstore refuses, or cannot be reached: {_chain(error)}; check the network") from error


def _is_of_sigstore(error: BaseException) -> bool:
    """Its errors have no base of all, and some no public name; those of the network are OSErrors, or EOFError."""
    return isinstance(error, OSError | EOFError) or any(
        kind.__module__.partition(".")[0] == "sigstore" for kind in type(error).__mro__
    )


@contextmanager
def _opening(private_key: Path, wanted: str) -> Iterator[None]:
    """Name the file where the library finds no key that it can use."""
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        yield
    except OSError as error:
        raise SignatureError(f"{private_key} cannot be read ({error.strerror}); give {wanted}") from error
    except TypeError as error:  # a password that is missing, or one too many
        way = "name its password's variable with --password-env, or leave that out where the key is not encrypted"
        raise SignatureError(f"{private_key} cannot be opened: {error}; {way}") from error
    except AttributeError as error:
        if error.name != "curve":
            raise
        raise SignatureError(
            f"{private_key} is of no elliptic curve ({type(error.obj).__name__}); give {wanted}"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SignatureError(f"{private_key} cannot sign: {signing_keys.first(error)}; give {wanted}") from error


@contextmanager
def _refusals(who: str) -> Iterator[None]:
    """Word the ways in which the library finds that a signature is not by whom it names."""
    from cryptography.exceptions import InvalidSignature
    from OpenSSL import crypto

    try:
        yield
    except InvalidSignature as error:
        raise SignatureError(f"it names {who}, but that key did not make it: it is forged or damaged") from error
    except (ValueError, crypto.Error) as error:
        said = " ".join(str(error).split())[:200]
        raise SignatureError(f"the library refuses it: {said}; sign the profile again") from error


def _chain(error: BaseException) -> str:
    """An error and what it came from, for the first alone says little."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 3:
        texts.append(" ".join(str(cause).split())[:200] or type(cause).__name__)
        cause = cause.__cause__
    return ": ".join(texts)
