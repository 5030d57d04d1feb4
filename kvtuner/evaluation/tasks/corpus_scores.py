"""BLEU, chrF and TER of a whole corpus by sacrebleu, with intervals and p-values. Knows nothing of models.

A corpus has one score, made of statistics that its sentences add up to (counts of n-grams, lengths, edits). So
sentences are what is drawn again, and what two ways swap at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtuner.errors import CorpusError
from kvtuner.evaluation.paired import MAX_EXACT
from kvtuner.evaluation.statistics import DEFAULT_LEVEL, DEFAULT_NUM_RESAMPLES, Interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kvtuner.exported_configs.profile.evaluation_record import Measure

MEASURES: Final[Mapping[str, Measure]] = {"bleu": "bleu", "chrf": "chrf", "chrf++": "chrf", "ter": "ter"}
"""What the harness calls metrics of a corpus."""
NUM_SWAPS: Final = 10_000
MOST: Final = 100.0
"""Of BLEU and chrF, which rounding may exceed."""


@dataclass(frozen=True, slots=True)
class TextPairs:
    """What a model said, sentence by sentence, and what would have been right.

    Attributes:
        said: one for each sentence.
        references: of each sentence, one at least.
    """

    said: tuple[str, ...]
    references: tuple[tuple[str, ...], ...]

    def columns(self) -> list[list[str | None]]:
        """References as sacrebleu takes them: all first ones, all second ones; None where a sentence has no more."""
        most = max(map(len, self.references))
        return [[each[index] if index < len(each) else None for each in self.references] for index in range(most)]


class CorpusScores:
    """Scores of several ways in one metric, and how sure they are.

    Args:
        metric: of `MEASURES`.
        corpora: by the name of the way, with the same references.
        seed: of what is drawn.

    Raises:
        CorpusError: fewer than two sentences, which say nothing of the spread between sentences.
    """

    def __init__(self, metric: str, corpora: Mapping[str, TextPairs], seed: int) -> None:
        self._metric, self._measure, self._seed = _sacrebleu_metric(metric), MEASURES[metric], seed
        self._statistics = {
            name: np.array(self._metric._extract_corpus_statistics(corpus.said, corpus.columns()), dtype=np.float64)
            for name, corpus in corpora.items()
        }
        self._sentences = len(next(iter(corpora.values())).said)
        if self._sentences < 2:
            raise CorpusError("a corpus of one sentence has no interval; ask for more with --limit")
        drawn = np.random.default_rng(seed).integers(0, self._sentences, (DEFAULT_NUM_RESAMPLES, self._sentences))
        weights = np.stack([np.bincount(row, minlength=self._sentences) for row in drawn]).astype(np.float64)
        self._scores = {name: self._score(each.sum(axis=0)[None]) for name, each in self._statistics.items()}
        self._resampled = {name: self._score(weights @ each) for name, each in self._statistics.items()}

    def interval(self, name: str) -> Interval:
        """Of one way: its score, with a percentile interval."""
        return _around(float(self._scores[name][0]), self._resampled[name])

    def minus(self, name: str, other: str) -> Interval:
        """Of one way's score minus another's, the same sentences drawn for both."""
        mean = float(self._scores[name][0] - self._scores[other][0])
        return _around(mean, self._resampled[name] - self._resampled[other])

    def p_value(self, name: str, other: str) -> float:
        """Two-sided, that neither is better: paired approximate randomization, sentences swapped at random.

        As sacrebleu's own test, but that a swap which leaves the difference as large counts: sacrebleu's would call two
        ways that say the same clearly different.
        """
        first, second = self._statistics[name], self._statistics[other]
        differing = (first != second).any(axis=1)
        if not differing.any():
            return 1.0
        seen = abs(float(self._scores[name][0] - self._scores[other][0])) * (1 - 1e-12)
        changes = first[differing] - second[differing]
        exact = len(changes) <= MAX_EXACT
        swaps = (
            np.array(list(product((0.0, 1.0), repeat=len(changes))))
            if exact
            else np.random.default_rng(self._seed).integers(0, 2, (NUM_SWAPS, len(changes))).astype(np.float64)
        )
        moved = swaps @ changes
        found = abs(self._score(first.sum(axis=0) - moved) - self._score(second.sum(axis=0) + moved)) >= seen
        return float(found.mean()) if exact else float((found.sum() + 1) / (NUM_SWAPS + 1))

    def _score(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of added statistics, [rows, statistics]."""
        scores = np.array([self._metric._compute_score_from_stats(list(row)).score for row in sums])
        return scores if self._measure == "ter" else np.clip(scores, 0.0, MOST)


def corpus_of(values: Sequence[Any]) -> TextPairs | None:
    """Of what the harness keeps of each sentence, references and what was said; None where it is something else."""
    said, references = [], []
    for value in values:
        if not (isinstance(value, list | tuple) and len(value) == 2):
            return None
        right, text = value
        text = text[0] if isinstance(text, list | tuple) and len(text) == 1 else text
        right = (right,) if isinstance(right, str) else right
        if not (isinstance(text, str) and isinstance(right, list | tuple) and right):
            return None
        if not all(isinstance(each, str) for each in right):
            return None
        said.append(text)
        references.append(tuple(right))
    return TextPairs(tuple(said), tuple(references)) if said else None


def _sacrebleu_metric(metric: str) -> Any:
    """As the harness asks sacrebleu for it."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    if metric == "chrf++":
        return CHRF(word_order=2)
    return {"bleu": BLEU, "chrf": CHRF, "ter": TER}[metric]()


def _around(mean: float, resampled: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(resampled, [(1 - DEFAULT_LEVEL) / 2, (1 + DEFAULT_LEVEL) / 2])
    return Interval(mean, min(mean, float(low)), max(mean, float(high)))
