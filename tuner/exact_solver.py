"""The exact solver: a multiple-choice knapsack over additive scores, all budgets at once. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtuner.errors import BudgetError
from kvtuner.search_spaces.space import Configuration, SearchSpace, pairs_of, predicted_score

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvtuner.precision import PrecisionPair
    from kvtuner.search_spaces.budget import Constraint


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """Every Pareto-optimal trade of cost for score over some layers.

    Attributes:
        costs: int64 [num_points], ascending.
        scores: float64 [num_points], descending.
        indices: index of the choice of each group, [num_points, num_groups].
        groups: positions in `space.groups` of the columns of `indices`.
    """

    costs: NDArray[np.int64]
    scores: NDArray[np.float64]
    indices: NDArray[np.int16]
    space: SearchSpace
    groups: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.costs)

    def configuration(self, point: int) -> Configuration:
        """The choices of one point, in the order of the layers."""
        chosen = {
            place: self.space.menus[place].choices[index]
            for group, index in zip(self.groups, self.indices[point], strict=True)
            for place in self.space.groups[group]
        }
        return tuple(chosen[place] for place in sorted(chosen))

    def best(self, cap: int) -> Configuration:
        """The best-scoring configuration of at most `cap`, the cheaper one of equals.

        Raises:
            BudgetError: The cheapest one costs more.
        """
        return self.configuration(self.point(cap))

    def point(self, cap: int) -> int:
        """The position of the configuration that `best` returns."""
        point = int(np.searchsorted(self.costs, cap, side="right")) - 1
        if point < 0:
            raise BudgetError(f"the cheapest configuration costs {self.costs[0]}, more than {cap}; raise the budget")
        return point


def solve_front(space: SearchSpace, cost: Callable[[PrecisionPair], int], stage: range | None = None) -> Front:
    """All Pareto-optimal configurations of a pipeline stage, which no group may cross, or of all layers; exactly.

    The stage has its layers by their places.

    Group by group, the front of the groups so far is combined with all choices of the next, and what is dominated is
    dropped. Costs of a pair in one layer are integers, so a front has no more points than there are distinct costs.
    """
    stage = range(len(space.menus)) if stage is None else stage
    groups = tuple(i for i, group in enumerate(space.groups) if group[0] in stage)
    assert all(place in stage for i in groups for place in space.groups[i])
    costs, scores = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float64)
    indices = np.zeros((1, 0), dtype=np.int16)
    for group in groups:
        menu_costs, menu_scores = menu_of_group(space, group, cost)
        all_costs = (costs[:, None] + menu_costs).ravel()  # [num_points * num_choices]
        all_scores = (scores[:, None] + menu_scores).ravel()
        best = _pareto(all_costs, all_scores)
        costs, scores = all_costs[best], all_scores[best]
        # ravel() puts the choices of the group side by side, for one point of the front before after another.
        point, choice = np.divmod(best, len(menu_costs))
        indices = np.column_stack([indices[point], choice.astype(np.int16)])
    return Front(costs, scores, indices, space, groups)


def menu_of_group(
    space: SearchSpace, group: int, cost: Callable[[PrecisionPair], int]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Costs and scores of a group's choices, summed over its layers."""
    menus = [space.menus[place].choices for place in space.groups[group]]
    costs = np.array([[cost(choice.pair) for choice in menu] for menu in menus], dtype=np.int64)
    scores = np.array([[choice.score for choice in menu] for menu in menus], dtype=np.float64)
    return costs.sum(axis=0), scores.sum(axis=0)


def _pareto(costs: NDArray[np.int64], scores: NDArray[np.float64]) -> NDArray[np.intp]:
    """Positions of the non-dominated points, by ascending cost; the first of equal ones."""
    order: NDArray[np.intp] = np.lexsort((scores, costs))
    best_so_far = np.minimum.accumulate(scores[order])
    is_better = np.append(True, best_so_far[1:] < best_so_far[:-1])
    pareto: NDArray[np.intp] = order[is_better]
    return pareto


def solve(space: SearchSpace, constraint: Constraint) -> Configuration:
    """The configuration of the least predicted score inside the budget, each stage on its own.

    Raises:
        BudgetError: Forced layers leave too little; says the smallest budget possible.
    """
    fronts = [solve_front(space, constraint.cost, stage) for stage in constraint.stages]
    caps = [constraint.cap(stage) for stage in range(len(fronts))]
    if any(front.costs[0] > cap for front, cap in zip(fronts, caps, strict=True)):
        cheapest = [choice for front in fronts for choice in front.configuration(0)]
        raise BudgetError(
            f"a budget must hold the layers that are kept, but {constraint.budget.text} does not;"
            f" with them the smallest possible is {constraint.smallest(pairs_of(tuple(cheapest)))}"
        )
    return tuple(choice for front, cap in zip(fronts, caps, strict=True) for choice in front.best(cap))


def nested(space: SearchSpace, constraints: Sequence[Constraint]) -> list[Configuration]:
    """One configuration per budget, such that a larger budget takes no bits from any side of any layer.

    One of the budgets is solved on its own, the larger ones above it and the smaller ones below it; it is the one that
    leads to the least total of relative losses against solving each on its own. The constraints ascend, and are of one
    kind and model.

    Raises:
        BudgetError: A budget that cannot be kept, or one that is smaller than that before it.
    """
    independent = [solve(space, constraint) for constraint in constraints]
    for smaller, constraint in zip(independent, constraints[1:], strict=False):
        if not constraint.is_met(pairs_of(smaller)):
            raise BudgetError(
                f"nested budgets must ascend, but {constraint.budget.text} is smaller than the one before it"
            )
    families = [_family(space, constraints, start, independent[start]) for start in range(len(constraints))]
    return min(families, key=lambda family: _loss(family, independent), default=[])


def _family(
    space: SearchSpace, constraints: Sequence[Constraint], start: int, configuration: Configuration
) -> list[Configuration]:
    above, below = [configuration], [configuration]
    for constraint in constraints[start + 1 :]:
        above.append(solve(space.between(lower=above[-1]), constraint))
    for constraint in reversed(constraints[:start]):
        below.append(solve(space.between(upper=below[-1]), constraint))
    # Both lists start with `configuration`: it is dropped from `below`, which descends and so is reversed.
    return below[:0:-1] + above


def _loss(family: Sequence[Configuration], independent: Sequence[Configuration]) -> float:
    """The sum of the predicted scores, each relative to that of its budget solved on its own."""
    floor = 1e-12  # keeps budgets that lose nothing at all comparable
    return sum(
        (predicted_score(nested_one) + floor) / (predicted_score(alone) + floor)
        for nested_one, alone in zip(family, independent, strict=True)
    )
