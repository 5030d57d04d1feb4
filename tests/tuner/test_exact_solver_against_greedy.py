"""The greedy rival: valid, never better than exact, and worse where greed fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.search_parts.greedy import greedy
from kvtuner.errors import BudgetError
from kvtuner.precision import PrecisionPair
from kvtuner.search_spaces.budget import Constraint
from kvtuner.search_spaces.space import SearchSpace, pairs_of, predicted_score
from kvtuner.tuner.exact_solver import solve

Space = Callable[..., SearchSpace]
Limit = Callable[..., Constraint]


def test_greedy_keeps_the_budget_and_never_beats_the_exact_solver(random_space: Space, make_constraint: Limit) -> None:
    num_worse = 0
    for seed in range(40):
        groups = ((0, 1), (2,), (3, 4, 5)) if seed % 2 else None
        space = random_space(6, seed, num_pairs=8, groups=groups)
        constraint = make_constraint("9bit", 6, num_stages=2 if groups is None else 1)
        found = greedy(space, constraint)
        assert constraint.is_met(pairs_of(found))
        assert space.configuration(space.project(found)) == found
        loss = predicted_score(found) - predicted_score(solve(space, constraint))
        assert loss >= 0
        num_worse += loss > 0
    assert num_worse


def test_greedy_takes_the_best_everywhere_when_all_fits(random_space: Space, make_constraint: Limit) -> None:
    space = random_space(5, 3, num_pairs=9)
    best = sum(min(choice.score for choice in menu.choices) for menu in space.menus)
    assert predicted_score(greedy(space, make_constraint("16bit", 5))) == best


def test_greedy_stops_where_the_exact_solver_goes_on(make_space: Space, make_constraint: Limit) -> None:
    low, high, native = PrecisionPair(2, 2), PrecisionPair(4, 4), PrecisionPair(8, 8)
    # Room for one step of 6 bits in layer 0, or one of 2 bits in layer 1: greed takes the better ratio.
    scores = {(0, low): 10.0, (0, high): 10.0, (0, native): 1.0, (1, low): 4.0, (1, high): 0.0, (1, native): 0.0}
    space = make_space(2, lambda layer, pair: scores[layer, pair], pairs=[low, high, native])
    constraint = make_constraint("5bit", 2)
    assert pairs_of(greedy(space, constraint)) == [low, high]
    assert pairs_of(solve(space, constraint)) == [native, low]


def test_greedy_refuses_a_budget_below_the_smallest(random_space: Space, make_constraint: Limit) -> None:
    with pytest.raises(BudgetError):
        greedy(random_space(3, 0), make_constraint("0.1bit", 3))
