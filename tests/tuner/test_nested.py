"""Families of budgets that never take bits away."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from kvtuner.errors import BudgetError
from kvtuner.precision import PrecisionPair
from kvtuner.search_spaces.budget import Constraint
from kvtuner.search_spaces.space import Configuration, SearchSpace, pairs_of, predicted_score
from kvtuner.tuner.exact_solver import nested, solve

Space = Callable[..., SearchSpace]
Limit = Callable[..., Constraint]
TEXTS = ["2.5bit", "3bit", "3.5bit", "4bit", "5bit", "6bit", "9bit"]


def takes_bits_away(smaller: Configuration, larger: Configuration) -> bool:
    return any(
        b.k_bits < a.k_bits or b.v_bits < a.v_bits for a, b in zip(pairs_of(smaller), pairs_of(larger), strict=True)
    )


def falling_space(make_space: Space, seed: int, groups: tuple[tuple[int, ...], ...] | None = None) -> SearchSpace:
    """Scores that fall with bits, by another factor in each layer and side."""
    rng = np.random.default_rng(seed)
    factors, scales = rng.uniform(0.3, 0.9, size=(2, 8, 2)), rng.exponential(1.0, size=(8, 2))

    def score(layer: int, pair: PrecisionPair) -> float:
        exponents = np.array([pair.k_bits, pair.v_bits])
        return float((scales[layer] * factors[0, layer] ** exponents).sum())

    return make_space(8, score, groups=groups)


def test_a_larger_budget_never_takes_bits_away(make_space: Space, make_constraint: Limit) -> None:
    num_in_conflict = 0
    for seed in range(25):
        groups = ((0, 1), (2, 3), *((i,) for i in range(4, 8))) if seed % 3 == 0 else None
        space = falling_space(make_space, seed, groups)
        constraints = [make_constraint(text, 8, num_stages=1 + seed % 2) for text in TEXTS]
        family = nested(space, constraints)
        independent = [solve(space, constraint) for constraint in constraints]
        for configuration, alone, constraint in zip(family, independent, constraints, strict=True):
            assert constraint.is_met(pairs_of(configuration))
            assert predicted_score(configuration) >= predicted_score(alone) - 1e-12
        for smaller, larger in itertools.pairwise(family):
            assert not takes_bits_away(smaller, larger)
            assert predicted_score(larger) <= predicted_score(smaller)
        num_in_conflict += any(takes_bits_away(a, b) for a, b in itertools.pairwise(independent))
    assert num_in_conflict, "independent solutions were nested by themselves: the test shows nothing"


def test_one_budget_is_solved_as_if_alone(make_space: Space, make_constraint: Limit) -> None:
    space, constraint = falling_space(make_space, 3), make_constraint("4bit", 8)
    assert nested(space, [constraint]) == [solve(space, constraint)]
    assert nested(space, []) == []


def test_one_member_of_a_family_is_solved_as_if_alone(make_space: Space, make_constraint: Limit) -> None:
    for seed in range(10):
        space = falling_space(make_space, seed)
        constraints = [make_constraint(text, 8) for text in TEXTS]
        family = nested(space, constraints)
        assert any(member == solve(space, c) for member, c in zip(family, constraints, strict=True))


def test_the_family_of_the_least_relative_loss_is_taken(make_space: Space, make_constraint: Limit) -> None:
    # Keys weigh twice as much as values: 2.67, 3.33, 4 and 4 bits. From K4V2 on the larger budget loses .3 of .3, and
    # from K2V8 down the smaller one .6 of 3: more in all, and less of what it has.
    scores = {"K2V4": 3.6, "K4V2": 3.0, "K4V4": 0.6, "K2V8": 0.3}
    space = make_space(1, lambda _, pair: scores[str(pair)], pairs=[PrecisionPair.parse(text) for text in scores])
    constraints = [make_constraint(text, 1) for text in ("3.4bit", "4bit")]
    assert [str(pairs_of(solve(space, constraint))[0]) for constraint in constraints] == ["K4V2", "K2V8"]
    assert [str(pairs_of(member)[0]) for member in nested(space, constraints)] == ["K2V4", "K2V8"]


def test_budgets_that_do_not_ascend_are_refused(make_space: Space, make_constraint: Limit) -> None:
    space = falling_space(make_space, 0)
    with pytest.raises(BudgetError, match="3bit is smaller"):
        nested(space, [make_constraint("4bit", 8), make_constraint("3bit", 8)])
