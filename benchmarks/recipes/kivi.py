"""KIVI (arXiv 2402.02750, and its `models/llama_kivi.py`): keys by channel, values by token, the last tokens exact.

A channel's keys of 32 tokens share a scale, and so do 32 channels of a token's values. Keys wait exactly until there
are 128 of them, and are then quantized at once; of the values the last 128 are exact. A query still reads exactly what
its own token lets the cache quantize.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from .recipe import WORD_BITS, ExactTokens, Recipe, StoredSide, half

if TYPE_CHECKING:
    from torch import Tensor

SOURCE: Final = "arXiv 2402.02750"
GROUP: Final = 32
RESIDUAL: Final = 128


def minmax(groups: Tensor, bits: int) -> Tensor:
    """What an asymmetric grid over the range of each group, the last dimension, reads back."""
    groups = groups.to(torch.float32)
    low, high = half(groups.amin(-1, keepdim=True)), groups.amax(-1, keepdim=True)
    scale = half((high - low) / (2**bits - 1))
    step = torch.where(scale == 0, torch.ones_like(scale), scale)
    return ((groups - low) / step).round().clamp(0, 2**bits - 1) * scale + low


@dataclass(frozen=True, slots=True)
class ChannelGroups:
    """Keys: a channel of `group` tokens is a group. Tokens behind the last whole group are not quantized."""

    width: int
    group: int = GROUP

    def read_back(self, x: Tensor) -> Tensor:
        """See `Quantizer`."""
        whole = x.shape[-2] // self.group * self.group
        by_channel = x[..., :whole, :].transpose(-1, -2).unflatten(-1, (-1, self.group))
        stored = minmax(by_channel, self.width).flatten(-2).transpose(-1, -2)
        return torch.cat((stored, x[..., whole:, :].to(torch.float32)), dim=-2)

    def bits(self, head_dim: int) -> float:
        """See `Quantizer`."""
        return self.width + 2 * WORD_BITS / self.group


@dataclass(frozen=True, slots=True)
class TokenGroups:
    """`group` channels of a token are a group."""

    width: int
    group: int = GROUP

    def read_back(self, x: Tensor) -> Tensor:
        """See `Quantizer`."""
        return minmax(x.unflatten(-1, (-1, min(self.group, x.shape[-1]))), self.width).flatten(-2)

    def bits(self, head_dim: int) -> float:
        """See `Quantizer`."""
        return self.width + 2 * WORD_BITS / min(self.group, head_dim)


def kivi(bits: int, num_layers: int) -> Recipe:
    """KIVI with so many bits in every layer."""
    keys = StoredSide(ChannelGroups(bits), ExactTokens(tile=RESIDUAL, after_reading=True))
    values = StoredSide(TokenGroups(bits), ExactTokens(recent=RESIDUAL + 1, after_reading=True))
    return Recipe(f"KIVI-{bits}", "KIVI", SOURCE, ((keys, values),) * num_layers)
