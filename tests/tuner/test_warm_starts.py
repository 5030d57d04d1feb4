"""Neighbours against brute force, and the order in which warm starts come."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvtuner.precision import PrecisionPair
from kvtuner.search_spaces.budget import Constraint
from kvtuner.search_spaces.space import Configuration, SearchSpace, pairs_of, predicted_score
from kvtuner.tuner.exact_solver import solve
from kvtuner.tuner.warm_starts import neighbours, warm_starts

Space = Callable[..., SearchSpace]
Limit = Callable[..., Constraint]
Every = Callable[[SearchSpace], Iterator[Configuration]]


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("groups", [None, ((0, 1), (2,), (3,))])
def test_neighbours_are_all_swaps_of_one_or_two_groups_inside_the_budget(
    random_space: Space,
    make_constraint: Limit,
    every_configuration: Every,
    num_stages: int,
    groups: tuple[tuple[int, ...], ...] | None,
) -> None:
    constraint = make_constraint("9bit", 4, num_stages=num_stages)
    num_outside = 0
    for seed in range(10):
        space = random_space(4, seed, groups=groups)
        start = solve(space, constraint)
        near = []
        for other in every_configuration(space):
            changed = sum(a != b for a, b in zip(space.project(start), space.project(other), strict=True))
            if changed in (1, 2):
                near.append(other)
        inside = [other for other in near if constraint.is_met(pairs_of(other))]
        num_outside += len(near) - len(inside)
        found = neighbours(space, constraint, start, 10**6)
        assert set(found) == set(inside)
        assert len(found) == len(inside)
        assert [predicted_score(c) for c in found] == sorted(predicted_score(c) for c in inside)
        assert neighbours(space, constraint, start, 7) == found[:7]
    assert num_outside


def test_a_space_of_one_configuration_has_no_neighbours(make_space: Space, make_constraint: Limit) -> None:
    space = make_space(3, lambda layer, pair: 1.0, pairs=[PrecisionPair(4, 4)])
    constraint = make_constraint("4bit", 3)
    assert neighbours(space, constraint, solve(space, constraint), 5) == []
    assert warm_starts(space, constraint, [], 5) == [solve(space, constraint)]


def test_warm_starts_are_distinct_inside_the_budget_and_begin_with_the_exact_solution(
    random_space: Space, make_constraint: Limit
) -> None:
    for seed in range(10):
        space, constraint = random_space(6, seed, num_pairs=9), make_constraint("8bit", 6, num_stages=2)
        starts = warm_starts(space, constraint, [space.configuration([i] * 6) for i in range(9)], 40)
        assert starts[0] == solve(space, constraint)
        assert len(starts) == len(set(starts)) == 40
        assert all(constraint.is_met(pairs_of(start)) for start in starts)
        assert warm_starts(space, constraint, [], 3) == starts[:3]


def test_uniforms_inside_the_budget_are_among_the_warm_starts(make_space: Space, make_constraint: Limit) -> None:
    # Layer 0 is so sensitive that no uniform is near the exact solution.
    space = make_space(5, lambda layer, pair: (1000.0 if layer == 0 else 1.0) / (pair.k_bits + pair.v_bits))
    constraint = make_constraint("4bit", 5)
    uniforms = [space.configuration([i] * 5) for i in range(space.sizes[0])]
    inside = [u for u in uniforms if constraint.is_met(pairs_of(u))]
    starts = warm_starts(space, constraint, uniforms, 30)
    assert 1 < len(inside) < len(uniforms)
    assert set(inside) <= set(starts)
    assert not set(uniforms) - set(inside) & set(starts)
