"""Accuracies, paired differences and tests against brute force, formulas, and what holds of many draws."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, permutation_test

from kvtuner.errors import CorpusError
from kvtuner.evaluation.cells import BinaryScores, MeanScores, sign_flip
from kvtuner.exported_configs.profile.evaluation_record import SIGNIFICANT, Cell
from kvtuner.exported_configs.verdict import LEAST_UNITS


def marks(text: str) -> BinaryScores:
    """The marks of `110 011`: two problems of three questions."""
    return BinaryScores(tuple(tuple(mark == "1" for mark in problem) for problem in text.split()))


def of_table(both: int, first: int, second: int, neither: int) -> tuple[BinaryScores, BinaryScores]:
    pairs = [(1, 1)] * both + [(1, 0)] * first + [(0, 1)] * second + [(0, 0)] * neither
    return marks(" ".join(str(a) for a, _ in pairs)), marks(" ".join(str(b) for _, b in pairs))


def sequences(num_sequences: int, seed: int = 0) -> MeanScores:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 60, num_sequences)
    return MeanScores(rng.lognormal(-3, 1, num_sequences) * counts, counts)


def test_what_both_means_share_cancels_in_their_difference() -> None:
    means = sequences(9)
    difference = MeanScores(means.sums + 0.25 * means.counts, means.counts).minus(means, 1)
    assert (difference.mean, difference.low, difference.high) == pytest.approx((0.25, 0.25, 0.25))
    assert difference.excludes_zero


def test_swapping_the_sides_mirrors_the_paired_difference() -> None:
    a = sequences(21, seed=1)
    b = MeanScores(a.sums * np.random.default_rng(2).uniform(0.5, 1.6, 21), a.counts)
    there, back = a.minus(b, 4), b.minus(a, 4)
    assert (there.mean, there.low, there.high) == pytest.approx((-back.mean, -back.high, -back.low))


def test_pairing_sees_a_difference_that_two_separate_intervals_hide() -> None:
    a = sequences(25)
    b = MeanScores(a.sums * 1.05, a.counts)
    assert a.interval(0).high > b.interval(0).low
    assert b.minus(a, 0).low > 0


def test_paired_sums_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one shape"):
        sequences(3).minus(sequences(1), 0)


def test_mcnemar_is_the_exact_binomial_test_of_the_questions_that_differ() -> None:
    for only_first, only_second in itertools.product(range(7), repeat=2):
        differing = only_first + only_second
        likelihoods = [binom.pmf(k, differing, 0.5) for k in range(differing + 1)]
        expected = sum(p for p in likelihoods if p <= likelihoods[only_first] * (1 + 1e-9)) if differing else 1.0
        for agree in (0, 5):
            first, second = of_table(agree, only_first, only_second, 2 * agree + 1)
            assert first.mcnemar(second) == pytest.approx(min(expected, 1.0), abs=1e-12)


@pytest.mark.parametrize("units", [2, 3, 8, 14, 15, 40])
def test_sign_flips_are_scipys_permutations(units: int) -> None:
    differences = np.random.default_rng(units).integers(-2, 4, units).astype(float)
    expected = permutation_test(
        (differences,), np.sum, permutation_type="samples", n_resamples=50_000, rng=np.random.default_rng(1)
    ).pvalue
    assert sign_flip(differences, seed=0) == pytest.approx(expected, abs=0.01 if units > 14 else 1e-9)


def test_few_problems_can_never_be_clear() -> None:
    for problems in range(2, 6):
        better, worse = marks(" ".join(["1" * 40] * problems)), marks(" ".join(["0" * 40] * problems))
        assert better.p_value(worse, 0) == 2.0 ** (1 - problems) > 0.05
    assert marks(" ".join(["1"] * 6)).p_value(marks(" ".join(["0"] * 6)), 0) < 0.05


@pytest.mark.parametrize(("problems", "questions"), [(10, 4), (10, 40), (30, 1)])
def test_equals_are_called_different_in_one_of_twenty_and_intervals_hold_the_truth(
    problems: int, questions: int
) -> None:
    """Questions of a context go alike, as they do."""
    rng, runs = np.random.default_rng(0), 300
    clear = missed = missed_difference = 0
    for _ in range(runs):
        hard = rng.beta(1.6, 0.7, problems)  # 70 % on average, correlated within a context
        first, second = (
            BinaryScores(
                tuple(tuple(map(bool, rng.random(questions) < p)) for p in hard + rng.normal(0, 0.05, problems))
            )
            for _ in range(2)
        )
        clear += first.p_value(second, 0) < 0.05
        missed += not first.interval().low <= 1.6 / 2.3 <= first.interval().high
        missed_difference += not first.minus(second).low <= 0 <= first.minus(second).high
    assert clear / runs < 0.07
    assert missed / runs < 0.1
    assert missed_difference / runs < 0.07


def test_no_interval_is_certain_and_less_right_is_no_narrower() -> None:
    all_right, one_wrong = marks(" ".join(["1111"] * 10)), marks(" ".join(["1111"] * 9 + ["1110"]))
    whole, nearly = all_right.interval(), one_wrong.interval()
    assert (whole.mean, whole.high) == (1.0, 1.0)
    assert 0.7 < whole.low < nearly.low < nearly.mean < nearly.high < 1
    none = all_right.minus(all_right)
    assert none.low < -0.05 < 0.05 < none.high
    same_loss = marks(" ".join(["1110"] * 10)).minus(all_right)
    assert same_loss.low < same_loss.mean == -0.25 < same_loss.high < 0


def test_independent_questions_have_wilsons_interval() -> None:
    rng = random.Random(3)
    found = marks(" ".join(rng.choice("01") for _ in range(50)))
    z, share, n = 1.959963984540054, found.accuracy, 50
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    assert (found.interval().low, found.interval().high) == pytest.approx((middle - half, middle + half), abs=1e-9)


def test_what_both_share_cancels_from_their_difference() -> None:
    rng = random.Random(1)
    hard = [rng.choice("01") for _ in range(60)]
    first, second = marks(" ".join(hard)), marks(" ".join(["0", *hard[1:]]))
    found = first.minus(second)
    assert found.mean == (hard[0] == "1") / 60
    assert found.high - found.low < 0.1 < first.interval().high - first.interval().low


def test_a_reference_that_fails_or_hardly_can_is_flagged() -> None:
    assert marks("0000 0000").flag == "floor"
    assert marks("1111 1111").flag == "ceiling"
    assert marks("1111 0000").flag is None
    assert marks(" ".join(["1"] * 5 + ["0"] * 95)).flag == "floor"
    assert marks(" ".join(["1"] * 6 + ["0"] * 94)).flag is None


def test_a_reference_is_flagged_where_the_loss_of_all_that_it_has_right_would_not_be_clear() -> None:
    """The test itself compares a scheme that is always wrong with one that is right in some of ten contexts."""
    for num_right in range(3, 11):
        reference = marks(" ".join(["0110"] * num_right + ["0000"] * (10 - num_right)))
        always_wrong = marks(" ".join(["0000"] * 10))
        is_clear = always_wrong.p_value(reference, 0) < SIGNIFICANT
        assert (reference.flag is None) == is_clear == (num_right >= LEAST_UNITS)
    assert marks("1110 " * 4 + "1111").flag is None, "of five contexts none would be clear, whoever is right"


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(ValueError, match="same questions"):
        marks("11 1").mcnemar(marks("1 11"))
    with pytest.raises(ValueError, match="same questions"):
        marks("11").minus(marks("1"))
    with pytest.raises(CorpusError, match="at least 2"):
        marks("11").minus(marks("10"))
    for nothing in ((), ((),)):
        with pytest.raises(ValueError, match="every problem a question"):
            BinaryScores(nothing)


@pytest.mark.parametrize(
    ("fields", "title"),
    [
        ({"level": "likelihood", "measure": "kl_nats_per_token", "position": 0}, "KL nats/token at 0"),
        ({"level": "recall", "position": 0}, "recall 512 tokens"),
        ({"level": "needle", "position": 3000}, "needle 512 tokens at 3,000"),
        ({"level": "task", "task": "gsm8k", "num_tokens": None, "position": 0}, "gsm8k"),
    ],
)
def test_a_cell_has_one_title(fields: dict[str, Any], title: str) -> None:
    cell = {"measure": "accuracy", "task": None, "num_tokens": 512, "units": 1, "count": 1, "flag": None}
    assert Cell.model_validate({**cell, "results": (), "differences": (), **fields}).title == title
