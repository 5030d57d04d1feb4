"""The exact solver against brute force, integer programming, planted optima, and greed, which it never loses to.

And families of budgets, which never take bits away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.search_parts.greedy import greedy
from kvtuner.errors import BudgetError
from kvtuner.precision import PrecisionPair
from kvtuner.search_spaces.budget import Budget, Constraint
from kvtuner.search_spaces.space import Configuration, LayerChoice, LayerMenu, SearchSpace, pairs_of, predicted_score
from kvtuner.tuner.exact_solver import nested, solve, solve_front

Space = Callable[..., SearchSpace]
Limit = Callable[..., Constraint]
Every = Callable[[SearchSpace], Iterator[Configuration]]

ASCENDING = ["2.5bit", "3bit", "3.5bit", "4bit", "5bit", "6bit", "9bit"]
BUDGETS = ["2.6bit", "4bit", "7bit", "5.2bpe", "45%", "0.6KiB/token"]
GROUPS = [None, ((0, 1), (2,), (3,)), ((0, 1), (2, 3)), ((0,), (1,), (2, 3))]


@pytest.mark.parametrize("text", BUDGETS)
def test_solver_agrees_with_brute_force(
    random_space: Space, make_constraint: Limit, every_configuration: Every, text: str
) -> None:
    num_limited = 0
    for seed in range(60):
        space = random_space(4, seed, num_pairs=2 + seed % 4, groups=GROUPS[seed % 4])
        constraint = make_constraint(text, 4, num_stages=1 + seed % 2)
        every = list(every_configuration(space))
        inside = [configuration for configuration in every if constraint.is_met(pairs_of(configuration))]
        found = solve(space, constraint)
        assert found in inside
        assert predicted_score(found) == min(map(predicted_score, inside))
        num_limited += predicted_score(found) > min(map(predicted_score, every))
    assert num_limited > 5


def test_front_is_exactly_the_pareto_set_of_brute_force(
    random_space: Space, make_constraint: Limit, every_configuration: Every
) -> None:
    constraint = make_constraint("4bpe", 4)
    for seed in range(60):
        space = random_space(4, seed, groups=GROUPS[seed % 4])
        points = {
            (sum(constraint.cost(c.pair) for c in configuration), predicted_score(configuration))
            for configuration in every_configuration(space)
        }
        expected = {
            (cost, score)
            for cost, score in points
            if not any((x, y) != (cost, score) and x <= cost and y <= score for x, y in points)
        }
        front = solve_front(space, constraint.cost)
        assert list(zip(front.costs.tolist(), front.scores.tolist(), strict=True)) == sorted(expected)


def test_configurations_of_the_front_cost_and_score_what_it_says(random_space: Space, make_constraint: Limit) -> None:
    constraint = make_constraint("4bit", 9, num_stages=3)
    space = random_space(9, 1, num_pairs=12)
    for stage in constraint.stages:
        front = solve_front(space, constraint.cost, stage)
        assert len(front) > 3
        for point in range(len(front)):
            configuration = front.configuration(point)
            assert sum(constraint.cost(c.pair) for c in configuration) == front.costs[point]
            assert predicted_score(configuration) == front.scores[point]
            assert all(c in space.menus[layer].choices for layer, c in zip(stage, configuration, strict=True))


def test_best_of_a_front_is_its_last_point_inside_the_cap(random_space: Space, make_constraint: Limit) -> None:
    front = solve_front(random_space(5, 2), make_constraint("4bit", 5).cost)
    for point, cost in enumerate(front.costs.tolist()):
        assert front.best(cost) == front.configuration(point)
        if point:
            assert front.best(cost - 1) == front.configuration(point - 1)
    with pytest.raises(BudgetError, match="the cheapest configuration costs"):
        front.best(int(front.costs[0]) - 1)


@pytest.mark.parametrize("seed", range(4))
def test_solver_agrees_with_integer_programming_on_a_deep_model(
    make_space: Space, make_constraint: Limit, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    table = rng.exponential(1.0, size=(40, 17, 17)) / 4.0 ** np.arange(17)[None, :, None]
    space = make_space(40, lambda layer, pair: float(table[layer, pair.k_bits, pair.v_bits]))
    constraint = make_constraint(["2.7bit", "4.1bpe", "33%", "4.4bit"][seed], 40)
    choices = [(layer, choice) for layer, menu in enumerate(space.menus) for choice in menu.choices]
    one_each = [[float(layer == row) for layer, _ in choices] for row in range(40)]
    costs = [[float(constraint.cost(choice.pair)) for _, choice in choices]]
    oracle = milp(
        np.array([choice.score for _, choice in choices]),
        integrality=np.ones(len(choices)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(costs, 0, constraint.cap(0))],
        options={"mip_rel_gap": 0.0},
    )
    assert oracle.status == 0
    # The program's own tolerances on integrality and optimality are 1e-6.
    assert predicted_score(solve(space, constraint)) == pytest.approx(oracle.fun, rel=1e-6)


@pytest.mark.parametrize("text", ["bit", "bpe"])
def test_planted_optimum_is_found(make_space: Space, make_constraint: Limit, text: str) -> None:
    rng = np.random.default_rng(5)
    pairs = [PrecisionPair(2, 2), PrecisionPair(4, 2), PrecisionPair(4, 8), PrecisionPair(8, 8), PrecisionPair(16, 16)]
    for _ in range(20):
        planted = [pairs[i] for i in rng.integers(0, len(pairs), size=30)]
        # Whoever takes less than the planted pair anywhere pays 1; taking more gains nothing.
        space = make_space(
            30, lambda layer, pair, planted=planted: float(pairs.index(pair) < pairs.index(planted[layer])), pairs=pairs
        )
        needed = make_constraint(f"100{text}", 30).smallest(planted).removesuffix(text)
        assert pairs_of(solve(space, make_constraint(f"{needed}{text}", 30))) == planted


def test_every_stage_keeps_its_own_cap(random_space: Space, make_constraint: Limit) -> None:
    for seed in range(40):
        space = random_space(7, seed, num_pairs=6)
        constraint = make_constraint("40%", 7, num_stages=3)
        try:
            found = solve(space, constraint)
        except BudgetError:
            continue
        for stage, layers in enumerate(constraint.stages):
            assert sum(constraint.cost(found[layer].pair) for layer in layers) <= constraint.cap(stage)
            assert found[layers.start : layers.stop] == solve_front(space, constraint.cost, layers).best(
                constraint.cap(stage)
            )


def test_tied_layers_choose_the_same_pair(random_space: Space, make_constraint: Limit) -> None:
    groups = ((0, 3, 5), (1, 2), (4,))
    for seed in range(20):
        found = solve(random_space(6, seed, num_pairs=10, groups=groups), make_constraint("7bit", 6))
        for group in groups:
            assert len({found[layer].pair for layer in group}) == 1


def test_of_equal_scores_the_cheaper_configuration_wins(make_space: Space, make_constraint: Limit) -> None:
    space = make_space(3, lambda layer, pair: 0.5)
    assert pairs_of(solve(space, make_constraint("16bit", 3))) == [PrecisionPair(2, 2)] * 3


def test_negative_scores_are_scores_like_others(make_space: Space, make_constraint: Limit) -> None:
    space = make_space(2, lambda layer, pair: -1e-9 if pair == PrecisionPair(8, 8) else 1.0 / pair.k_bits)
    assert pairs_of(solve(space, make_constraint("16bit", 2))) == [PrecisionPair(8, 8)] * 2


def test_a_budget_too_small_for_kept_layers_says_which_is_large_enough(
    make_space: Space, make_constraint: Limit
) -> None:
    free = make_space(4, lambda layer, pair: 1.0 / (pair.k_bits + pair.v_bits))
    kept = LayerMenu(1, (LayerChoice(PrecisionPair(16, 16), "none", "none", 128, 0.0),))
    space = SearchSpace((free.menus[0], kept, *free.menus[2:]), free.groups, free.shape)
    for unit in ("bit", "bpe", "%", "KiB/token"):
        constraint = make_constraint(f"0.01{unit}", 4, num_stages=2)
        with pytest.raises(BudgetError, match=r"smallest possible is \S+$") as caught:
            solve(space, constraint)
        smallest = Budget.parse(str(caught.value).split()[-1])
        assert solve(space, Constraint(smallest, constraint.shape, constraint.stages))[1].pair == PrecisionPair(16, 16)


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
    with pytest.raises(BudgetError, match="the cheapest configuration costs"):
        greedy(random_space(3, 0), make_constraint("0.1bit", 3))


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
        constraints = [make_constraint(text, 8, num_stages=1 + seed % 2) for text in ASCENDING]
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
        constraints = [make_constraint(text, 8) for text in ASCENDING]
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
