"""The file of a signature: a Sigstore bundle that names one file by its SHA-256. Knows nothing of keys or trust.

A bundle may be hostile. Duplicate fields and other spellings of base64 are refused, so that the library that checks the
signature reads the same statement in the same bytes; it checks the other fields.
"""

import base64
import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AliasPath, BaseModel, BeforeValidator, Field, ValidationError, model_validator

from kvtuner.errors import ProfileError, SignatureError
from kvtuner.exported_configs.profile.document import DocumentKind, explain, read_document

SUFFIX: Final = ".sig"
AGAIN: Final = "sign the profile again"
SIGNATURE: Final = DocumentKind("signature", AGAIN, 2**20, re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}"))


def _decode(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"must be base64 ({error})") from error


_Base64 = Annotated[bytes, BeforeValidator(_decode)]
_One = Annotated[list[Any], Field(min_length=1, max_length=1)]
_Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _at(first: str, *others: str | int, default: Any = ...) -> Any:
    return Field(default, validation_alias=AliasPath(first, *others))


class Statement(BaseModel, strict=True, extra="ignore", frozen=True):
    """The signed part of a signature: the name of a file, only for messages, and its SHA-256 in hexadecimal."""

    type: Literal["https://in-toto.io/Statement/v1"] = _at("_type")
    predicate_type: Literal["https://model_signing/signature/v1.0"] = _at("predicateType")
    subjects: _One = _at("subject")
    name: Annotated[str, Field(max_length=255)] = _at("subject", 0, "name")
    resources: _One = _at("predicate", "resources")
    algorithm: Literal["sha256"] = _at("predicate", "resources", 0, "algorithm")
    sha256: _Hex = _at("predicate", "resources", 0, "digest")


class Bundle(BaseModel, strict=True, extra="forbid", frozen=True):
    """The content of a signature that nobody has checked yet.

    Attributes:
        key_hint: The SHA-256 of the public key's PEM text, hexadecimal; None where a certificate signed.
        chain_certificate: The signer's certificate in DER, where others stand above it.
        sigstore_certificate: The signer's certificate in DER, where Sigstore made it.
    """

    media_type: Any = Field(None, alias="mediaType")
    material: dict[str, Any] = Field(alias="verificationMaterial")
    key_hint: _Hex | None = _at("verificationMaterial", "publicKey", "hint", default=None)
    chain_certificate: _Base64 | None = _at(
        "verificationMaterial", "x509CertificateChain", "certificates", 0, "rawBytes", default=None
    )
    sigstore_certificate: _Base64 | None = _at("verificationMaterial", "certificate", "rawBytes", default=None)
    statement: Annotated[Statement, BeforeValidator(lambda text: read_document(_decode(text), SIGNATURE))] = _at(
        "dsseEnvelope", "payload"
    )
    payload_type: Literal["application/vnd.in-toto+json"] = _at("dsseEnvelope", "payloadType")
    signatures: _One = _at("dsseEnvelope", "signatures")

    @model_validator(mode="after")
    def _check(self) -> Self:
        signers = [self.key_hint, self.chain_certificate, self.sigstore_certificate]
        count = len(signers) - signers.count(None)
        if count != 1:
            raise ValueError(f"verification material must hold a key's hint or certificates, not {count} of them")
        return self

    @property
    def kind(self) -> str:
        """The kind of identity that signed: ``key``, ``chain`` or ``sigstore``."""
        if self.key_hint is not None:
            return "key"
        return "sigstore" if self.chain_certificate is None else "chain"

    @property
    def certificate(self) -> bytes:
        """The signer's certificate in DER; empty where a key signed."""
        return self.chain_certificate or self.sigstore_certificate or b""


def read_bundle(data: bytes) -> Bundle:
    """Read a signature's file; `SignatureError` above 1 MiB, damaged, or not about one file by its SHA-256."""
    try:
        return Bundle.model_validate(read_document(data, SIGNATURE))
    except ValidationError as error:
        raise SignatureError(f"the signature's {explain(error)}; {AGAIN}") from error
    except ProfileError as error:
        raise SignatureError(f"the signature {error}") from error
