"""The file of a signature: a Sigstore bundle that names one file by its SHA-256. Knows nothing of keys or trust.

It may be hostile. Only what is read here is let through, in one spelling, so that the library that checks the signature
cannot read the same bytes in another way.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from kvtuner.errors import ProfileError, SignatureError
from kvtuner.exported_configs.profile.document import DocumentKind, read_document, short

Kind = Literal["key", "chain", "sigstore"]

SUFFIX: Final = ".sig"
AGAIN: Final = "sign the profile again"
SIGNATURE: Final = DocumentKind("signature", AGAIN, 2**20, re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}"))

_MATERIAL: Final[dict[str, Kind]] = {"publicKey": "key", "x509CertificateChain": "chain", "certificate": "sigstore"}
_BESIDE_MATERIAL: Final = ("tlogEntries", "timestampVerificationData")
_PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
_STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
_PREDICATE_TYPE: Final = "https://model_signing/signature/v1.0"
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_MAX_NAME: Final = 255

PartT = TypeVar("PartT", str, dict[str, Any], list[Any])


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a signature says before anybody has checked it.

    Attributes:
        name: of the file that was signed; only for messages.
        sha256: of its content, hexadecimal.
        kind: what it was signed with.
        key_hint: SHA-256 of the public key's PEM text, hexadecimal; empty but for a key.
        certificates: DER, the signer's first; none of a key.
    """

    name: str
    sha256: str
    kind: Kind
    key_hint: str
    certificates: tuple[bytes, ...]


def read_bundle(data: bytes) -> Bundle:
    """Read the content of a signature's file.

    Raises:
        SignatureError: larger than 1 MiB, damaged, or not of one file by its SHA-256.
    """
    try:
        bundle = read_document(data, SIGNATURE)
    except ProfileError as error:
        raise SignatureError(f"the signature {error}") from error
    _only(bundle, "mediaType", "verificationMaterial", "dsseEnvelope")
    name, sha256 = _signed_file(_part(bundle, "dsseEnvelope", dict))
    material = _part(bundle, "verificationMaterial", dict)
    _only(material, *_MATERIAL, *_BESIDE_MATERIAL)
    found = [field for field in _MATERIAL if field in material]
    if len(found) != 1:
        raise SignatureError(f"the signature must hold a key's hint or certificates, not {len(found)} of them; {AGAIN}")
    kind = _MATERIAL[found[0]]
    return Bundle(name, sha256, kind, _key_hint(material, kind), _certificates(material, kind))


def _signed_file(envelope: dict[str, Any]) -> tuple[str, str]:
    """Name and SHA-256 of the one file that the envelope's statement is about."""
    _only(envelope, "payload", "payloadType", "signatures")
    if len(_part(envelope, "signatures", list)) != 1:
        raise SignatureError(f"the signature must hold one signature, not {len(envelope['signatures'])}; {AGAIN}")
    _equal(envelope, "payloadType", _PAYLOAD_TYPE)
    try:
        statement = read_document(_decoded(envelope, "payload"), SIGNATURE)
    except ProfileError as error:
        raise SignatureError(f"the signature's statement {error}") from error
    _equal(statement, "_type", _STATEMENT_TYPE)
    _equal(statement, "predicateType", _PREDICATE_TYPE)
    predicate = _part(statement, "predicate", dict)
    _check_serialization(_part(predicate, "serialization", dict))
    resource = _single(predicate, "resources")
    _equal(resource, "name", ".")  # the file itself, and not one in a folder
    _equal(resource, "algorithm", "sha256")
    sha256 = _part(resource, "digest", str)
    if _HEX.fullmatch(sha256) is None:
        raise SignatureError(f"the signature's digest must be 64 hexadecimal digits, not {short(sha256)}; {AGAIN}")
    subject = _single(statement, "subject")
    _part(_part(subject, "digest", dict), "sha256", str)
    name = _part(subject, "name", str)
    if not name.isprintable() or len(name) > _MAX_NAME:
        raise SignatureError(f"the signature must name a file, not {short(name)}; {AGAIN}")
    return name, sha256


def _check_serialization(how: dict[str, Any]) -> None:
    """The library reads these without looking at what they are."""
    _equal(how, "method", "files")
    _equal(how, "hash_type", "sha256")
    if not isinstance(how.get("allow_symlinks"), bool):
        raise SignatureError(f"the signature's allow_symlinks must be true or false; {AGAIN}")
    if not all(isinstance(path, str) for path in _part({"ignore_paths": [], **how}, "ignore_paths", list)):
        raise SignatureError(f"the signature's ignore_paths must be a list of texts; {AGAIN}")


def _key_hint(material: dict[str, Any], kind: Kind) -> str:
    if kind != "key":
        return ""
    key = _part(material, "publicKey", dict)
    _only(key, "hint")
    hint = _part(key, "hint", str)
    if _HEX.fullmatch(hint) is None:
        raise SignatureError(f"the signature must name its key by 64 hexadecimal digits, not {short(hint)}; {AGAIN}")
    return hint


def _certificates(material: dict[str, Any], kind: Kind) -> tuple[bytes, ...]:
    if kind == "key":
        return ()
    if kind == "sigstore":
        certificates: list[Any] = [_part(material, "certificate", dict)]
    else:
        chain = _part(material, "x509CertificateChain", dict)
        _only(chain, "certificates")
        certificates = _part(chain, "certificates", list)
    for certificate in certificates:
        if not isinstance(certificate, dict):
            raise SignatureError(f"the signature's certificates must be objects, not {short(certificate)}; {AGAIN}")
        _only(certificate, "rawBytes")
    if not certificates:
        raise SignatureError(f"the signature holds no certificate; {AGAIN}")
    return tuple(_decoded(certificate, "rawBytes") for certificate in certificates)


def _part(node: dict[str, Any], name: str, kind: type[PartT]) -> PartT:
    value = node.get(name)
    if not isinstance(value, kind):
        what = {str: "a text", dict: "an object", list: "a list"}[kind]
        found = "missing" if name not in node else short(value)
        raise SignatureError(f"the signature's {name} must be {what}, but is {found}; {AGAIN}")
    return value


def _single(node: dict[str, Any], name: str) -> dict[str, Any]:
    items = _part(node, name, list)
    if len(items) != 1 or not isinstance(items[0], dict):
        raise SignatureError(f"the signature must be of one file, but {name} holds {len(items)} items; {AGAIN}")
    item: dict[str, Any] = items[0]
    return item


def _only(node: dict[str, Any], *names: str) -> None:
    for name in node:
        if name not in names:
            raise SignatureError(f"the signature has an unknown field {name!r}; {AGAIN}")


def _equal(node: dict[str, Any], name: str, wanted: str) -> None:
    if node.get(name) != wanted:
        raise SignatureError(f"the signature's {name} must be {wanted!r}, not {short(node.get(name))}; {AGAIN}")


def _decoded(node: dict[str, Any], name: str) -> bytes:
    try:
        return base64.b64decode(_part(node, name, str), validate=True)
    except (binascii.Error, ValueError) as error:
        raise SignatureError(f"the signature's {name} must be base64 ({error}); {AGAIN}") from error
