"""A sample of the tokens whose attention scores the candidates, each with the number of tokens it stands for.

Reading attention under 24 candidates is most of the work of a layer, and few tokens carry most of the Fisher score.
Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

TOKENS_PER_SAMPLE = 4
MIN_ROWS = 64


@dataclass(frozen=True, slots=True)
class RowSample:
    """Tokens drawn from `population` scored ones, each with the number of tokens that it stands for.

    Attributes:
        tokens: The drawn tokens in ascending order, int64 [rows] on the CPU.
        weights: One over the chance of each to be drawn, float32 [rows] on the CPU.
    """

    tokens: Tensor
    weights: Tensor
    population: int


def sample_rows(importance: Tensor, start: int, generator: torch.Generator) -> RowSample:
    """Draw one token of `TOKENS_PER_SAMPLE`, `MIN_ROWS` at least, with chances in proportion to their importance.

    The importance, [tokens] of the scored ones from `start` on, is at least 0 and finite. If all are 0, all are alike.
    """
    population = len(importance)
    rows = min(population, max(MIN_ROWS, population // TOKENS_PER_SAMPLE))
    if rows == population:
        return RowSample(torch.arange(start, start + population), torch.ones(population), population)
    drawn, weights = draw_by_importance(importance, rows, generator)
    return RowSample(start + drawn, weights, population)


def draw_by_importance(importance: Tensor, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `number` of many with chances in proportion to their importance, [population], at least 0 and finite.

    Gives their places in ascending order, int64, and one over the chance of each, float32, both [number] on the CPU,
    or fewer of both where rounding draws one twice. Systematic sampling: evenly spaced points on the running sum of
    the chances, so that places are drawn all along the population. What would have a chance above one is taken for
    certain. Sums over what is drawn, each times its weight, are without bias (Horvitz and Thompson, 1952), and vary
    least for what goes with the importance.
    """
    chances = _chances(importance.detach().to("cpu", torch.float64), number)
    points = torch.arange(number, dtype=torch.float64) + torch.rand(1, generator=generator, dtype=torch.float64)
    drawn = torch.searchsorted(chances.cumsum(0), points).clamp_(max=len(chances) - 1).unique()
    return drawn, (1.0 / chances[drawn]).float()


def _chances(importance: Tensor, rows: int) -> Tensor:
    """Chances of being drawn, in proportion to importance as far as none is above one; their sum is `rows`."""
    # A weight is one over a chance: without a floor a token of next to no importance could outweigh all others.
    floor = 1e-6 * importance.max() if bool(importance.max() > 0) else 1.0
    importance = importance.clamp_min(floor)
    certain = torch.zeros(len(importance), dtype=torch.bool)
    while True:
        left = rows - int(certain.sum())
        chances = torch.where(certain, 1.0, left * importance / importance[~certain].sum())
        newly_certain = (chances >= 1.0) & ~certain
        if not bool(newly_certain.any()):
            return chances
        certain |= newly_certain
