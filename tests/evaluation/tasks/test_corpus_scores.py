"""Scores of a corpus: sacrebleu's own, its paired test, and bounds that a resample of sentences gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import sacrebleu
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest

from kvtuner.errors import CorpusError
from kvtuner.evaluation.tasks.corpus_scores import MEASURES, CorpusScores, TextPairs, corpus_of

OWN = {
    "bleu": sacrebleu.corpus_bleu,
    "chrf": sacrebleu.corpus_chrf,
    "chrf++": lambda said, right: sacrebleu.corpus_chrf(said, right, word_order=2),
    "ter": sacrebleu.corpus_ter,
}
WORDS = (
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
)


def corpus(changed: float, *, sentences: int = 40, references: int = 1, seed: int = 0) -> TextPairs:
    """Sentences of which a share of the words is another; the same references whatever `changed` is."""
    rng = random.Random(f"{seed} {references}")
    right = tuple(
        tuple(" ".join(rng.choices(WORDS, k=rng.randint(6, 14))) for _ in range(references)) for _ in range(sentences)
    )
    rng = random.Random(f"{seed} {changed}")
    said = tuple(
        " ".join(rng.choice(WORDS) if rng.random() < changed else word for word in each[0].split()) for each in right
    )
    return TextPairs(said, right)


@pytest.mark.parametrize("references", [1, 2])
@pytest.mark.parametrize("metric", MEASURES)
def test_scores_are_sacrebleus(metric: str, references: int) -> None:
    ways = {str(changed): corpus(changed, references=references) for changed in (0.0, 0.1, 0.5)}
    scores = CorpusScores(metric, ways, seed=0)
    columns = [list(each) for each in zip(*ways["0.1"].references, strict=True)]
    for name, way in ways.items():
        own = OWN[metric](list(way.texts), columns).score
        found = scores.interval(name)
        assert found.mean == pytest.approx(own, abs=1e-9)
        assert found.low <= found.mean <= found.high
        assert (found.low < found.high) == (name != "0.0")
    difference = scores.minus("0.5", "0.1")
    assert difference.mean == pytest.approx(scores.interval("0.5").mean - scores.interval("0.1").mean)
    assert difference.excludes_zero
    assert scores.p_value("0.5", "0.1") < 0.01


def test_intervals_are_those_of_sacrebleus_resamples() -> None:
    way = corpus(0.3, sentences=200)
    own = BLEU().corpus_score(list(way.texts), [[each[0] for each in way.references]], n_bootstrap=2000)
    found = CorpusScores("bleu", {"a": way, "b": corpus(0.4, sentences=200)}, seed=0).interval("a")
    assert (found.high - found.low) / 2 == pytest.approx(own._ci, rel=0.1)


@pytest.mark.parametrize("changed", [0.31, 0.33, 0.4])
def test_p_values_are_those_of_sacrebleus_approximate_randomization(changed: float) -> None:
    ways = {"a": corpus(0.3, sentences=60), "b": corpus(changed, sentences=60)}
    right = [[each[0] for each in ways["a"].references]]
    own: Any = PairedTest([(name, list(way.texts)) for name, way in ways.items()], {"BLEU": BLEU()}, right)()
    found = CorpusScores("bleu", ways, seed=0).p_value("b", "a")
    assert found == pytest.approx(own[1]["BLEU"][1].p_value, abs=0.02)


def test_ways_that_say_the_same_do_not_differ() -> None:
    """Sacrebleu's own test gives the smallest p-value there is here."""
    scores = CorpusScores("bleu", {"a": corpus(0.3), "b": corpus(0.3)}, seed=0)
    assert scores.p_value("a", "b") == 1.0
    assert (scores.minus("a", "b").low, scores.minus("a", "b").high) == (0.0, 0.0)


def test_few_sentences_are_never_clear() -> None:
    best, worst = corpus(0.0, sentences=4), corpus(0.9, sentences=4)
    scores = CorpusScores("bleu", {"a": best, "b": worst}, seed=0)
    assert scores.p_value("a", "b") == pytest.approx(2 / 2**4), "all swapped, or none"
    with pytest.raises(CorpusError, match="one sentence"):
        CorpusScores("bleu", {"a": corpus(0.0, sentences=1)}, seed=0)


def test_what_the_harness_keeps_is_read() -> None:
    assert corpus_of([["right", "said"], ("also", ["this"])]) == TextPairs(("said", "this"), (("right",), ("also",)))
    assert corpus_of([(["one", "two"], "said"), (["three"], "more")]) == TextPairs(
        ("said", "more"), (("one", "two"), ("three",))
    )
    uneven = TextPairs(("a b", "c d"), (("a b", "x y"), ("c d",)))
    assert uneven.columns() == [["a b", "c d"], ["x y", None]]
    assert CorpusScores("chrf", {"a": uneven}, seed=0).interval("a").mean == pytest.approx(100)
    for other in ([1.0, 2.0], [("a", 3)], [("a", "b", "c")], [([], "b")], []):
        assert corpus_of(other) is None
