"""BLEU, chrF and TER of a whole corpus by sacrebleu, with intervals and p-values. Knows nothing of models.

A corpus has one score, made of statistics that its sentences add up to (counts of n-grams, lengths, edits). So
sentences are what is drawn again, and what two schemes swap at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtuner.errors import CorpusError
from kvtuner.evaluation.cells import PairedScores
from kvtuner.evaluation.paired import MAX_EXACT
from kvtuner.evaluation.statistics import DEFAULT_LEVEL, DEFAULT_NUM_RESAMPLES, Interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kvtuner.exported_configs.profile.evaluation_record import Measure

MEASURES: Final[Mapping[str, Measure]] = {"bleu": "bleu", "chrf": "chrf", "chrf++": "chrf", "ter": "ter"}
"""The measure of each metric of a corpus, by the name that the harness has for it."""
NUM_SWAPS: Final = 10_000
MOST: Final = 100.0
"""The most that BLEU and chrF can be, which rounding may exceed."""


@dataclass(frozen=True, slots=True)
class TextPairs:
    """What a model wrote, sentence by sentence, and what would have been right.

    Attributes:
        texts: The text of each sentence.
        references: The right texts of each sentence, one at least.
    """

    texts: tuple[str, ...]
    references: tuple[tuple[str, ...], ...]

    def columns(self) -> list[list[str | None]]:
        """The references as sacrebleu takes them: first ones, second ones; None without one."""
        most = max(map(len, self.references))
        return [[texts[index] if index < len(texts) else None for texts in self.references] for index in range(most)]


class CorpusScores(PairedScores):
    """Scores of several schemes in one metric.

    Args:
        metric: The metric, one of `MEASURES`.
        corpora: The corpora by the name of the scheme, with the same references.
        seed: The seed of what is drawn.

    Raises:
        CorpusError: fewer than two sentences, which say nothing of the spread between sentences.
    """

    def __init__(self, metric: str, corpora: Mapping[str, TextPairs], seed: int) -> None:
        self._metric, self._measure, self._seed = _sacrebleu_metric(metric), MEASURES[metric], seed
        self._statistics = {
            name: np.array(self._metric._extract_corpus_statistics(corpus.texts, corpus.columns()), dtype=np.float64)
            for name, corpus in corpora.items()
        }
        self.names = tuple(corpora)
        self.units = self.count = sentences = len(next(iter(corpora.values())).texts)
        if sentences < 2:
            raise CorpusError("a corpus of one sentence has no interval; ask for more with --limit")
        drawn = np.random.default_rng(seed).integers(0, sentences, (DEFAULT_NUM_RESAMPLES, sentences))
        weights = np.stack([np.bincount(row, minlength=sentences) for row in drawn]).astype(np.float64)
        self._scores = {name: self._score(counts.sum(axis=0)[None]) for name, counts in self._statistics.items()}
        self._resampled = {name: self._score(weights @ counts) for name, counts in self._statistics.items()}

    def interval(self, name: str) -> Interval:
        """The score of one scheme, with a percentile interval."""
        return _around(float(self._scores[name][0]), self._resampled[name])

    def minus(self, name: str, other: str) -> Interval:
        """The difference of two scores, the same sentences drawn for both."""
        mean = float(self._scores[name][0] - self._scores[other][0])
        return _around(mean, self._resampled[name] - self._resampled[other])

    def p_value(self, name: str, other: str) -> float:
        """The two-sided p-value of paired approximate randomization, sentences swapped at random.

        Unlike sacrebleu's own test, a swap that leaves the difference as large counts: sacrebleu's would call two
        schemes that give the same text clearly different.
        """
        first, second = self._statistics[name], self._statistics[other]
        differing = (first != second).any(axis=1)
        if not differing.any():
            return 1.0
        observed = abs(float(self._scores[name][0] - self._scores[other][0])) * (1 - 1e-12)
        changes = first[differing] - second[differing]
        exact = len(changes) <= MAX_EXACT
        swaps = (
            np.array(list(product((0.0, 1.0), repeat=len(changes))))
            if exact
            else np.random.default_rng(self._seed).integers(0, 2, (NUM_SWAPS, len(changes))).astype(np.float64)
        )
        moved = swaps @ changes
        is_as_large = abs(self._score(first.sum(axis=0) - moved) - self._score(second.sum(axis=0) + moved)) >= observed
        return float(is_as_large.mean()) if exact else float((is_as_large.sum() + 1) / (NUM_SWAPS + 1))

    def _score(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """The scores of added statistics, [rows, statistics]."""
        scores = np.array([self._metric._compute_score_from_stats(list(row)).score for row in sums])
        return scores if self._measure == "ter" else np.clip(scores, 0.0, MOST)


def corpus_of(values: Sequence[Any]) -> TextPairs | None:
    """The corpus that the harness keeps, references and text of each sentence; None where it keeps something else."""
    texts, references = [], []
    for value in values:
        if not (isinstance(value, list | tuple) and len(value) == 2):
            return None
        right, text = value
        text = text[0] if isinstance(text, list | tuple) and len(text) == 1 else text
        right = (right,) if isinstance(right, str) else right
        if not (isinstance(text, str) and isinstance(right, list | tuple) and right):
            return None
        if not all(isinstance(reference, str) for reference in right):
            return None
        texts.append(text)
        references.append(tuple(right))
    return TextPairs(tuple(texts), tuple(references)) if texts else None


def _sacrebleu_metric(metric: str) -> Any:
    """The metric as the harness asks sacrebleu for it."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    if metric == "chrf++":
        return CHRF(word_order=2)
    return {"bleu": BLEU, "chrf": CHRF, "ter": TER}[metric]()


def _around(mean: float, resampled: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(resampled, [(1 - DEFAULT_LEVEL) / 2, (1 + DEFAULT_LEVEL) / 2])
    return Interval(mean, min(mean, float(low)), max(mean, float(high)))
