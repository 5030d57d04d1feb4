"""Scores of a corpus: sacrebleu's own, its paired test, and bounds that a resample of sentences gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import sacrebleu
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest

from kvtuner.errors import CorpusError
from kvtuner.evaluation.tasks.corpus_score import CORPUS_METRICS, CorpusScore, Sentence, sentences_of

OWN = {
    "bleu": sacrebleu.corpus_bleu,
    "chrf": sacrebleu.corpus_chrf,
    "chrf++": lambda texts, references: sacrebleu.corpus_chrf(texts, references, word_order=2),
    "ter": sacrebleu.corpus_ter,
}
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "tree",
    "quickly",
    "then",
    "it",
    "was",
    "red",
    "blue",
]


def corpus(changed: float, *, sentences: int = 40, references: int = 1, seed: int = 0) -> list[Sentence]:
    """Sentences of which a share of the words is another; the same references whatever `changed` is."""
    rng = random.Random(f"{seed} {references}")
    right = [
        tuple(" ".join(rng.choices(WORDS, k=rng.randint(6, 14))) for _ in range(references)) for _ in range(sentences)
    ]
    rng = random.Random(f"{seed} {changed}")
    return [
        Sentence(each, " ".join(rng.choice(WORDS) if rng.random() < changed else word for word in each[0].split()))
        for each in right
    ]


def columns(sentences: list[Sentence]) -> tuple[list[str], list[list[str]]]:
    """Texts and references as sacrebleu takes them."""
    return [each.text for each in sentences], [
        list(each) for each in zip(*(s.references for s in sentences), strict=True)
    ]


@pytest.mark.parametrize("references", [1, 2])
@pytest.mark.parametrize("metric", CORPUS_METRICS)
def test_scores_are_sacrebleus(metric: str, references: int) -> None:
    corpora = {changed: corpus(changed, references=references) for changed in (0.0, 0.1, 0.5)}
    scores = {changed: CorpusScore(metric, sentences) for changed, sentences in corpora.items()}
    for changed, sentences in corpora.items():
        interval = scores[changed].interval(0)
        assert interval.mean == pytest.approx(OWN[metric](*columns(sentences)).score, abs=1e-9)
        assert interval.low <= interval.mean <= interval.high
        assert (interval.low < interval.high) == (changed > 0)
    worse, better = scores[0.5], scores[0.1]
    difference = worse.minus(better, 0)
    assert difference.mean == pytest.approx(worse.interval(0).mean - better.interval(0).mean)
    assert difference.excludes_zero
    assert worse.p_value(better, 0) < 0.01


def test_intervals_are_those_of_sacrebleus_resamples() -> None:
    sentences = corpus(0.3, sentences=200)
    own = BLEU().corpus_score(*columns(sentences), n_bootstrap=2000)
    interval = CorpusScore("bleu", sentences).interval(0)
    assert (interval.high - interval.low) / 2 == pytest.approx(own._ci, rel=0.1)


@pytest.mark.parametrize("changed", [0.31, 0.33, 0.4])
def test_p_values_are_those_of_sacrebleus_approximate_randomization(changed: float) -> None:
    corpora = {"a": corpus(0.3, sentences=60), "b": corpus(changed, sentences=60)}
    texts = {name: columns(sentences)[0] for name, sentences in corpora.items()}
    own: Any = PairedTest(list(texts.items()), {"BLEU": BLEU()}, columns(corpora["a"])[1])()
    first, second = (CorpusScore("bleu", sentences) for sentences in corpora.values())
    assert second.p_value(first, 0) == pytest.approx(own[1]["BLEU"][1].p_value, abs=0.02)


def test_schemes_that_give_the_same_text_do_not_differ() -> None:
    """sacrebleu's own test gives the smallest p-value that there is."""
    first, second = (CorpusScore("bleu", corpus(0.3)) for _ in range(2))
    assert first.p_value(second, 0) == 1.0
    assert (first.minus(second, 0).low, first.minus(second, 0).high) == (0.0, 0.0)


def test_few_sentences_are_never_clear() -> None:
    best, worst = (CorpusScore("bleu", corpus(changed, sentences=4)) for changed in (0.0, 0.9))
    assert best.p_value(worst, 0) == pytest.approx(2 / 2**4), "all swapped, or none"
    with pytest.raises(CorpusError, match="one sentence"):
        CorpusScore("bleu", corpus(0.0, sentences=1))


def test_what_the_harness_keeps_is_read() -> None:
    assert sentences_of([["right", "text"], ("also", ["this"])]) == [(("right",), "text"), (("also",), "this")]
    assert sentences_of([(["one", "two"], "text"), (["three"], "more")]) == [
        (("one", "two"), "text"),
        (("three",), "more"),
    ]
    for other in ([1.0, 2.0], [("a", 3)], [("a", "b", "c")], [([], "b")], [], [("a", ["b", "c"])]):
        assert sentences_of(other) is None


def test_sentences_may_have_different_numbers_of_references() -> None:
    uneven = [Sentence(("a b", "x y"), "a b"), Sentence(("c d",), "c d")]
    assert CorpusScore("chrf", uneven).interval(0).mean == pytest.approx(100)
