"""Cells of an evaluation: what all schemes scored on the same questions or sequences, paired. Knows nothing of models.

Questions of one problem share a context and so are dependent: intervals count as many independent questions as the
spread between problems leaves of them (the design effect), at most all and at least one for each problem.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from itertools import chain, product
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from scipy.stats import binomtest, norm, t

from kvtuner.errors import CorpusError
from kvtuner.evaluation.statistics import DEFAULT_LEVEL, Interval, bootstrap_mean
from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME, Cell, CellResult, PairedDifference
from kvtuner.exported_configs.scheme_names import REFERENCE
from kvtuner.exported_configs.verdict import LEAST_UNITS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from kvtuner.exported_configs.profile.evaluation_record import Flag, Level, Measure

FLOOR: Final = 0.05
CEILING: Final = 0.98
MAX_EXACT: Final = 14
"""The most units of a sign-flip test for which all signs are tried."""
NUM_FLIPS: Final = 20_000


class PairedScores(ABC):
    """The scores of one scheme by one measure; other schemes' are of the same questions or sequences.

    A seed is that of what is drawn: resamples, signs, swaps.
    """

    @property
    @abstractmethod
    def counts(self) -> NDArray[np.int64]:
        """The questions, or tokens, of each context, question or sequence, which are independent, [num_units]."""

    @property
    def flag(self) -> Flag | None:
        """Why the unquantized model's scores cannot tell schemes apart."""
        return None

    @abstractmethod
    def interval(self, seed: int) -> Interval:
        """The mean of the scores, with its confidence interval."""

    @abstractmethod
    def minus(self, other: Self, seed: int) -> Interval:
        """The paired difference from another scheme's."""

    @abstractmethod
    def p_value(self, other: Self, seed: int) -> float:
        """The two-sided p-value that neither is better."""

    def mcnemar(self, other: Self) -> float | None:
        """McNemar's p-value; None of what is not right or wrong."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class MeanScores(PairedScores):
    """Means over tokens, or over questions, whole sequences resampled; sums and counts are [num_sequences]."""

    sums: NDArray[np.float64]
    counts: NDArray[np.int64]

    def interval(self, seed: int) -> Interval:
        """The mean."""
        return bootstrap_mean(self.sums, self.counts, seed=seed)

    def minus(self, other: Self, seed: int) -> Interval:
        """The difference of two means of the same sequences, else `ValueError`; what sequences share cancels."""
        if self.sums.shape != other.sums.shape:
            raise ValueError(f"paired sums need one shape, but have {self.sums.shape} and {other.sums.shape}")
        return bootstrap_mean(self.sums - other.sums, self.counts, seed=seed)

    def p_value(self, other: Self, seed: int) -> float:
        """The p-value of sequences' differences with their signs flipped."""
        return sign_flip(self.sums - other.sums, seed)


@dataclass(frozen=True, slots=True)
class BinaryScores(PairedScores):
    """The marks of each problem's questions, right or wrong; their mean is the accuracy."""

    problems: tuple[tuple[bool, ...], ...]

    def __post_init__(self) -> None:
        if not self.problems or not all(self.problems):
            raise ValueError("marks need a problem at least, and every problem a question")

    @property
    def counts(self) -> NDArray[np.int64]:
        """The questions of each problem."""
        return np.array([len(marks) for marks in self.problems])

    @property
    def accuracy(self) -> float:
        """The share of questions that were answered right."""
        return sum(map(sum, self.problems)) / int(self.counts.sum())

    @property
    def flag(self) -> Flag | None:
        """Why an unquantized model's marks cannot tell schemes apart: it is hardly ever right, or hardly ever wrong."""
        num_right = sum(map(any, self.problems))  # the units that a scheme differs in which is always wrong
        if self.accuracy <= FLOOR or num_right < LEAST_UNITS <= len(self.problems):
            return "floor"
        return "ceiling" if self.accuracy >= CEILING else None

    def interval(self, seed: int = 0) -> Interval:
        """The accuracy with Wilson's interval over as many questions as count for independent; nothing is drawn."""
        share = self.accuracy
        trials = int(self.counts.sum()) / _design_effect(self._shares(), self.counts, share * (1 - share))
        z = float(norm.ppf((1 + DEFAULT_LEVEL) / 2))
        middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
        half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
        return Interval(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))

    def minus(self, other: Self, seed: int = 0) -> Interval:
        """The paired difference of accuracies, with Agresti and Min's adjusted interval (Stat. in Medicine 24, 2005).

        Half a question is added to each cell of their table, so that even equal marks leave an interval.

        Raises:
            ValueError: The other marks have other questions.
            CorpusError: A single problem has no spread between problems.
        """
        first, second = self._only_one_is_right(other)
        if len(self.problems) < 2:
            raise CorpusError("an interval needs at least 2 problems; ask more")
        total = int(self.counts.sum())
        mean = (first - second) / total
        variance = (first + second) / total - mean * mean
        effect = _design_effect(self._shares() - other._shares(), self.counts, variance)
        trials, first_of, second_of = total / effect, first / effect, second / effect
        spread = math.sqrt(first_of + second_of + 1 - (first_of - second_of) ** 2 / (trials + 2)) / (trials + 2)
        middle = (first_of - second_of) / (trials + 2)
        half = float(t.ppf((1 + DEFAULT_LEVEL) / 2, len(self.problems) - 1)) * spread
        return Interval(mean, max(-1.0, min(mean, middle - half)), min(1.0, max(mean, middle + half)))

    def p_value(self, other: Self, seed: int) -> float:
        """The p-value of problems' differences with their signs flipped."""
        return sign_flip((self._shares() - other._shares()) * self.counts, seed)

    def mcnemar(self, other: Self) -> float:
        """The exact two-sided p-value that both are right equally often.

        It takes questions for independent; where those of one problem are not, it is too small.
        """
        only_first, only_second = self._only_one_is_right(other)
        differing = only_first + only_second
        return 1.0 if not differing else float(binomtest(only_first, differing).pvalue)

    def _shares(self) -> NDArray[np.float64]:
        return np.array([sum(marks) / len(marks) for marks in self.problems])

    def _only_one_is_right(self, other: Self) -> tuple[int, int]:
        if not np.array_equal(self.counts, other.counts):
            raise ValueError("paired marks need the same questions")
        pairs = list(zip(chain(*self.problems), chain(*other.problems), strict=True))
        return pairs.count((True, False)), pairs.count((False, True))


