"""The file of a signature: a Sigstore bundle that names one file by its SHA-256. Knows nothing of keys or trust.

A bundle may be hostile. Unknown and duplicate fields and other spellings of base64 are refused, so that the library
that checks the signature reads the same statement, by the same signer, in the same bytes.
"""

import base64
import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, AliasPath, BeforeValidator, Field, ValidationError, model_validator

from kvtuner.errors import ProfileError, SignatureError
from kvtuner.exported_configs.profile.document import DocumentKind, explain, read_document
from kvtuner.exported_configs.profile.field_types import StrictModel

SIGNATURE_SUFFIX: Final = ".sig"
AGAIN: Final = "sign the profile again"
SIGNATURE: Final = DocumentKind("signature", AGAIN, 2**20, re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}"))


def _decode(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"must be base64 ({error})") from error


def _check_name(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"must name a file, not {ascii(name)[:60]}")
    return name


_Base64 = Annotated[bytes, BeforeValidator(_decode)]
_Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_FileName = Annotated[str, Field(max_length=255), AfterValidator(_check_name)]


# Unsigned parts are a `StrictModel`: anybody may have edited them, and no second spelling of a field may reach a more
# lenient reader.
class _Signed(StrictModel, extra="ignore"):
    """A part that is signed: a later release of the library may add fields to it."""


class _Resource(_Signed):
    name: Literal["."]  # the file itself, and not one in a folder
    algorithm: Literal["sha256"]
    digest: _Hex


class _Serialization(_Signed):
    method: Literal["files"]
    hash_type: Literal["sha256"]
    # The library hands these to its hashing without looking at their types.
    allow_symlinks: bool
    ignore_paths: list[str] = Field(default=[])


class _Predicate(_Signed):
    serialization: _Serialization
    resources: Annotated[list[_Resource], Field(min_length=1, max_length=1)]


class _Subject(_Signed):
    name: _FileName
    sha256: str = Field(validation_alias=AliasPath("digest", "sha256"))


class _Statement(_Signed):
    """The signed part of a signature: the name of a file, only for messages, and its SHA-256."""

    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    predicate_type: Literal["https://model_signing/signature/v1.0"] = Field(alias="predicateType")
    predicate: _Predicate
    subject: Annotated[list[_Subject], Field(min_length=1, max_length=1)]


class _PublicKey(StrictModel):
    hint: _Hex


class _Certificate(StrictModel):
    der: _Base64 = Field(alias="rawBytes")


class _CertificateChain(StrictModel):
    certificates: Annotated[list[_Certificate], Field(min_length=1)]


class _Material(StrictModel):
    """The signer: a key, a certificate with others above it, or one that Sigstore made."""

    key: _PublicKey | None = Field(None, alias="publicKey")
    chain: _CertificateChain | None = Field(None, alias="x509CertificateChain")
    sigstore: _Certificate | None = Field(None, alias="certificate")
    log_entries: Any = Field(None, alias="tlogEntries")
    timestamps: Any = Field(None, alias="timestampVerificationData")

    @model_validator(mode="after")
    def _check(self) -> Self:
        count = 3 - [self.key, self.chain, self.sigstore].count(None)
        if count != 1:
            raise ValueError(f"must hold a key's hint or certificates, not {count} of them")
        return self


class _Envelope(StrictModel):
    statement: Annotated[_Statement, BeforeValidator(lambda text: read_document(_decode(text), SIGNATURE))] = Field(
        alias="payload"
    )
    type: Literal["application/vnd.in-toto+json"] = Field(alias="payloadType")
    signatures: Annotated[list[Any], Field(min_length=1, max_length=1)]


class Bundle(StrictModel):
    """The content of a signature that nobody has checked yet."""

    media_type: Any = Field(None, alias="mediaType")
    material: _Material = Field(alias="verificationMaterial")
    envelope: _Envelope = Field(alias="dsseEnvelope")

    @property
    def name(self) -> str:
        """The name of the signed file."""
        return self.envelope.statement.subject[0].name

    @property
    def sha256(self) -> str:
        """The SHA-256 of the signed file, in hexadecimal."""
        return self.envelope.statement.predicate.resources[0].digest

    @property
    def kind(self) -> str:
        """The kind of identity that signed: ``key``, ``chain`` or ``sigstore``."""
        if self.material.key is not None:
            return "key"
        return "sigstore" if self.material.chain is None else "chain"

    @property
    def key_hint(self) -> str | None:
        """The SHA-256 of the public key's PEM text, in hexadecimal; None where a certificate signed."""
        return self.material.key.hint if self.material.key else None

    @property
    def certificate(self) -> bytes:
        """The signer's certificate in DER; empty where a key signed."""
        signer = self.material.chain.certificates[0] if self.material.chain else self.material.sigstore
        return signer.der if signer else b""


def read_bundle(data: bytes) -> Bundle:
    """Read a signature's file; `SignatureError` above 1 MiB, damaged, or not about one file by its SHA-256."""
    try:
        return Bundle.model_validate(read_document(data, SIGNATURE))
    except ValidationError as error:
        raise SignatureError(f"the signature's {explain(error)}; {AGAIN}") from error
    except ProfileError as error:
        raise SignatureError(f"the signature {error}") from error
