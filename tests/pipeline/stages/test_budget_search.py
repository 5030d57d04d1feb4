"""A search takes the exact solution, unless a trial is below it by more than one standard error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from kvtuner.errors import NonFiniteActivationError
from kvtuner.pipeline.stages.budget_search import BudgetSearch
from kvtuner.precision import PrecisionPair
from kvtuner.search_spaces.space import LayerChoice
from kvtuner.tuner.study import StudyResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.search_spaces.space import Configuration


def configuration(bits: int) -> Configuration:
    return (LayerChoice(PrecisionPair(bits, 4), "none", "none", 64, 0.0),)


EXACT, TRIAL = configuration(4), configuration(8)


class SequenceKLs:
    """The KL of every sequence, by configuration; None is not finite."""

    def __init__(self, kls: Mapping[Configuration, Sequence[float] | None]) -> None:
        self.kls = kls

    def of_each_sequence(self, configuration: Configuration) -> Sequence[float]:
        kls = self.kls[configuration]
        if kls is None:
            raise NonFiniteActivationError("a measured KL must be finite")
        return kls


@pytest.mark.parametrize(
    ("exact", "trial", "winner"),
    [
        ([0.3, 0.1, 0.2], [0.2, 0.0, 0.1], TRIAL),  # lower on every sequence
        ([0.3, 0.1, 0.2], [0.1, 0.1, 0.2], EXACT),  # lower in the mean, by one sequence alone
        ([0.3, 0.1, 0.2], [0.4, 0.2, 0.3], EXACT),
        ([0.3], [0.2], EXACT),
        (None, [0.2, 0.2], TRIAL),
    ],
)
def test_the_exact_solution_is_kept_unless_a_trial_is_clearly_better(
    exact: Sequence[float] | None, trial: Sequence[float], winner: Configuration
) -> None:
    search = BudgetSearch(run=cast("Any", None), objective=cast("Any", SequenceKLs({EXACT: exact, TRIAL: trial})))
    chosen, gain = search.chosen(EXACT, StudyResult(TRIAL, 0.0, (), None))
    assert chosen == winner
    assert (gain is None) == (exact is None)
