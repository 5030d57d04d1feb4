"""A recipe: how a method stores the keys and values of every layer. Knows nothing of models or of measuring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

EXACT_BITS: Final = 16
WORD_BITS: Final = 16
"""The bits of a scale, a minimum, a zero point or a norm, which every method here stores in half precision."""


@dataclass(frozen=True, slots=True)
class ExactTokens:
    """The tokens that a query reads exactly because its cache has not quantized them, or never does.

    Attributes:
        sinks: The first tokens, which are never quantized.
        recent: The last tokens that a query reads exactly, its own included.
        tile: The tokens that are quantized together, once all of them are there.
        after_reading: Whether a token's own query still reads what its arrival lets the cache quantize.
    """

    sinks: int = 0
    recent: int = 0
    tile: int = 1
    after_reading: bool = False

    def mask(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Whether the query of each token in `rows` reads the tokens `keys` exactly, [rows, keys]."""
        arrived = rows if self.after_reading else rows + 1
        quantized = torch.minimum(arrived // self.tile * self.tile, rows + 1 - self.recent)
        return (keys >= quantized.unsqueeze(-1)) | (keys < self.sinks)

    def held(self, num_tokens: int) -> float:
        """The tokens that a cache of `num_tokens` holds exactly, the mean over how full its last tile is."""
        recent = self.recent - 1 if self.after_reading and self.recent else self.recent
        return min(num_tokens, self.sinks + max(recent, (self.tile - 1) / 2))

    @property
    def is_empty(self) -> bool:
        """Whether every query reads all tokens quantized, its own included."""
        return self == ExactTokens()


class Quantizer(Protocol):
    """What a method does to the keys or the values of one layer."""

    def read_back(self, x: Tensor) -> Tensor:
        """The numbers that are read where x [batch, num_kv_heads, tokens, head_dim] was written, float32."""
        ...

    def bits(self, head_dim: int) -> float:
        """The stored bits of an element, scales included."""
        ...


@dataclass(frozen=True, slots=True)
class StoredSide:
    """The keys or the values of a layer: how they are quantized, and which tokens are not."""

    quantizer: Quantizer
    exact: ExactTokens = field(default_factory=ExactTokens)

    def stored_bits(self, head_dim: int, num_tokens: int) -> float:
        """The stored bits of an element in a cache of so many tokens; exact tokens have no codes."""
        share = self.exact.held(num_tokens) / num_tokens
        return share * EXACT_BITS + (1 - share) * self.quantizer.bits(head_dim)


StoredLayer = tuple[StoredSide, StoredSide]
"""The keys and the values of a layer."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A method with its settings.

    Attributes:
        name: The method and its settings, as the table shows them.
        family: The method.
        source: The paper or the code that describes the recipe.
        layers: Every layer, in order.
    """

    name: str
    family: str
    source: str
    layers: Sequence[StoredLayer]

    def stored_bits(self, head_dim: int, v_head_dim: int, num_tokens: int) -> float:
        """The stored bits of an element, the mean over keys and values of all layers."""
        total = sum(
            head_dim * k.stored_bits(head_dim, num_tokens) + v_head_dim * v.stored_bits(v_head_dim, num_tokens)
            for k, v in self.layers
        )
        return total / len(self.layers) / (head_dim + v_head_dim)


def half(x: Tensor) -> Tensor:
    """Numbers as half precision stores them, in float32."""
    return x.to(torch.float16).to(torch.float32)
