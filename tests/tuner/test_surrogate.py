"""Proposals from corrected scores, against enumeration of all configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kvtuner.precision import PrecisionPair
from kvtuner.search_spaces.budget import Constraint
from kvtuner.search_spaces.space import Configuration, SearchSpace, pairs_of
from kvtuner.tuner.exact_solver import solve
from kvtuner.tuner.surrogate import Surrogate

Space = Callable[..., SearchSpace]
Limit = Callable[..., Constraint]
PAIRS = [PrecisionPair(k, v) for k, v in product((2, 4), (2, 4))]
NUM_LAYERS = 4


class Truth:
    """What measuring would show: the predicted scores, wrong by a factor for each width of each side of each layer."""

    def __init__(self, space: SearchSpace, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.space = space
        self.factors = {
            (layer, side, bits): rng.uniform(0.1, 2.0)
            for layer in range(NUM_LAYERS)
            for side in "kv"
            for bits in (2, 4)
        }

    def __call__(self, configuration: Configuration) -> float:
        return sum(
            choice.score
            * (self.factors[layer, "k", choice.pair.k_bits] + self.factors[layer, "v", choice.pair.v_bits])
            / 2
            for layer, choice in enumerate(configuration)
        )


@pytest.fixture
def space(make_space: Space) -> SearchSpace:
    scores = np.random.default_rng(7).uniform(0.5, 1.0, size=(NUM_LAYERS, 2))
    return make_space(
        NUM_LAYERS, lambda i, p: float(scores[i, 0] / p.k_bits**2 + scores[i, 1] / p.v_bits**2), pairs=PAIRS
    )


@pytest.fixture
def constraint(make_constraint: Limit) -> Constraint:
    return make_constraint("3bit", NUM_LAYERS)


@pytest.fixture
def inside(
    space: SearchSpace, constraint: Constraint, every_configuration: Callable[[SearchSpace], Iterator[Configuration]]
) -> dict[tuple[int, ...], Configuration]:
    """Every configuration inside the budget by its indices."""
    found = (c for c in every_configuration(space) if constraint.is_met(pairs_of(c)))
    return {space.project(configuration): configuration for configuration in found}


@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("seed", range(8))
def test_measurements_lead_to_the_best_configuration_where_the_prediction_was_wrong(
    space: SearchSpace, constraint: Constraint, inside: dict[tuple[int, ...], Configuration], seed: int, unit: float
) -> None:
    factors = Truth(space, seed)

    def truth(configuration: Configuration) -> float:
        return unit * factors(configuration)

    best = min(inside, key=lambda indices: truth(inside[indices]))
    rng = np.random.default_rng(seed)
    start = space.project(solve(space, constraint))
    measured = {start: truth(inside[start])}
    surrogate = Surrogate(space, constraint)
    while best not in measured:
        proposal = surrogate.propose(measured, lambda i: i in inside and i not in measured, rng)
        assert proposal is not None
        measured[proposal] = truth(inside[proposal])
    assert len(inside) > 100
    assert len(measured) <= 25


def test_without_measurements_or_anything_new_there_is_no_proposal(
    space: SearchSpace, constraint: Constraint, inside: dict[tuple[int, ...], Configuration]
) -> None:
    surrogate, rng = Surrogate(space, constraint), np.random.default_rng(0)
    assert surrogate.propose({}, lambda _: True, rng) is None
    assert surrogate.propose(dict.fromkeys(inside, 1.0), lambda i: i not in inside, rng) is None


def test_proposals_follow_the_generator_and_keep_the_budget(
    space: SearchSpace, constraint: Constraint, inside: dict[tuple[int, ...], Configuration]
) -> None:
    measured = {indices: Truth(space, 0)(inside[indices]) for indices in list(inside)[:5]}

    def proposals(seed: int) -> list[tuple[int, ...] | None]:
        surrogate, rng = Surrogate(space, constraint), np.random.default_rng(seed)
        return [surrogate.propose(measured, lambda _: True, rng) for _ in range(20)]

    assert proposals(1) == proposals(1) != proposals(2)
    assert set(proposals(1)) <= set(inside)
    assert len(set(proposals(1))) > 5


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
def test_values_of_any_size_give_a_proposal(space: SearchSpace, constraint: Constraint, value: float) -> None:
    start = space.project(solve(space, constraint))
    proposal = Surrogate(space, constraint).propose({start: value}, lambda i: i != start, np.random.default_rng(0))
    assert proposal is not None


def test_layers_between_others_are_proposed_by_their_places(make_space: Space, make_constraint: Limit) -> None:
    def proposal(ids: tuple[int, ...]) -> tuple[int, ...] | None:
        plain = make_space(4, lambda i, p: (i + 1) / p.k_bits + 1 / p.v_bits, pairs=PAIRS)
        space = replace(plain, menus=tuple(replace(menu, layer=i) for menu, i in zip(plain.menus, ids, strict=True)))
        surrogate = Surrogate(space, make_constraint("3bit", 4))
        return surrogate.propose({(0, 0, 0, 0): 1.0}, lambda _: True, np.random.default_rng(0))

    assert proposal((3, 7, 11, 15)) == proposal((0, 1, 2, 3)) is not None


def test_tied_layers_are_proposed_the_same_pair(make_space: Space, make_constraint: Limit) -> None:
    space = make_space(4, lambda i, p: (i + 1) / p.k_bits + 1 / p.v_bits, pairs=PAIRS, groups=((0, 2), (1, 3)))
    constraint = make_constraint("3bit", 4)
    proposal = Surrogate(space, constraint).propose({(0, 0): 1.0}, lambda _: True, np.random.default_rng(0))
    assert proposal is not None
    first, second, third, fourth = pairs_of(space.configuration(proposal))
    assert (first, second) == (third, fourth)
