"""Grids that `judge_grids.py` compares with the fitted ones: of any number of levels, halved bases, trellis codes.

They are written for judging alone, in float32 without a fixed order of sums: no host has to repeat them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor

from kvtuner.grid_fit import MAX_GAIN
from kvtuner.precision import WIDE_WORD_BITS
from kvtuner.quant import IDENTITY, QuantSpec, Transform, hadamard
from kvtuner.zero_points import LARGEST_SCALE, LAST_ZERO_POINT, nearest_scale

if TYPE_CHECKING:
    from collections.abc import Sequence

WORD_BITS: Final = WIDE_WORD_BITS
"""A scale and a minimum, fp16 each; a trellis has a scale and a mean."""
NUM_PASSES: Final = 3
START_SHARE: Final = {2: 0.45, 3: 0.6, 4: 0.7, 8: 0.875, 16: 0.9375}
"""The share of a group's range that the first grid covers, by levels; from 4 on those of `grid_fit`."""


class Grid(Protocol):
    """A grid takes stored-space numbers [..., channels] to what is read of them."""

    def read(self, y: Tensor) -> Tensor:
        """The numbers that a reader sees, float32, same shape."""

    def stored_bits(self, channels: int) -> int:
        """Bits of the codes and words of a head."""


def fp16(x: Tensor) -> Tensor:
    """The nearest fp16 number, as float32."""
    return x.clamp(-65504, 65504).half().float()


def unbiased_slope(y: Tensor, codes: Tensor) -> Tensor:
    """The slope of the least-squares line through `y` over `codes`, rescaled to be unbiased along what was written.

    As `grid_fit` does it, the rescale widens the line by at most `MAX_GAIN`.
    """
    from_mean, from_middle = y - y.mean(-1, keepdim=True), codes - codes.mean(-1, keepdim=True)
    covariance = (from_mean * from_middle).sum(-1, keepdim=True).clamp_min(1e-12)
    least_squares = covariance / from_middle.square().sum(-1, keepdim=True).clamp_min(1e-12)
    return torch.minimum(from_mean.square().sum(-1, keepdim=True) / covariance, least_squares * MAX_GAIN)


def line_through(y: Tensor, codes: Tensor) -> Tensor:
    """What is read of `codes` with that slope through the means of both, in words of 32 bits."""
    scale = fp16(unbiased_slope(y, codes))
    return codes * scale + fp16(y.mean(-1, keepdim=True) - scale * codes.mean(-1, keepdim=True))


