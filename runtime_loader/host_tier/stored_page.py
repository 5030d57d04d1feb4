"""A page as it is stored outside of this process: a header that says what it is, then its bytes.

Whoever reads one back believes nothing: another file's bytes, another model's page, a page under another key, half a
page and a flipped bit are told apart from the page that was asked for. The checksum is against accidents; who may
write to a storage is trusted, as SGLang trusts them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import xxhash

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

Fault = Literal["truncated", "magic", "version", "length", "identity", "key", "checksum", "unreadable"]
FAULTS: Final = get_args(Fault)

MAGIC: Final = b"KVTPAGE\0"
VERSION: Final = 1
_FIELDS: Final = struct.Struct("<8sHH4xQ32s16s")
_CHECKSUM_BYTES: Final = 16
HEADER_BYTES: Final = 96
"""A multiple of the rows' alignment; what the fields do not fill is zero and checked with them."""
_CHECKSUM_AT: Final = HEADER_BYTES - _CHECKSUM_BYTES


def identity_digest(fields: Mapping[str, Any]) -> bytes:
    """32 bytes that differ wherever two pages of the same tokens may not stand for each other."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


def seal(stored: Tensor, identity: bytes, key: str) -> None:
    """Fill in the header of a stored page.

    Args:
        stored: The page behind room for its header, uint8 [HEADER_BYTES + page_bytes] on the host.
        identity: The page's identity, by `identity_digest`.
        key: The key under which the page will be stored.
    """
    page = stored.numpy()
    header = _FIELDS.pack(MAGIC, VERSION, HEADER_BYTES, len(page) - HEADER_BYTES, identity, _key_digest(key))
    header = header.ljust(_CHECKSUM_AT, b"\0")
    page[:HEADER_BYTES] = memoryview(header + _checksum(header, page[HEADER_BYTES:]))


def fault_of(stored: Tensor, identity: bytes, key: str) -> Fault | None:
    """What is wrong with bytes that were read for a page; None if nothing is.

    Args:
        stored: The bytes that were read, uint8, of any length.
        identity: The identity that the page must have.
        key: The key that it was read under.
    """
    page = stored.numpy()
    if len(page) < HEADER_BYTES:
        return "truncated"
    header = page[:_CHECKSUM_AT].tobytes()
    magic, version, header_bytes, page_bytes, found_identity, found_key = _FIELDS.unpack_from(header)
    faults: tuple[tuple[Fault, bool], ...] = (
        ("magic", magic != MAGIC),
        ("version", (version, header_bytes) != (VERSION, HEADER_BYTES)),
        ("length", page_bytes != len(page) - HEADER_BYTES),
        ("identity", found_identity != identity),
        ("key", found_key != _key_digest(key)),
    )
    for fault, is_there in faults:
        if is_there:
            return fault
    if page[_CHECKSUM_AT:HEADER_BYTES].tobytes() != _checksum(header, page[HEADER_BYTES:]):
        return "checksum"
    return None


def _key_digest(key: str) -> bytes:
    return xxhash.xxh3_128_digest(key.encode())


def _checksum(header: bytes, page: Any) -> bytes:
    digest = xxhash.xxh3_128(header)
    digest.update(memoryview(page))
    return digest.digest()
