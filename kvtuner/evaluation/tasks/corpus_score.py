"""BLEU, chrF and TER of a whole corpus by sacrebleu, with intervals and p-values. Knows nothing of models.

A corpus has one score, made of statistics that its sentences add up to (counts of n-grams, lengths, edits). So
sentences are what is drawn again, and what two schemes swap at random.
"""

from __future__ import annotations

from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Self

import numpy as np
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from kvtuner.errors import CorpusError
from kvtuner.evaluation.cells import PairedScores, randomization_p_value
from kvtuner.evaluation.statistics import DEFAULT_LEVEL, DEFAULT_NUM_RESAMPLES, Interval

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvtuner.exported_configs.profile.evaluation_record import Measure

CORPUS_METRICS: Final[Mapping[str, tuple[Measure, Callable[[], Any]]]] = {
    "bleu": ("bleu", BLEU),
    "chrf": ("chrf", CHRF),
    "chrf++": ("chrf", partial(CHRF, word_order=2)),
    "ter": ("ter", TER),
}
"""The measure and sacrebleu's metric, by the name that the harness has for it."""
NUM_SWAPS: Final = 10_000
MOST: Final = 100.0
"""The most that BLEU and chrF can be, which rounding may exceed."""


def _texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _text(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


class Sentence(NamedTuple):
    """A sentence as the harness keeps it: the right texts, one at least, and the model's; either may stand alone."""

    references: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_texts)]
    text: Annotated[str, BeforeValidator(_text)]


def sentences_of(values: Sequence[Any]) -> list[Sentence] | None:
    """The sentences that the harness keeps of a task; None where it keeps something else."""
    try:
        return TypeAdapter(Annotated[list[Sentence], Field(min_length=1)]).validate_python(values)
    except ValidationError:
        return None


class CorpusScore(PairedScores):
    """The score of one scheme in one of `CORPUS_METRICS`, by at least two sentences, else `CorpusError`.

    Other schemes' sentences have the same references.
    """

    def __init__(self, metric: str, sentences: Sequence[Sentence]) -> None:
        if len(sentences) < 2:
            raise CorpusError("a corpus of one sentence has no interval; ask for more with --limit")
        self.measure, make_metric = CORPUS_METRICS[metric]
        self._metric = make_metric()
        columns = list(zip_longest(*(sentence.references for sentence in sentences)))
        statistics = self._metric._extract_corpus_statistics([sentence.text for sentence in sentences], columns)
        self._statistics = np.array(statistics, dtype=np.float64)  # [num_sentences, num_statistics]

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of sentences that each result is of: one."""
        return np.ones(len(self._statistics), dtype=np.int64)

    def interval(self, seed: int) -> Interval:
        """The score, with a percentile interval."""
        return _interval(self._resampled(seed))

    def minus(self, other: Self, seed: int) -> Interval:
        """The difference of two scores, the same sentences drawn for both."""
        return _interval(self._resampled(seed) - other._resampled(seed))

    def p_value(self, other: Self, seed: int) -> float:
        """The two-sided p-value of paired approximate randomization, sentences swapped at random.

        Unlike sacrebleu's own test, a swap that leaves the difference as large counts: sacrebleu's would call two
        schemes that give the same text clearly different.
        """
        first, second = self._statistics, other._statistics
        changes = (first - second)[(first != second).any(axis=1)]

        def differences(swaps: NDArray[np.float64]) -> NDArray[np.float64]:
            moved = swaps @ changes
            return self._scores(first.sum(axis=0) - moved) - self._scores(second.sum(axis=0) + moved)

        return randomization_p_value(differences, len(changes), seed, NUM_SWAPS)

    def _resampled(self, seed: int) -> NDArray[np.float64]:
        """The score, then those of resampled sentences, [1 + num_resamples]."""
        sentences = len(self._statistics)
        drawn = np.random.default_rng(seed).integers(0, sentences, (DEFAULT_NUM_RESAMPLES, sentences))
        weights = np.stack([np.bincount(row, minlength=sentences) for row in drawn]).astype(np.float64)
        return self._scores(np.vstack([self._statistics.sum(axis=0), weights @ self._statistics]))

    def _scores(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """The scores of added statistics, [num_rows, num_statistics]."""
        scores = np.array([self._metric._compute_score_from_stats(list(row)).score for row in sums])
        return scores if self.measure == "ter" else np.clip(scores, 0.0, MOST)


def _interval(scores: NDArray[np.float64]) -> Interval:
    mean = float(scores[0])
    low, high = np.quantile(scores[1:], [(1 - DEFAULT_LEVEL) / 2, (1 + DEFAULT_LEVEL) / 2])
    return Interval(mean, min(mean, float(low)), max(mean, float(high)))
