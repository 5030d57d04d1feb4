"""Accuracies, paired differences and McNemar's test against brute force over binomials and formulas."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from scipy.stats import binom, norm

from kvtuner.errors import CorpusError
from kvtuner.evaluation.paired import Marks, mcnemar


def marks(text: str) -> Marks:
    """Of `110 011`: two problems of three questions."""
    return Marks(tuple(tuple(mark == "1" for mark in problem) for problem in text.split()))


def of_table(both: int, first: int, second: int, neither: int) -> tuple[Marks, Marks]:
    pairs = [(1, 1)] * both + [(1, 0)] * first + [(0, 1)] * second + [(0, 0)] * neither
    return marks(" ".join(str(a) for a, _ in pairs)), marks(" ".join(str(b) for _, b in pairs))


def test_mcnemar_is_the_exact_binomial_test_of_the_questions_that_differ() -> None:
    for only_first, only_second in itertools.product(range(7), repeat=2):
        differing = only_first + only_second
        likelihoods = [binom.pmf(k, differing, 0.5) for k in range(differing + 1)]
        expected = sum(p for p in likelihoods if p <= likelihoods[only_first] * (1 + 1e-9)) if differing else 1.0
        for agree in (0, 5):
            found = mcnemar(*of_table(agree, only_first, only_second, 2 * agree + 1))
            assert found == pytest.approx(min(expected, 1.0), abs=1e-12)


def test_the_accuracy_of_alike_problems_is_wilsons_interval() -> None:
    z = norm.ppf(0.975)
    for right, trials in ((12, 12), (0, 12)):
        found = marks(" ".join(["11" if right else "00"] * trials)).interval(seed=0)
        share = right / trials
        middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
        half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
        assert (found.low, found.high) == pytest.approx((max(middle - half, 0), min(middle + half, 1)), abs=1e-9)
        assert found.low <= found.mean == share <= found.high


def test_intervals_resample_problems_not_questions() -> None:
    rng = random.Random(0)
    whole = marks(" ".join(rng.choice(["1" * 10, "0" * 10]) for _ in range(40)))
    mixed = marks(" ".join("".join(rng.choice("01") for _ in range(10)) for _ in range(40)))
    wide, narrow = whole.interval(0), mixed.interval(0)
    assert wide.high - wide.low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(40), rel=0.15)
    assert narrow.high - narrow.low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(400), rel=0.25)


def test_what_both_share_cancels_from_their_difference() -> None:
    rng = random.Random(1)
    hard = [rng.choice("01") for _ in range(60)]
    first, second = marks(" ".join(hard)), marks(" ".join(["0", *hard[1:]]))
    found = first.minus(second, 0)
    assert 0 <= found.mean == (hard[0] == "1") / 60
    assert found.high - found.low < 0.06 < first.interval(0).high - first.interval(0).low


def test_a_reference_that_fails_or_cannot_fail_is_flagged() -> None:
    assert marks("0000 0000").flag == "floor"
    assert marks("1111 1111").flag == "ceiling"
    assert marks("1111 0000").flag is None
    assert marks(" ".join(["1"] * 5 + ["0"] * 95)).flag == "floor"
    assert marks(" ".join(["1"] * 6 + ["0"] * 94)).flag is None


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(ValueError, match="same questions"):
        mcnemar(marks("11 1"), marks("1 11"))
    with pytest.raises(ValueError, match="same questions"):
        marks("11").minus(marks("1"), 0)
    with pytest.raises(CorpusError, match="at least 2"):
        marks("11").minus(marks("10"), 0)
    for nothing in ((), ((),)):
        with pytest.raises(ValueError, match="every problem a question"):
            Marks(nothing)
