"""The file of a signature: a Sigstore bundle that names one file by its SHA-256. Knows nothing of keys or trust.

A bundle may be hostile. Only the fields below are let through, each in one spelling, so that the library that checks
the signature cannot read the same bytes in another way.
"""

import base64
import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NotRequired

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from kvtuner.errors import ProfileError, SignatureError
from kvtuner.exported_configs.profile.document import DocumentKind, explain, read_document

Kind = Literal["key", "chain", "sigstore"]

SUFFIX: Final = ".sig"
AGAIN: Final = "sign the profile again"
SIGNATURE: Final = DocumentKind("signature", AGAIN, 2**20, re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}"))

_KINDS: Final[dict[str, Kind]] = {"publicKey": "key", "x509CertificateChain": "chain", "certificate": "sigstore"}


@dataclass(frozen=True, slots=True)
class Bundle:
    """The content of a signature that nobody has checked yet.

    Attributes:
        name: The name of the file that was signed; only for messages.
        sha256: The SHA-256 of the signed content, hexadecimal.
        kind: The kind of identity that signed.
        key_hint: The SHA-256 of the public key's PEM text, hexadecimal; empty where a certificate signed.
        certificate: The signer's certificate in DER; empty where a key signed.
    """

    name: str
    sha256: str
    kind: Kind
    key_hint: str = ""
    certificate: bytes = b""


def read_bundle(data: bytes) -> Bundle:
    """Read the content of a signature's file.

    Raises:
        SignatureError: it is larger than 1 MiB, damaged, or not about one file by its SHA-256.
    """
    try:
        bundle = _BUNDLE.validate_python(read_document(data, SIGNATURE))
        statement = _STATEMENT.validate_python(read_document(bundle["dsseEnvelope"]["payload"], SIGNATURE))
    except ValidationError as error:
        raise SignatureError(f"the signature's {explain(error)}; {AGAIN}") from error
    except ProfileError as error:
        raise SignatureError(f"the signature {error}") from error
    material = bundle["verificationMaterial"]
    kinds = [kind for field, kind in _KINDS.items() if field in material]
    if len(kinds) != 1:
        raise SignatureError(f"the signature must hold a key's hint or certificates, not {len(kinds)} of them; {AGAIN}")
    name, sha256 = statement["subject"][0]["name"], statement["predicate"]["resources"][0]["digest"]
    if kinds == ["key"]:
        return Bundle(name, sha256, "key", key_hint=material["publicKey"]["hint"])
    chain = [material["certificate"]] if kinds == ["sigstore"] else material["x509CertificateChain"]["certificates"]
    return Bundle(name, sha256, kinds[0], certificate=chain[0]["rawBytes"])


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


class _PublicKey(TypedDict):
    hint: _Hex


class _Certificate(TypedDict):
    rawBytes: _Base64


class _CertificateChain(TypedDict):
    certificates: Annotated[list[_Certificate], Field(min_length=1)]


class _Material(TypedDict, total=False):
    publicKey: _PublicKey
    x509CertificateChain: _CertificateChain
    certificate: _Certificate
    tlogEntries: Any
    timestampVerificationData: Any


class _Envelope(TypedDict):
    payload: _Base64
    payloadType: Literal["application/vnd.in-toto+json"]
    signatures: Annotated[list[Any], Field(min_length=1, max_length=1)]


@with_config(ConfigDict(strict=True, extra="forbid"))
class _Bundle(TypedDict):
    mediaType: NotRequired[Any]
    verificationMaterial: _Material
    dsseEnvelope: _Envelope


class _Resource(TypedDict):
    name: Literal["."]  # the file itself, and not one in a folder
    algorithm: Literal["sha256"]
    digest: _Hex


class _Serialization(TypedDict):
    method: Literal["files"]
    hash_type: Literal["sha256"]
    # The library hands these to its hashing without looking at their types.
    allow_symlinks: bool
    ignore_paths: NotRequired[list[str]]


class _Predicate(TypedDict):
    serialization: _Serialization
    resources: Annotated[list[_Resource], Field(min_length=1, max_length=1)]


class _SubjectDigest(TypedDict):
    sha256: str


class _Subject(TypedDict):
    name: _FileName
    digest: _SubjectDigest


# A later release of the library may add fields to the statement, whose bytes are signed.
@with_config(ConfigDict(strict=True, extra="ignore"))
class _Statement(TypedDict):
    _type: Literal["https://in-toto.io/Statement/v1"]
    predicateType: Literal["https://model_signing/signature/v1.0"]
    predicate: _Predicate
    subject: Annotated[list[_Subject], Field(min_length=1, max_length=1)]


_BUNDLE: Final = TypeAdapter(_Bundle)
_STATEMENT: Final = TypeAdapter(_Statement)
