"""A page as it is stored outside of this process: a header that says what it is, by which weights, then its bytes.

Whoever reads one back believes nothing: another file's bytes, another model's page, a page under another key, half a
page and a flipped bit are told apart from the page that was asked for. The checksum is against accidents; who may
write to a storage is trusted, as SGLang trusts them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

Fault = Literal["truncated", "magic", "version", "length", "identity", "key", "checksum", "unreadable"]
FAULTS: Final = get_args(Fault)

MAGIC: Final = b"KVTPAGE\0"
VERSION: Final = 1
_FIELDS: Final = struct.Struct("<8sHH4xQ32s16s")
_CHECKSUM_BYTES: Final = 16
HEADER_BYTES: Final = 96
"""The size of a header, a multiple of the rows' alignment; bytes beyond its fields are zero and checked with them."""
_CHECKSUM_AT: Final = HEADER_BYTES - _CHECKSUM_BYTES
_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_BLOCK_BYTES: Final = 1 << 25
"""The bytes that are copied on the device at a time."""
_MIX: Final = -0x61C8864680B583EB
"""The odd integer at 2**64 / golden ratio, as int64: multiples of it are spread over all bits."""


def identity_digest(fields: Mapping[str, Any]) -> bytes:
    """32 bytes that differ wherever two pages of the same tokens may not stand for each other."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


def seal(stored: Tensor, identity: bytes, key: str) -> None:
    """Fill in the header of a page, uint8 [HEADER_BYTES + page_bytes], that will be stored under a key."""
    page = stored.numpy()
    header = _FIELDS.pack(MAGIC, VERSION, HEADER_BYTES, len(page) - HEADER_BYTES, identity, _key_digest(key))
    header = header.ljust(_CHECKSUM_AT, b"\0")
    page[:HEADER_BYTES] = memoryview(header + _checksum(header, page[HEADER_BYTES:]))


def fault_of(stored: Tensor, identity: bytes, key: str) -> Fault | None:
    """The fault of uint8 bytes of any length, read under a key for a page of an identity; None if there is none."""
    page = stored.numpy()
    if len(page) < HEADER_BYTES:
        return "truncated"
    header = page[:_CHECKSUM_AT].tobytes()
    magic, version, header_bytes, page_bytes, its_identity, its_key = _FIELDS.unpack_from(header)
    faults: dict[Fault, bool] = {
        "magic": magic != MAGIC,
        "version": (version, header_bytes) != (VERSION, HEADER_BYTES),
        "length": page_bytes != len(page) - HEADER_BYTES,
        "identity": its_identity != identity,
        "key": its_key != _key_digest(key),
        "checksum": page[_CHECKSUM_AT:HEADER_BYTES].tobytes() != _checksum(header, page[HEADER_BYTES:]),
    }
    return next((fault for fault, is_there in faults.items() if is_there), None)


def _key_digest(key: str) -> bytes:
    return xxhash.xxh3_128_digest(key.encode())


def _checksum(header: bytes, page: Any) -> bytes:
    digest = xxhash.xxh3_128(header)
    digest.update(memoryview(page))
    return digest.digest()


def weights_fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of a model's weights: names, shapes, dtypes and a sum over all words, each times its own factor.

    It is no cryptographic hash: it tells apart models, not forgers.
    """
    # Only the sum of a tensor leaves the device. It is of integers, so that the order of additions does not matter.
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_weighted_sum(tensor.detach())}\n".encode())
    return digest.hexdigest()


def _weighted_sum(tensor: Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    tensor = tensor.view(-1) if tensor.is_contiguous() else tensor
    rows = max(1, _BLOCK_BYTES * len(tensor) // tensor.nbytes)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    begun = 0
    for block in tensor.split(rows):
        flat = block.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        # The widest words that the block is whole of.
        word = next(dtype for size, dtype in _WORDS if flat.numel() % size == 0)
        words = flat.view(word).to(torch.int64)
        # A factor for every place, so that words that trade places change the sum.
        factors = torch.arange(begun, begun + len(words), device=tensor.device) * _MIX
        total += (words * ((factors ^ (factors >> 29)) | 1)).sum()
        begun += len(words)
    return int(total)
