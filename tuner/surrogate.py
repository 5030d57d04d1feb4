"""Additive scores corrected by what a study has measured, and what is best under them. Measures nothing.

Isolated scores are right about which layers matter, and wrong about what many errors do together. Here every width of
every layer's keys and values gets a factor on its predicted score, by Bayesian linear regression on the measured
configurations, and a draw from the posterior is solved exactly. It is Thompson sampling as in Baptista and Poloczek,
"Bayesian Optimization of Combinatorial Structures" (ICML 2018), with a knapsack in place of their relaxations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtuner.search_spaces.space import LayerChoice, SearchSpace
from kvtuner.tuner.exact_solver import solve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvtuner.search_spaces.budget import Constraint

FACTOR_DEVIATION: Final = 0.5
"""Prior deviation of a factor of one width of one side of one group from 1."""
NOISE: Final = 0.1
"""The error that additive factors cannot explain, relative to the measured value."""
SMALLEST_FACTOR: Final = 0.05  # above 0, so that no error looks like a gain
NUM_DRAWS: Final = 12
WIDENING: Final = 1.4  # of the spread of draws, after each one that is not wanted


class Surrogate:
    """Proposes configurations inside a budget from those that were measured."""

    def __init__(self, space: SearchSpace, constraint: Constraint) -> None:
        """Number the factors: one of the whole prediction, then one per (group, side, width)."""
        self._space = space
        self._constraint = constraint
        self._columns: dict[tuple[int, str, int], int] = {}
        for group, places in enumerate(space.groups):
            for pair in space.menus[places[0]].pairs:
                for side, bits in (("k", pair.k_bits), ("v", pair.v_bits)):
                    self._columns.setdefault((group, side, bits), 1 + len(self._columns))

    def propose(
        self,
        measured: Mapping[tuple[int, ...], float],
        is_wanted: Callable[[tuple[int, ...]], bool],
        rng: np.random.Generator,
    ) -> tuple[int, ...] | None:
        """Indices, one per group, of a configuration that may be better than all measured ones.

        `measured` holds the KL by indices, nats per token. Indices are wanted if they are new and inside the budget.
        Draws are spread wider while they lead to what is not wanted; None if all of them do.
        """
        if not measured:
            return None
        mean, root = self._posterior(measured)
        for draw in range(NUM_DRAWS):
            # With precision = root @ root.T, solving root.T turns white noise into draws of that precision's inverse.
            noise = WIDENING**draw * rng.standard_normal(len(mean))
            indices = self._best(mean + np.linalg.solve(root.T, noise))
            if is_wanted(indices):
                return indices
        return None

    def _posterior(self, measured: Mapping[tuple[int, ...], float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean of the factors' deviations, [num_factors], and the Cholesky root of their precision."""
        # [num_measured, num_factors]: what each factor adds to the prediction; column 0 is the whole prediction.
        rows = np.stack([self._features(indices) for indices in measured])
        values = np.array(list(measured.values()), dtype=np.float64)
        # Cheap scores are in units of their own. Factors are on the score, whatever its unit.
        is_lossy = (rows[:, 0] > 0) & (values > 0)
        if is_lossy.any():
            rows *= np.median(values[is_lossy] / rows[is_lossy, 0])
        # A floor keeps configurations that lose next to nothing from outweighing all others.
        floor = 1e-3 * max(values.max(), rows[:, 0].max(), np.finfo(np.float32).tiny)
        weights = (NOISE * np.maximum(values, floor)) ** -2
        prior = np.full(rows.shape[1], FACTOR_DEVIATION**-2)
        precision = rows.T @ (weights[:, None] * rows) + np.diag(prior)
        residual = values - rows[:, 0]
        return np.linalg.solve(precision, rows.T @ (weights * residual)), np.linalg.cholesky(precision)

    def _features(self, indices: Sequence[int]) -> NDArray[np.float64]:
        row = np.zeros(1 + len(self._columns))
        for group, index in enumerate(indices):
            choices = [self._space.menus[place].choices[index] for place in self._space.groups[group]]
            score = sum(choice.score for choice in choices)
            row[0] += score
            row[self._columns[group, "k", choices[0].pair.k_bits]] += score
            row[self._columns[group, "v", choices[0].pair.v_bits]] += score
        return row

    def _best(self, deviations: NDArray[np.float64]) -> tuple[int, ...]:
        """The exact solution under scores that are multiplied by 1 + their factors' deviations."""
        menus = list(self._space.menus)
        for group, places in enumerate(self._space.groups):
            for place in places:
                choices = (self._corrected(group, choice, deviations) for choice in menus[place].choices)
                menus[place] = replace(menus[place], choices=tuple(choices))
        corrected = SearchSpace(tuple(menus), self._space.groups, self._space.shape)
        return corrected.project(solve(corrected, self._constraint))

    def _corrected(self, group: int, choice: LayerChoice, deviations: NDArray[np.float64]) -> LayerChoice:
        k, v = self._columns[group, "k", choice.pair.k_bits], self._columns[group, "v", choice.pair.v_bits]
        factor = 1.0 + float(deviations[0] + deviations[k] + deviations[v])
        return replace(choice, score=choice.score * max(factor, SMALLEST_FACTOR))
