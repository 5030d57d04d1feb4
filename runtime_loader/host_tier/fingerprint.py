"""What distinguishes a model's weights from any other's, cheaply: pages of one must never be read by the other."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_BLOCK_WORDS: Final = 1 << 22
"""Bounds the copies that are made on the device: 32 MiB each."""


def weights_fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of named tensors: names, shapes, dtypes and a sum over all their bits.

    Every tensor is read once where it lies and only its sum leaves the device. Sums are of integers, so they do not
    depend on the order in which a device adds. They are no cryptographic hash: they tell apart models, not forgers.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(_bit_sums(tensor.detach()).cpu().numpy().tobytes())
    return digest.hexdigest()


def _bit_sums(tensor: Tensor) -> Tensor:
    """Two wrapping sums of a tensor's words, [2] int64: plain, and of their squares, which sees words trade bits."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    word = next(dtype for size, dtype in _WORDS if flat.numel() % size == 0)
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for block in flat.view(word).split(_BLOCK_WORDS):
        wide = block.to(torch.int64)
        sums += torch.stack((wide.sum(), (wide * wide).sum()))
    return sums
