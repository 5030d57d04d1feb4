"""What distinguishes a model's weights from any other's, cheaply: pages of one must never be read by the other."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_BLOCK_BYTES: Final = 1 << 25
"""Bounds the copies that are made on the device."""
_MIX: Final = -0x61C8864680B583EB
"""2**64 / golden ratio, odd, as int64: multiples of it are spread over all bits."""


def weights_fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of named tensors: names, shapes, dtypes and a sum over all their words, each times its own factor.

    Every tensor is read once where it lies, a block at a time, and only its sum leaves the device. Sums are of
    integers, so they do not depend on the order in which a device adds. They are no cryptographic hash: they tell apart
    models, not forgers.
    """
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
        word = next(dtype for size, dtype in _WORDS if flat.numel() % size == 0)
        words = flat.view(word).to(torch.int64)
        factors = torch.arange(begun, begun + len(words), device=tensor.device) * _MIX
        total += (words * (factors ^ (factors >> 29) | 1)).sum()
        begun += len(words)
    return int(total)