@dataclass(frozen=True)
class Levels:
    """A grid of `levels` equal steps whose scale and minimum are fitted: ternary where there are three.

    Attributes:
        parts: The groups of a head, each with a word.
        word_bits: The bits of a word: 32 for a scale and a minimum, 16 for a shortened scale and a zero point as in
            `kvtuner.zero_points`.
    """

    levels: int
    parts: int = 1
    word_bits: int = WIDE_WORD_BITS

    def read(self, y: Tensor) -> Tensor:
        """The numbers that a reader sees."""
        return self._read_groups(y.unflatten(-1, (self.parts, -1))).flatten(-2)

    def _read_groups(self, y: Tensor) -> Tensor:
        low, high, top = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True), self.levels - 1
        scale = ((high - low) * START_SHARE[self.levels] / top).clamp_min(1e-12)
        minimum = (low + high) / 2 - scale * top / 2
        for _ in range(NUM_PASSES):
            codes = ((y - minimum) / scale).round().clamp(0, top)
            middle, mean = codes.mean(-1, keepdim=True), y.mean(-1, keepdim=True)
            spread = (codes - middle).square().sum(-1, keepdim=True).clamp_min(1e-12)
            slope = ((codes - middle) * (y - mean)).sum(-1, keepdim=True) / spread
            scale = torch.where(slope > 1e-12, slope, scale)
            minimum = mean - scale * middle
        if self.word_bits == WIDE_WORD_BITS:
            return line_through(y, codes)
        # The place of zero among the codes, in 1/32 of them.
        unit = self.levels / (LAST_ZERO_POINT + 1)
        zero = (-minimum / scale / unit).round().clamp(0, LAST_ZERO_POINT) * unit
        codes = (y / scale + zero).round().clamp(0, top)
        return (codes - zero) * nearest_scale(unbiased_slope(y, codes).clamp(max=LARGEST_SCALE)).float()

    def code_bits(self, channels: int) -> int:
        """Bits of the codes: five ternary ones in a byte."""
        return 8 * -(-channels // 5) if self.levels == 3 else channels * (self.levels - 1).bit_length()

    def stored_bits(self, channels: int) -> int:
        """Bits of the codes and words of a head."""
        return self.code_bits(channels) + self.parts * self.word_bits


@dataclass(frozen=True)
class Halves:
    """The first half of the channels on one grid, after a Hadamard of its own; the second on another, or at its mean.

    `transform_halves` takes values to a basis in which the second half is weak.
    """

    strong: Levels
    weak: Levels | None

    def read(self, y: Tensor) -> Tensor:
        """The numbers that a reader sees."""
        half = y.shape[-1] // 2
        strong = hadamard(self.strong.read(hadamard(y[..., :half])))
        weak = y[..., half:]
        return torch.cat(
            (strong, torch.zeros_like(weak) if self.weak is None else hadamard(self.weak.read(hadamard(weak)))), -1
        )

    def stored_bits(self, channels: int) -> int:
        """Bits of the codes and words of both halves."""
        return sum(grid.stored_bits(channels // 2) for grid in (self.strong, self.weak) if grid is not None)


@dataclass(frozen=True)
class Trellis:
    """Trellis codes of `bits` bits: a shift register of 256 states, 2**bits edges from each, found by Viterbi.

    An edge's value is a quantile of the Gaussian, dealt by a fixed permutation. A token's path ends in the state in
    which it begins, so that nothing but its codes is stored (QTIP, arXiv 2406.11235, with its approximate algorithm).
    """

    bits: int
    states: int = 256

    def stored_bits(self, channels: int) -> int:
        """Bits of the codes, and of a scale and a mean."""
        return channels * self.bits + WORD_BITS

    @cached_property
    def values(self) -> Tensor:
        """Each edge has its value, [2**bits, states >> bits, 2**bits] by a state's high and low bits, and new ones."""
        edges, branches = self.states << self.bits, 1 << self.bits
        quantiles = (torch.arange(edges, dtype=torch.float64) + 0.5) / edges
        values = torch.erfinv(2 * quantiles - 1) * math.sqrt(2)
        order = torch.randperm(edges, generator=torch.Generator().manual_seed(1))
        return values[order].float().view(branches, self.states // branches, branches)

    def read(self, y: Tensor) -> Tensor:
        """The numbers that a reader sees."""
        mean = y.mean(-1, keepdim=True)
        rms = (y - mean).square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
        rows = ((y - mean) / rms).reshape(-1, y.shape[-1])
        path = torch.cat([self._closed_path(part.T.contiguous()).T for part in rows.split(512)])
        return line_through(y, path.view_as(y))

    def _closed_path(self, columns: Tensor) -> Tensor:
        """The values [channels, rows] on a path from a state to itself."""
        half = len(columns) // 2
        free = torch.zeros(self.states, columns.shape[1])
        _, states = self._best_path(columns.roll(half, dims=0), free, None)
        closed = torch.full_like(free, 1e9).scatter_(0, states[half : half + 1], 0.0)
        return self._best_path(columns, closed, states[half])[0]

    def _best_path(self, columns: Tensor, start: Tensor, end: Tensor | None) -> tuple[Tensor, Tensor]:
        """The values on the best path and its states [channels, rows] before them, from costs [states, rows]."""
        branches, groups, _ = self.values.shape
        costs = [start]
        for column in columns:
            # A state is reached from those that differ in their highest bits alone.
            before, best = costs[-1].view(branches, groups, 1, -1), None
            for high in range(branches):
                edges = (column - self.values[high].unsqueeze(-1)).square_().add_(before[high])
                best = edges if best is None else torch.minimum(best, edges)
            assert best is not None
            costs.append(best.flatten(0, 1))
        state = costs[-1].argmin(0) if end is None else end
        path, states, rows = (
            torch.empty_like(columns),
            torch.empty(columns.shape, dtype=torch.int64),
            torch.arange(columns.shape[1]),
        )
        for channel in reversed(range(len(columns))):
            group, branch = state // branches, state % branches
            values = self.values[:, group, branch]  # [branches, rows]
            errors = costs[channel].view(branches, groups, -1)[:, group, rows] + (columns[channel] - values).square()
            best_branch = errors.argmin(0)
            path[channel] = values.gather(0, best_branch[None])[0]
            state = states[channel] = best_branch * groups + group
        return path, states


@dataclass(frozen=True)
class Basis:
    """Values of each head in a basis of its own: ``(v - mean) A^T``, [num_kv_heads, head_dim, head_dim]."""

    mean: Tensor
    matrix: Tensor
    inverse: Tensor

    @classmethod
    def between(cls, mean: Tensor, covariance: Tensor, reader: Tensor, ridge: float = 1e-4) -> Basis:
        """The basis in which values and their readers have the same diagonal second moments, the largest first.

        What stands last is small times unread: the least loss of a reader that is quadratic in `reader`.

        Args:
            mean: The mean value of each head, float64 [num_kv_heads, head_dim].
            covariance: The covariance of values, [num_kv_heads, head_dim, head_dim].
            reader: The second moment of what reads them.
            ridge: A share of the mean diagonal, added to both.
        """
        identity = torch.eye(mean.shape[-1], dtype=torch.float64)
        covariance, reader = (
            s + ridge * s.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * identity for s in (covariance, reader)
        )
        energy, vectors = torch.linalg.eigh(covariance)
        root = vectors * energy.clamp_min(0).sqrt().unsqueeze(-2) @ vectors.mT
        energy, vectors = torch.linalg.eigh(root @ reader @ root)
        energy, vectors = energy.flip(-1).clamp_min(1e-30), vectors.flip(-1)
        matrix = energy.pow(0.25).unsqueeze(-1) * (vectors.mT @ torch.linalg.inv(root))
        # A geometric mean of 1, so that fp16 words are at ease.
        matrix = matrix / (energy.log().mean(-1) / 4).exp()[..., None, None]
        return cls(mean.float(), matrix.float(), torch.linalg.inv(matrix).float())

    def apply(self, x: Tensor) -> Tensor:
        """Values [..., num_kv_heads, head_dim] in the basis, float32."""
        return torch.einsum("...hd,hed->...he", x.float() - self.mean, self.matrix)

    def invert(self, y: Tensor) -> Tensor:
        """Back to model space."""
        return torch.einsum("...he,hde->...hd", y, self.inverse) + self.mean


@dataclass(frozen=True)
class Judged:
    """A side of a layer on a judged grid; it takes the place of a `QuantSpec` in a simulation."""

    grid: Grid
    transform: Transform | Basis = IDENTITY

    def simulate(self, x: Tensor) -> Tensor:
        """The numbers that a reader of keys or values [..., num_kv_heads, head_dim] sees, model space."""
        return self.transform.invert(self.grid.read(self.transform.apply(x)))


@dataclass(frozen=True)
class ByHead:
    """A side of a layer of which every head has a storage of its own; None is exact."""

    heads: Sequence[QuantSpec | Judged | None] = field(default_factory=tuple)

    def simulate(self, x: Tensor) -> Tensor:
        """The numbers that a reader sees."""
        read = x.float().clone()
        for spec in set(self.heads) - {None}:
            assert spec is not None
            mine = [head for head, other in enumerate(self.heads) if other is spec]
            read[..., mine, :] = spec.simulate(x)[..., mine, :]
        return read
