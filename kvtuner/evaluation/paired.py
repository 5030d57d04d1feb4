"""Right and wrong answers to the same questions, paired. Knows nothing of models."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from scipy.stats import binomtest

from kvtuner.evaluation.statistics import DEFAULT_LEVEL, Interval, bootstrap_mean, paired_difference

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOOR: Final = 0.05
CEILING: Final = 0.98
Flag = Literal["floor", "ceiling"]


@dataclass(frozen=True, slots=True)
class Marks:
    """Which questions were answered right.

    Attributes:
        problems: by problem, whose questions share a context and so are dependent; an answer that never came is wrong.
    """

    problems: tuple[tuple[bool, ...], ...]

    def __post_init__(self) -> None:
        if not self.problems or not all(self.problems):
            raise ValueError("marks need a problem at least, and every problem a question")

    @property
    def num_questions(self) -> int:
        """Of all problems."""
        return sum(map(len, self.problems))

    @property
    def accuracy(self) -> float:
        """Share of questions that were answered right."""
        return sum(map(sum, self.problems)) / self.num_questions

    @property
    def flag(self) -> Flag | None:
        """Why marks of an unquantized model cannot tell ways of storing its cache apart: it fails, or cannot fail."""
        if self.accuracy <= FLOOR:
            return "floor"
        return "ceiling" if self.accuracy >= CEILING else None

    def interval(self, seed: int) -> Interval:
        """Accuracy with its interval: problems resampled; Wilson's, a trial a problem, where all have one share."""
        shares = {sum(marks) / len(marks) for marks in self.problems}
        if len(shares) > 1:
            return bootstrap_mean(*self._sums(), seed=seed)
        trials = len(self.problems)
        bounds = binomtest(round(self.accuracy * trials), trials).proportion_ci(DEFAULT_LEVEL, method="wilson")
        return Interval(self.accuracy, min(float(bounds.low), self.accuracy), max(float(bounds.high), self.accuracy))

    def minus(self, other: Marks, seed: int) -> Interval:
        """Paired difference of accuracies.

        Raises:
            ValueError: other questions.
            CorpusError: a single problem, which says nothing of the spread between problems.
        """
        self._check_same(other)
        mine, counts = self._sums()
        return paired_difference(mine, other._sums()[0], counts, seed=seed)

    def _sums(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        sums = np.array([sum(marks) for marks in self.problems], dtype=np.float64)
        return sums, np.array([len(marks) for marks in self.problems], dtype=np.int64)

    def _check_same(self, other: Marks) -> None:
        if tuple(map(len, self.problems)) != tuple(map(len, other.problems)):
            raise ValueError("paired marks need the same questions")


def mcnemar(first: Marks, second: Marks) -> float:
    """Exact two-sided p-value that both are right equally often: of questions where they differ, half each way.

    Takes questions for independent; where those of one problem are not, it is too small.

    Raises:
        ValueError: other questions.
    """
    first._check_same(second)
    pairs = list(zip(chain(*first.problems), chain(*second.problems), strict=True))
    only_first, only_second = pairs.count((True, False)), pairs.count((False, True))
    differing = only_first + only_second
    return 1.0 if not differing else float(binomtest(only_first, differing).pvalue)
