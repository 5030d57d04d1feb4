"""What refinement gains is paired over sequences and clear beyond one standard error; scipy is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_rel

from kvtuner.tuner.refinement_gain import RefinementGain


@pytest.mark.parametrize("num_sequences", [2, 3, 12, 100])
@pytest.mark.parametrize("shift", [-0.02, 0.0, 0.004, 0.02])
def test_a_gain_is_clear_beyond_one_standard_error(num_sequences: int, shift: float) -> None:
    rng = np.random.default_rng(num_sequences)
    exact = rng.lognormal(-3, 1, num_sequences)
    best = exact - shift - rng.normal(0, 0.01, num_sequences)
    gain = RefinementGain.of(exact.tolist(), best.tolist())
    assert gain.mean == pytest.approx(np.mean(exact - best))
    assert gain.is_clear == (ttest_rel(exact, best).statistic > 1)


def test_what_one_sequence_gains_is_never_clear() -> None:
    assert not RefinementGain.of([2.0], [1.0]).is_clear


def test_the_exact_solution_does_not_better_itself() -> None:
    assert not RefinementGain.of([0.5, 0.25, 0.125], [0.5, 0.25, 0.125]).is_clear


def test_sequences_of_another_number_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="shorter"):
        RefinementGain.of([0.5, 0.25], [0.5])
