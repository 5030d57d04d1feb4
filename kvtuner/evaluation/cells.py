"""Cells of an evaluation: one metric of one task at one place, for all schemes. Knows nothing of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtuner.errors import CorpusError
from kvtuner.evaluation.paired import Marks, mcnemar, sign_flip
from kvtuner.evaluation.scheme import REFERENCE
from kvtuner.evaluation.statistics import Interval, bootstrap_mean, paired_difference
from kvtuner.exported_configs.profile.evaluation_record import PROFILE, Cell, PairedDifference, Result

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from kvtuner.evaluation.validation import SequenceSums
    from kvtuner.exported_configs.profile.evaluation_record import Flag, Level, Measure

    Sums = tuple[NDArray[np.float64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Place:
    """The place where a metric is measured.

    Attributes:
        level: The kind of task.
        num_tokens: The tokens of a context, or of a sequence; None where they have a length of their own.
        position: The position of the first token.
        task: The task's name and metric, for level ``task``.
        flag: Why schemes cannot be told apart there, if it is known before anything is scored.
        failures: The answers, or tokens, that never came, by the name of the scheme.
    """

    level: Level
    num_tokens: int | None = None
    position: int = 0
    task: str | None = None
    flag: Flag | None = None
    failures: Mapping[str, int] = field(default_factory=dict)


class PairedScores(ABC):
    """One metric of several schemes on the same questions or sequences.

    Attributes:
        names: The names of the schemes, the profile among them.
        units: How many contexts, questions or sequences are independent.
        count: How many questions or tokens were scored.
        flag: Why the unquantized model's results cannot tell schemes apart.
    """

    names: tuple[str, ...]
    units: int
    count: int
    flag: Flag | None = None

    @abstractmethod
    def interval(self, name: str) -> Interval:
        """The result of one scheme."""

    @abstractmethod
    def minus(self, name: str, other: str) -> Interval:
        """The paired difference of two schemes."""

    @abstractmethod
    def p_value(self, name: str, other: str) -> float:
        """The two-sided p-value that neither is better."""

    def mcnemar(self, name: str, other: str) -> float | None:
        """McNemar's p-value; None of what is not right or wrong."""
        return None


def make_cell(measure: Measure, place: Place, scores: PairedScores) -> Cell:
    """The cell of one metric: every scheme's result, and the profile's difference from each other scheme."""
    return Cell(
        level=place.level,
        measure=measure,
        task=place.task,
        num_tokens=place.num_tokens,
        position=place.position,
        units=scores.units,
        count=scores.count,
        flag=place.flag or scores.flag,
        results=tuple(
            Result(subject=name, **_bounds(scores.interval(name)), failures=place.failures.get(name, 0))
            for name in scores.names
        ),
        differences=tuple(
            PairedDifference(
                other=other,
                **_bounds(scores.minus(PROFILE, other)),
                p_value=scores.p_value(PROFILE, other),
                mcnemar=scores.mcnemar(PROFILE, other),
            )
            for other in scores.names
            if other != PROFILE
        ),
    )


def _bounds(interval: Interval) -> dict[str, Any]:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


class MeanScores(PairedScores):
    """Means over tokens, or over questions, whole sequences resampled.

    Args:
        sums: The sums and numbers of tokens of every sequence, by the name of the scheme; numbers alike for all.
        seed: The seed of the intervals.
    """

    def __init__(self, sums: Mapping[str, Sums], seed: int) -> None:
        self.names = tuple(sums)
        self._values = {name: values for name, (values, _) in sums.items()}
        self._counts, self._seed = next(iter(sums.values()))[1], seed
        self.units, self.count = len(self._counts), int(self._counts.sum())

    def interval(self, name: str) -> Interval:
        """The mean of one scheme."""
        return bootstrap_mean(self._values[name], self._counts, seed=self._seed)

    def minus(self, name: str, other: str) -> Interval:
        """The paired difference of two means."""
        return paired_difference(self._values[name], self._values[other], self._counts, seed=self._seed)

    def p_value(self, name: str, other: str) -> float:
        """The p-value of sequences' differences with their signs flipped."""
        return sign_flip(self._values[name] - self._values[other], self._seed)


