"""Ways to sign: an elliptic-curve key, a certificate, or Sigstore without a key. Knows nothing of profiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvtuner.errors import SignatureError
from kvtuner.exported_configs import signing_keys
from kvtuner.exported_configs.signing_library import NETWORK_SECONDS, PERSON_SECONDS, bounded, library

if TYPE_CHECKING:
    from pathlib import Path


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
        config = library().signing.Config()
        signing_keys.private_key(self.private_key, self.password)
        config.use_elliptic_key_signer(private_key=self.private_key, password=self.password)
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
        config = library().signing.Config()
        key = signing_keys.private_key(self.private_key, None)
        certificate = signing_keys.certificates(self.certificate)[0]
        if certificate.public_key() != key.public_key():
            raise SignatureError(f"{self.certificate} is of another key than {self.private_key}; give the key's own")
        if not self.chain:
            raise SignatureError("a certificate needs those above it: add --certificate-chain")
        for path in self.chain:
            signing_keys.certificates(path)
        config.use_certificate_signer(
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
        signing = library().signing

        def sign() -> None:
            config = signing.Config()
            config.use_sigstore_signer(identity_token=self.identity_token, use_ambient_credentials=True)
            config.sign(file, signature)

        bounded(sign, PERSON_SECONDS if self.identity_token is None else NETWORK_SECONDS)
