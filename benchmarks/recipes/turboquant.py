"""TurboQuant (arXiv 2504.19874): a random rotation, then the best scalar codebook of a random direction's coordinates.

A vector is stored as its norm and, for every coordinate of its rotated direction, the nearest of 2**bits levels. For
inner products without bias one bit fewer is spent on levels; the last one is the sign of a Gaussian projection of what
is left (QJL), with the norm of that. Values have no inner product with a query, so that they are stored the first way.
The paper's 2.5 and 3.5 bits, with more levels for some channels, are not here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from .recipe import WORD_BITS, Recipe, StoredSide, half

if TYPE_CHECKING:
    from torch import Tensor

SOURCE: Final = "arXiv 2504.19874"
SEED: Final = 0
GRID_POINTS: Final = 20_001
ROUNDS: Final = 500


@cache
def rotation(head_dim: int) -> Tensor:
    """A random orthogonal matrix, float32 [head_dim, head_dim]."""
    generator = torch.Generator().manual_seed(SEED)
    orthogonal, triangle = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float64))
    # With these signs all rotations are equally likely.
    signed: Tensor = orthogonal * triangle.diagonal().sign()
    return signed.to(torch.float32)


@cache
def projection(head_dim: int) -> Tensor:
    """The Gaussian matrix of QJL, float32 [head_dim, head_dim]."""
    return torch.randn(head_dim, head_dim, generator=torch.Generator().manual_seed(SEED + 1))


@cache
def levels(width: int, head_dim: int) -> Tensor:
    """The Lloyd-Max levels of a coordinate of a uniformly random direction, ascending, float32 [2**width]."""
    x = torch.linspace(-1, 1, GRID_POINTS, dtype=torch.float64)
    density = (1 - x.square()).clamp_min(0).pow((head_dim - 3) / 2)
    mass, moment = density.cumsum(0), (density * x).cumsum(0)
    quantiles = (torch.arange(2**width, dtype=torch.float64) + 0.5) / 2**width
    found = x[torch.searchsorted(mass, quantiles * mass[-1])]
    for _ in range(ROUNDS):
        cuts = torch.searchsorted(x, (found[1:] + found[:-1]) / 2) - 1
        masses, moments = (torch.cat((s[:1] * 0, s[cuts], s[-1:])).diff() for s in (mass, moment))
        found = moments / masses
    return found.to(torch.float32)


def nearest(x: Tensor, sorted_levels: Tensor) -> Tensor:
    """The nearest level of every number."""
    return sorted_levels[torch.bucketize(x, (sorted_levels[1:] + sorted_levels[:-1]) / 2)]


@dataclass(frozen=True, slots=True)
class RandomRotation:
    """The codebook for the least squared error."""

    width: int

    def read_back(self, x: Tensor) -> Tensor:
        """See `Quantizer`."""
        x, head_dim = x.to(torch.float32), x.shape[-1]
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        direction = x / norm.clamp_min(1e-30)
        read = nearest(direction @ rotation(head_dim).T, levels(self.width, head_dim))
        return read @ rotation(head_dim) * half(norm)

    def bits(self, head_dim: int) -> float:
        """See `Quantizer`."""
        return self.width + WORD_BITS / head_dim


@dataclass(frozen=True, slots=True)
class WithSigns:
    """The codebook with one bit fewer, and the signs of a projection of the rest."""

    width: int

    def read_back(self, x: Tensor) -> Tensor:
        """See `Quantizer`."""
        x, head_dim = x.to(torch.float32), x.shape[-1]
        read = RandomRotation(self.width - 1).read_back(x)
        rest = x - read
        norm = half(torch.linalg.vector_norm(rest, dim=-1, keepdim=True))
        signs = (rest @ projection(head_dim).T).sign()
        return read + norm * math.sqrt(math.pi / 2) / head_dim * (signs @ projection(head_dim))

    def bits(self, head_dim: int) -> float:
        """See `Quantizer`."""
        return self.width + 2 * WORD_BITS / head_dim


def turboquant(bits: int, num_layers: int, *, with_signs: bool = False) -> Recipe:
    """TurboQuant with so many bits in every layer; `with_signs` stores keys for inner products without bias."""
    values = StoredSide(RandomRotation(bits))
    keys = StoredSide(WithSigns(bits)) if with_signs else values
    name = f"TurboQuant-{bits}{', keys with QJL' if with_signs else ''}"
    return Recipe(name, "TurboQuant", SOURCE, ((keys, values),) * num_layers)
