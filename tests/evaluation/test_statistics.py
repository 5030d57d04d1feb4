from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kvtuner.errors import CorpusError
from kvtuner.evaluation.statistics import Interval, bootstrap_mean, spearman


def sequences(num_sequences: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 60, num_sequences)
    return rng.lognormal(-3, 1, num_sequences) * counts, counts


def ends(interval: Interval) -> tuple[float, float, float]:
    return interval.mean, interval.low, interval.high


@pytest.mark.parametrize("num_sequences", [2, 7, 33])
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_the_interval_is_scipys_percentile_interval_of_the_ratio_of_sums(num_sequences: int, level: float) -> None:
    sums, counts = sequences(num_sequences)
    expected = stats.bootstrap(
        (sums, counts),
        lambda s, c, axis: s.sum(axis=axis) / c.sum(axis=axis),
        paired=True,
        method="percentile",
        n_resamples=999,
        confidence_level=level,
        rng=np.random.default_rng(11),
    ).confidence_interval
    measured = bootstrap_mean(sums, counts, num_resamples=999, level=level, seed=11)
    assert ends(measured) == pytest.approx((sums.sum() / counts.sum(), expected.low, expected.high), rel=1e-12)


def test_long_sequences_weigh_by_their_tokens() -> None:
    measured = bootstrap_mean(np.array([1.0, 99.0]), np.array([1, 33]), seed=0)
    assert measured.mean == pytest.approx(100 / 34)
    assert (measured.low, measured.high) == pytest.approx((1.0, 3.0))


def test_repeating_the_tokens_of_every_sequence_gives_no_more_certainty() -> None:
    sums, counts = sequences(12)
    once, tenfold = (bootstrap_mean(k * sums, k * counts, seed=5) for k in (1, 10))
    assert ends(tenfold) == pytest.approx(ends(once))


def test_repeating_the_sequences_narrows_the_interval_like_the_root_of_their_number() -> None:
    sums, counts = sequences(30)
    once = bootstrap_mean(sums, counts, seed=5)
    more = bootstrap_mean(np.tile(sums, 16), np.tile(counts, 16), seed=5)
    assert (once.high - once.low) / (more.high - more.low) == pytest.approx(4, rel=0.15)


def test_the_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    num_trials, num_sequences = 400, 40
    hits = 0
    for trial in range(num_trials):
        counts = rng.integers(20, 40, num_sequences)
        sequence_means = rng.gamma(2.0, 0.5, num_sequences)  # mean 1; tokens of a sequence share it
        interval = bootstrap_mean(sequence_means * counts, counts, num_resamples=400, level=0.9, seed=trial)
        hits += interval.low <= 1.0 <= interval.high
    # four standard deviations of a binomial of 0.9, plus the known shortfall of percentiles at 40 skewed sequences
    assert 0.9 - 0.06 - 0.02 < hits / num_trials < 0.9 + 0.06


def test_the_seed_decides_the_interval() -> None:
    sums, counts = sequences(14)
    assert bootstrap_mean(sums, counts, seed=1) == bootstrap_mean(sums, counts, seed=1)
    assert bootstrap_mean(sums, counts, seed=1) != bootstrap_mean(sums, counts, seed=2)


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0.1, 0.2, True), (-0.2, -0.1, True), (-0.1, 0.1, False), (0.0, 0.1, False)]
)
def test_an_interval_knows_whether_it_excludes_zero(low: float, high: float, expected: bool) -> None:
    assert Interval((low + high) / 2, low, high).excludes_zero is expected


def test_a_single_sequence_is_refused_with_the_way_out() -> None:
    with pytest.raises(CorpusError, match=r"at least 2 sequences, but the split has 1; give more data"):
        bootstrap_mean(np.array([1.0]), np.array([10]), seed=0)


@pytest.mark.parametrize(
    ("sums", "counts", "level"),
    [
        ([1.0, math.nan], [1, 1], 0.95),
        ([1.0, math.inf], [1, 1], 0.95),
        ([1.0, 2.0], [1, 0], 0.95),
        ([1.0, 2.0], [1, 1, 1], 0.95),
        ([[1.0, 2.0]], [[1, 1]], 0.95),
        ([1.0, 2.0], [1, 1], 1.0),
        ([1.0, 2.0], [1, 1], 0.0),
    ],
)
def test_sums_that_have_no_interval_are_refused(sums: list[float], counts: list[int], level: float) -> None:
    with pytest.raises(ValueError, match=r"sums|level"):
        bootstrap_mean(np.array(sums), np.array(counts), level=level, seed=0)


def test_spearman_depends_on_ranks_alone() -> None:
    x = np.array([3.0, 1.0, 2.0, 9.0, 4.0])
    assert spearman(x, np.exp(x)) == pytest.approx(1.0)
    assert spearman(x, -(x**3)) == pytest.approx(-1.0)
    # ranks 3 1 2 5 4 against 1 2 3 5 4: 1 - 6 * (4 + 1 + 1) / (5 * 24)
    assert spearman(x, np.array([1.0, 2.0, 3.0, 5.0, 4.0])) == pytest.approx(0.7)


def test_spearman_gives_ties_their_mean_rank() -> None:
    x, y = np.array([1.0, 1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 3.0])
    ranks_x, ranks_y = np.array([1.5, 1.5, 3, 4]), np.array([1, 2, 3.5, 3.5])
    assert spearman(x, y) == pytest.approx(np.corrcoef(ranks_x, ranks_y)[0, 1])


@pytest.mark.parametrize(("x", "y"), [([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 0.0]), ([1.0], [1.0]), ([], [])])
def test_spearman_of_what_does_not_vary_is_undefined(x: list[float], y: list[float]) -> None:
    assert spearman(np.array(x), np.array(y)) is None


@pytest.mark.parametrize(("x", "y"), [([1.0, 2.0], [1.0]), ([1.0, math.nan], [1.0, 2.0])])
def test_spearman_refuses_unequal_lengths_and_nan(x: list[float], y: list[float]) -> None:
    with pytest.raises(ValueError, match=r"rank correlation needs"):
        spearman(np.array(x), np.array(y))