class MarkScores(PairedScores):
    """Shares of questions that were answered right.

    Args:
        marks: The marks by the name of the scheme.
        seed: The seed of the p-values.
    """

    def __init__(self, marks: Mapping[str, Marks], seed: int) -> None:
        first = next(iter(marks.values()))
        self.names, self.units, self.count = tuple(marks), len(first.problems), first.num_questions
        self.flag = marks[REFERENCE].flag if REFERENCE in marks else None
        self._marks, self._seed = marks, seed

    def interval(self, name: str) -> Interval:
        """The accuracy of one scheme."""
        return self._marks[name].interval()

    def minus(self, name: str, other: str) -> Interval:
        """The paired difference of two accuracies."""
        return self._marks[name].minus(self._marks[other])

    def p_value(self, name: str, other: str) -> float:
        """The p-value of problems' differences with their signs flipped."""
        return self._marks[name].sign_flip(self._marks[other], self._seed)

    def mcnemar(self, name: str, other: str) -> float:
        """McNemar's p-value, which takes questions for independent."""
        return mcnemar(self._marks[name], self._marks[other])


def score_cell(place: Place, scores: Mapping[str, NDArray[np.float64]], seed: int) -> Cell:
    """The cell of a score for each question: an accuracy where all scores are 0 or 1, else a mean.

    Args:
        place: The place.
        scores: The scores by the name of the scheme, [num_questions].
        seed: The seed of the intervals.

    Raises:
        CorpusError: a single question, which has no interval.
    """
    counts = np.ones(len(next(iter(scores.values()))), dtype=np.int64)
    if len(counts) < 2:
        raise CorpusError(f"{place.task} has one question; intervals need at least 2")
    if is_right_or_wrong(scores):
        marks = {name: Marks(tuple((bool(value),) for value in values)) for name, values in scores.items()}
        return make_cell("accuracy", place, MarkScores(marks, seed))
    sums = {name: (values, counts) for name, values in scores.items()}
    return make_cell("score", place, MeanScores(sums, seed))


def is_right_or_wrong(scores: Mapping[str, NDArray[np.float64]]) -> bool:
    """Whether all scores are 0 or 1."""
    return all(set(values.tolist()) <= {0.0, 1.0} for values in scores.values())


def likelihood_cells(sums: Mapping[str, SequenceSums], *, num_tokens: int, position: int, seed: int) -> list[Cell]:
    """KL, top-1 agreement and negative log-likelihood at one kind of positions.

    Args:
        sums: The sums by the name of the scheme, the unquantized one and the profile among them.
        num_tokens: The tokens of a sequence.
        position: The position of its first token.
        seed: The seed of the intervals.
    """
    place = Place("likelihood", num_tokens, position)
    measures: tuple[Measure, ...] = ("kl_nats_per_token", "top1_agreement", "nll_nats_per_token")
    cells = []
    for measure in measures:
        # KL and agreement are from the unquantized model, which has neither of its own.
        names = [name for name in sums if name != REFERENCE or measure == "nll_nats_per_token"]
        scores = MeanScores({name: _measure_sums(sums[name], measure) for name in names}, seed)
        cells.append(make_cell(measure, place, scores))
    return cells


def _measure_sums(sums: SequenceSums, measure: Measure) -> Sums:
    values = {"kl_nats_per_token": sums.kl, "top1_agreement": sums.agree, "nll_nats_per_token": sums.nll}[measure]
    counts = sums.nll_count if measure == "nll_nats_per_token" else sums.count
    return np.asarray(values, dtype=np.float64), np.asarray(counts, dtype=np.int64)