def sign_flip(differences: NDArray[np.float64], seed: int) -> float:
    """The two-sided p-value that differences, [num_units], have either sign equally often, units' signs flipped."""
    differences = differences[differences != 0]
    return randomization_p_value(lambda flips: (2 * flips - 1) @ differences, differences.size, seed, NUM_FLIPS)


def randomization_p_value(
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]], num_units: int, seed: int, num_draws: int
) -> float:
    """The share of flips of units after which a statistic is as large as it is without any, or its opposite.

    Flips are zeros and ones, [num_draws, num_units]; all are tried where there are few units, else so many are drawn.
    """
    if not num_units:
        return 1.0
    # Flips that give the same value up to rounding, the observed one's opposite among them, count as large as it.
    observed = abs(statistic(np.zeros((1, num_units)))[0]) * (1 - 1e-12)
    if num_units <= MAX_EXACT:
        return float((abs(statistic(np.array(list(product((0.0, 1.0), repeat=num_units))))) >= observed).mean())
    flips = np.random.default_rng(seed).integers(0, 2, (num_draws, num_units)).astype(np.float64)
    return float(((abs(statistic(flips)) >= observed).sum() + 1) / (num_draws + 1))


def _design_effect(shares: NDArray[np.float64], counts: NDArray[np.int64], variance: float) -> float:
    """The factor by which problems vary more than independent questions, from 1 to the questions of a problem."""
    most = float(counts.mean())
    if variance <= 0 or len(shares) < 2:
        return most
    weights = counts / counts.sum()
    mean = float(weights @ shares)
    between = float((weights**2) @ (shares - mean) ** 2) * len(shares) / (len(shares) - 1)
    effect: float = between / (variance / float(counts.sum()))
    return min(max(effect, 1.0), most)


@dataclass(frozen=True, slots=True)
class CellKey:
    """The place where figures are measured: contexts, or sequences, of `num_tokens`, if they have one length.

    The task is its name and metric, for level ``task``; the flag is one that is known before anything is scored.
    Failures are answers, or tokens, that never came, by the name of the scheme; skipped schemes were not asked.
    """

    level: Level
    num_tokens: int | None = None
    position: int = 0
    task: str | None = None
    flag: Flag | None = None
    failures: Mapping[str, int] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


def make_cell(measure: Measure, key: CellKey, scores: Mapping[str, PairedScores], seed: int) -> Cell:
    """The cell of one measure: every scheme's result by name, and the profile's difference from each other scheme.

    There is no difference where the profile was skipped.
    """
    profile = scores.get(PROFILE_SCHEME)
    others = {name: other for name, other in scores.items() if name != PROFILE_SCHEME}
    counts = next(iter(scores.values())).counts
    return Cell(
        level=key.level,
        measure=measure,
        task=key.task,
        num_tokens=key.num_tokens,
        position=key.position,
        units=len(counts),
        count=int(counts.sum()),
        flag=key.flag or (scores[REFERENCE].flag if REFERENCE in scores else None),
        results=tuple(
            CellResult(subject=name, **asdict(each.interval(seed)), failures=key.failures.get(name, 0))
            for name, each in scores.items()
        ),
        differences=tuple(
            PairedDifference(
                other=name,
                **asdict(profile.minus(other, seed)),
                p_value=profile.p_value(other, seed),
                mcnemar=profile.mcnemar(other),
            )
            for name, other in others.items()
            if profile is not None
        ),
        skipped=key.skipped,
    )
