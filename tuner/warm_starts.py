"""Configurations worth measuring first, by predicted score. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtuner.search_spaces.space import pairs_of, predicted_score
from kvtuner.tuner.exact_solver import menu_of_group, solve, solve_front

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvtuner.search_spaces.budget import Constraint
    from kvtuner.search_spaces.space import Configuration, SearchSpace

NUM_SMALLER: Final = 6  # steps down the front: predictions of neighbours on it differ by less than their error


def warm_starts(
    space: SearchSpace, constraint: Constraint, uniforms: Sequence[Configuration], limit: int
) -> list[Configuration]:
    """Distinct configurations inside the budget, `limit` at most, in the order in which to measure them.

    The exact solution, exact solutions of slightly smaller budgets, those of the uniforms that are inside the budget,
    as `SearchSpace.project` sees them, then the exact solution's neighbours.

    Raises:
        BudgetError: Forced layers leave too little.
    """
    exact = solve(space, constraint)
    projected = [space.configuration(space.project(configuration)) for configuration in uniforms]
    inside = [configuration for configuration in projected if constraint.is_met(pairs_of(configuration))]
    starts = [exact, *_smaller(space, constraint), *sorted(inside, key=predicted_score)]
    starts += neighbours(space, constraint, exact, limit)
    return list(dict.fromkeys(starts))[:limit]


def _smaller(space: SearchSpace, constraint: Constraint) -> Iterator[Configuration]:
    """Exact solutions that follow the best one down the front; all stages step down together."""
    fronts = [solve_front(space, constraint.cost, stage) for stage in constraint.stages]
    points = [front.point(constraint.cap(stage)) for stage, front in enumerate(fronts)]
    for step in range(1, min(NUM_SMALLER, max(points)) + 1):
        parts = [front.configuration(max(point - step, 0)) for front, point in zip(fronts, points, strict=True)]
        yield tuple(choice for part in parts for choice in part)


@dataclass(frozen=True, slots=True)
class _Moves:
    """All changes of one group's choice: arrays [num_moves], costs per stage [num_moves, num_stages]."""

    groups: NDArray[np.int64]
    indices: NDArray[np.int64]
    scores: NDArray[np.float64]
    costs: NDArray[np.int64]


def neighbours(
    space: SearchSpace, constraint: Constraint, configuration: Configuration, limit: int
) -> list[Configuration]:
    """Configurations inside the budget that differ in the choice of one or two groups, best predicted first."""
    start = space.project(configuration)
    moves = _moves(space, constraint, start)
    costs = constraint.stage_costs(pairs_of(space.configuration(start)))
    room = np.array([constraint.cap(stage) for stage in range(len(costs))]) - np.array(costs)
    # Two moves at once: all pairs of different groups.
    first, second = np.triu_indices(len(moves.groups), k=1)
    is_pair = moves.groups[first] != moves.groups[second]
    first, second = first[is_pair], second[is_pair]
    scores = np.concatenate([moves.scores, moves.scores[first] + moves.scores[second]])
    extra = np.concatenate([moves.costs, moves.costs[first] + moves.costs[second]])
    fitting = np.flatnonzero((extra <= room).all(axis=1))
    nearest = []
    for position in fitting[np.argsort(scores[fitting], kind="stable")[:limit]]:
        changed = list(start)
        pair = position - len(moves.groups)  # pairs of moves stand behind the single ones
        for move in [position] if pair < 0 else [first[pair], second[pair]]:
            changed[moves.groups[move]] = int(moves.indices[move])
        nearest.append(space.configuration(changed))
    return nearest


def _moves(space: SearchSpace, constraint: Constraint, start: Sequence[int]) -> _Moves:
    groups, indices, scores, costs = [], [], [], []
    for group, size in enumerate(space.sizes):
        menu_costs, menu_scores = menu_of_group(space, group, constraint.cost)
        stages = [space.groups[group][0] in stage for stage in constraint.stages]
        for index in range(size):
            if index != start[group]:
                groups.append(group)
                indices.append(index)
                scores.append(menu_scores[index] - menu_scores[start[group]])
                costs.append((menu_costs[index] - menu_costs[start[group]]) * np.array(stages, dtype=np.int64))
    shape = (len(groups), len(constraint.stages))
    return _Moves(
        np.array(groups, dtype=np.int64),
        np.array(indices, dtype=np.int64),
        np.array(scores, dtype=np.float64),
        np.array(costs, dtype=np.int64).reshape(shape),
    )
