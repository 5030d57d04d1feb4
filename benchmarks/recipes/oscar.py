"""OSCAR (arXiv 2605.17757, and `oscar_calibration.py` at FutureMLS-Lab/OSCAR): a basis of what attention reads.

A layer's keys are rotated by the eigenvectors of its queries' covariance, and values by those of their own, weighted by
how strongly queries see their keys; then by a Hadamard, whose channels are put in bit-reversed order of eigenvalues.
Of each token and head, what lies beyond a quantile of the magnitudes (.96 of keys, .92 of values) is clipped; the rest
has four levels over its range. The first 64 and the last 256 tokens are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kvtuner.quant import hadamard

from .recipe import WORD_BITS, ExactTokens, Recipe, StoredSide, half

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .moments import LayerMoments

SOURCE: Final = "arXiv 2605.17757"
K_CLIP, V_CLIP = 0.96, 0.92
SINKS, RECENT = 64, 256


def bit_reversed(count: int) -> Tensor:
    """The numbers below a power of two, each with its bits in reverse."""
    digits = count.bit_length() - 1
    return torch.tensor([int(f"{number:0{digits}b}"[::-1], 2) for number in range(count)])


def basis(covariance: Tensor) -> Tensor:
    """The rotation [head_dim, head_dim] of row vectors, float32."""
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    order = torch.empty(len(values), dtype=torch.int64)
    order[bit_reversed(len(values))] = values.argsort(descending=True)
    return hadamard(vectors.to(torch.float32))[:, order]


@dataclass(frozen=True, slots=True, eq=False)
class SpectralRotation:
    """A rotation of row vectors, a clip by quantile, and two bits."""

    matrix: Tensor
    clip: float
    width: int = 2

    def read_back(self, x: Tensor) -> Tensor:
        """See `Quantizer`."""
        y = x.to(torch.float32) @ self.matrix
        place = min(int(self.clip * y.shape[-1]), y.shape[-1] - 1)
        limit = y.abs().sort(dim=-1).values[..., place : place + 1]
        y = y.clamp(-limit, limit)
        low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
        scale = (high - low).clamp_min(1e-8) / (2**self.width - 1)
        zero = -low / scale
        codes = (y / scale + zero + 0.5).floor().clamp(0, 2**self.width - 1)
        read: Tensor = (codes - half(zero)) * half(scale) @ self.matrix.T
        return read

    def bits(self, head_dim: int) -> float:
        """See `Quantizer`."""
        return self.width + 2 * WORD_BITS / head_dim


def oscar(moments: Sequence[LayerMoments], *, window: bool) -> Recipe:
    """OSCAR at two bits, with its exact tokens or without any."""
    exact = ExactTokens(SINKS, RECENT) if window else ExactTokens()
    layers = [
        (
            StoredSide(SpectralRotation(basis(layer.query_covariance), K_CLIP), exact),
            StoredSide(SpectralRotation(basis(layer.value_covariance), V_CLIP), exact),
        )
        for layer in moments
    ]
    return Recipe(f"OSCAR{'' if window else ', no exact tokens'}", "OSCAR", SOURCE, layers)
