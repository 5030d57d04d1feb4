"""Greedy upgrades, the baseline of search_quality.py that needs no solver. Measures nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvtuner.tuner.exact_solver import menu_of_group, solve_front

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtuner.search_spaces.budget import Constraint
    from kvtuner.search_spaces.space import Configuration, SearchSpace


def greedy(space: SearchSpace, constraint: Constraint) -> Configuration:
    """The configuration that greedy upgrades reach: the most score per cost that fits, from the cheapest one on.

    Raises:
        BudgetError: The cheapest configuration does not fit.
    """
    menus = [menu_of_group(space, group, constraint.cost) for group in range(len(space.groups))]
    stage_of = [next(s for s, stage in enumerate(constraint.stages) if group[0] in stage) for group in space.groups]
    indices = _cheapest(space, constraint)
    room = [constraint.cap(stage) for stage in range(len(constraint.stages))]
    for group, (costs, _) in enumerate(menus):
        room[stage_of[group]] -= int(costs[indices[group]])

    def upgrades() -> Iterator[tuple[float, int, int, int]]:
        for group, (costs, scores) in enumerate(menus):
            for index in range(len(costs)):
                gain = scores[indices[group]] - scores[index]
                extra = int(costs[index] - costs[indices[group]])
                if gain > 0 and extra <= room[stage_of[group]]:
                    yield (gain / extra if extra > 0 else math.inf), -group, -index, extra

    while best := max(upgrades(), default=None):
        _, group, index, extra = best
        indices[-group] = -index
        room[stage_of[-group]] -= extra
    return space.configuration(indices)


def _cheapest(space: SearchSpace, constraint: Constraint) -> list[int]:
    indices = [0] * len(space.groups)
    for stage, layers in enumerate(constraint.stages):
        front = solve_front(space, constraint.cost, layers)
        front.point(constraint.cap(stage))
        for group, index in zip(front.groups, front.indices[0], strict=True):
            indices[group] = int(index)
    return indices
