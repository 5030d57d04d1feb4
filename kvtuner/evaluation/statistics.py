"""Means with bootstrap intervals over sequences, and rank correlation. Knows nothing of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtuner.errors import CorpusError

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEFAULT_NUM_RESAMPLES = 2000
DEFAULT_LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the ends of its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether both ends lie on the same side of zero."""
        return self.low > 0 or self.high < 0


def bootstrap_mean(
    sums: NDArray[np.float64],
    counts: NDArray[np.int64],
    *,
    num_resamples: int = DEFAULT_NUM_RESAMPLES,
    level: float = DEFAULT_LEVEL,
    seed: int,
) -> Interval:
    """The mean over tokens with a percentile interval, whole sequences resampled.

    Tokens of one sequence are dependent, so sequences are what is drawn again; the mean of a resample is the
    ratio of its sums. The same seed and number of sequences draw the same resamples, whatever was measured. Sums and
    counts of tokens are [num_sequences]; the confidence of the interval lies inside (0, 1).

    Raises:
        CorpusError: Fewer than two sequences, which have no spread between sequences.
        ValueError: Shapes that differ, a sequence without tokens, or sums that are not finite.
    """
    sums = np.asarray(sums, dtype=np.float64)
    tokens = np.asarray(counts, dtype=np.float64)
    if sums.ndim != 1 or sums.shape != tokens.shape:
        raise ValueError(f"sums and counts need one value per sequence, but have {sums.shape} and {tokens.shape}")
    if len(sums) < 2:
        raise CorpusError(
            f"an interval needs at least 2 sequences, but the split has {len(sums)};"
            " give more data or shorter sequences"
        )
    if not (np.isfinite(sums).all() and (tokens > 0).all() and 0 < level < 1):
        raise ValueError(f"sums must be finite, every sequence must have tokens, and {level=} must be inside (0, 1)")
    drawn = np.random.default_rng(seed).integers(0, len(sums), (num_resamples, len(sums)))
    means = sums[drawn].sum(axis=1) / tokens[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(sums.sum() / tokens.sum()), float(low), float(high))


def spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    """The rank correlation, ties at their mean rank; None where one side does not vary or has under two values."""
    from scipy.stats import spearmanr

    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"a rank correlation needs two vectors of one length, but has {x.shape} and {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("a rank correlation needs finite values")
    if len(np.unique(x)) < 2 or len(np.unique(y)) < 2:
        return None
    return float(spearmanr(x, y).statistic)
