"""Small search spaces with scores at will, and every configuration of them."""

from __future__ import annotations

from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvtuner.precision import NATIVE_BITS, SEARCHED_BITS, PrecisionPair, RowShape
from kvtuner.search_spaces.budget import Budget, Constraint
from kvtuner.search_spaces.space import Configuration, LayerChoice, LayerMenu, SearchSpace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAIRS = [PrecisionPair(k, v) for k, v in product((*SEARCHED_BITS, NATIVE_BITS), repeat=2)]
# Rows of two heads are padded, and keys weigh twice as much as values.
SHAPE = RowShape(num_kv_heads=2, head_dim=64, v_head_dim=32)


def space_of(
    num_layers: int,
    score: Callable[[int, PrecisionPair], float],
    *,
    pairs: list[PrecisionPair] = PAIRS,
    groups: tuple[tuple[int, ...], ...] | None = None,
) -> SearchSpace:
    """A space in which every layer may choose any of `pairs`."""
    menus = tuple(
        LayerMenu(layer, tuple(LayerChoice(p, "none", "none", SHAPE.pair_bytes(p), score(layer, p)) for p in pairs))
        for layer in range(num_layers)
    )
    return SearchSpace(menus, groups or tuple((layer,) for layer in range(num_layers)), SHAPE)


@pytest.fixture(scope="session")
def make_space() -> Callable[..., SearchSpace]:
    """`make_space(num_layers, score, pairs=..., groups=...)`."""
    return space_of


@pytest.fixture(scope="session")
def random_space() -> Callable[..., SearchSpace]:
    """`random_space(num_layers, seed, num_pairs=5, groups=None)`: K2V2 and some other pairs.

    Scores are sixteenths: sums are exact in any order, and ties abound.
    """

    def build(
        num_layers: int, seed: int, num_pairs: int = 5, groups: tuple[tuple[int, ...], ...] | None = None
    ) -> SearchSpace:
        rng = np.random.default_rng(seed)
        chosen = [0, *sorted(1 + rng.choice(len(PAIRS) - 1, size=num_pairs - 1, replace=False))]
        table = rng.integers(0, 33, size=(num_layers, len(PAIRS))) / 16
        return space_of(
            num_layers,
            lambda layer, pair: float(table[layer, PAIRS.index(pair)]),
            pairs=[PAIRS[i] for i in chosen],
            groups=groups,
        )

    return build


@pytest.fixture(scope="session")
def make_constraint() -> Callable[..., Constraint]:
    """`make_constraint(text, num_layers, num_stages=1)`, without regard to whether it can be met."""

    def build(text: str, num_layers: int, num_stages: int = 1) -> Constraint:
        bounds = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
        stages = tuple(range(start, stop) for start, stop in pairwise(bounds))
        return Constraint(Budget.parse(text), SHAPE, stages)

    return build


@pytest.fixture(scope="session")
def every_configuration() -> Callable[[SearchSpace], Iterator[Configuration]]:
    """All configurations of a space, one by one."""

    def walk(space: SearchSpace) -> Iterator[Configuration]:
        return (space.configuration(indices) for indices in product(*map(range, space.sizes)))

    return walk
