"""QuaRot (arXiv 2404.00456) and SAW-INT4 (arXiv 2604.19157): a Hadamard, then a grid for each token and head.

QuaRot rotates keys after the rotary encoding, and values; its groups of 128 channels are a head's where that has fewer.
Range ends, of which one is zero at least, are multiplied by a clip ratio of 0.95, and the zero point is an integer.
SAW-INT4 rotates keys alone, in blocks of a head here, and takes a token's plain range of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kvtuner.quant import hadamard

from .kivi import TokenGroups
from .recipe import WORD_BITS, Recipe, StoredSide, half

if TYPE_CHECKING:
    from torch import Tensor

QUAROT: Final = "arXiv 2404.00456"
SAW_INT4: Final = "arXiv 2604.19157"
GROUP: Final = 128
CLIP: Final = 0.95


@dataclass(frozen=True, slots=True)
class ClippedRotation:
    """QuaRot's quantizer."""

    width: int
    clip: float = CLIP

    def read_back(self, x: Tensor) -> Tensor:
        """See `Quantizer`."""
        groups = hadamard(x).unflatten(-1, (-1, min(GROUP, x.shape[-1])))
        low = groups.amin(-1, keepdim=True).clamp(max=0) * self.clip
        high = groups.amax(-1, keepdim=True).clamp(min=0) * self.clip
        top = 2**self.width - 1
        scale = half((high - low) / top)
        step = torch.where(scale == 0, torch.ones_like(scale), scale)
        zero = (-low / step).round()
        codes = ((groups / step).round() + zero).clamp(0, top)
        return hadamard(((codes - zero) * scale).flatten(-2))

    def bits(self, head_dim: int) -> float:
        """See `Quantizer`."""
        return self.width + 2 * WORD_BITS / min(GROUP, head_dim)


@dataclass(frozen=True, slots=True)
class PlainRotation:
    """SAW-INT4's quantizer of keys."""

    width: int = 4

    def read_back(self, x: Tensor) -> Tensor:
        """See `Quantizer`."""
        return hadamard(TokenGroups(self.width, GROUP).read_back(hadamard(x)))

    def bits(self, head_dim: int) -> float:
        """See `Quantizer`."""
        return TokenGroups(self.width, GROUP).bits(head_dim)


def quarot(bits: int, num_layers: int) -> Recipe:
    """QuaRot's cache with so many bits in every layer."""
    side = StoredSide(ClippedRotation(bits))
    return Recipe(f"QuaRot-INT{bits}", "QuaRot", QUAROT, ((side, side),) * num_layers)


def saw_int4(num_layers: int) -> Recipe:
    """SAW-INT4."""
    layer = (StoredSide(PlainRotation()), StoredSide(TokenGroups(4, GROUP)))
    return Recipe("SAW-INT4", "SAW-INT4", SAW_INT4, (layer,) * num_layers)
