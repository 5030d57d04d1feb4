"""Our own searches and uniforms, and the KVTuner paper's, for the comparison with recipes.

The paper (arXiv 2502.04420) has min-max grids of a token and head, no transforms, pairs pruned and layers grouped by
e_o, and NSGA-II from nothing. It maximises GSM8K answers; here all searches minimise KL on the select split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import SearchSpaceError
from kvtuner.pipeline.options import DataOptions, MeasurementOptions, ModelOptions, SearchOptions
from kvtuner.pipeline.stages.budget_search import BudgetSearch
from kvtuner.pipeline.stages.search_run import SearchRun, checked_shape, measure_sensitivity
from kvtuner.precision import SIDES, ExactWindow, PrecisionPair, RowShape, bytes_per_token
from kvtuner.run_folder import RunFolder, sha256_of
from kvtuner.search_spaces.budget import Budget, Constraint
from kvtuner.search_spaces.space import build_space, pairs_of
from kvtuner.tuner.exact_solver import solve
from kvtuner.tuner.objective import MeasuredKL, configuration_key, layer_specs
from kvtuner.tuner.samplers import POPULATION_SIZE
from kvtuner.tuner.study import refine
from kvtuner.tuner.warm_starts import warm_starts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvtuner.calibration.forward.simulator import LayerSpec
    from kvtuner.search_spaces.space import Configuration

PAPER: Final = "arXiv 2502.04420"
MANY_HEADS: Final = 16
"""So many times the heads of a model: rows of them need no padding."""


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """What a search is given besides its budget.

    Attributes:
        sequences: The sequences that calibrate, select and report.
        trials: The trials of the refinement; 0 takes the exact solution.
        padded: Whether budgets hold the padding of the model's own rows.
    """

    model: str
    data: str
    sequence_length: int
    sequences: tuple[int, int, int]
    trials: int
    padded: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class OwnSearch:
    """A calibrated model whose configurations are searched under any budget."""

    search: BudgetSearch
    settings: SearchSettings

    @classmethod
    def prepare(cls, out: Path, settings: SearchSettings, measurement: MeasurementOptions) -> OwnSearch:
        """Calibrate the model in a folder of its own, or go on there."""
        data = DataOptions(data=settings.data, sequence_length=settings.sequence_length, sequences=settings.sequences)
        # Each row of the table sets a budget of its own; that of the options is not read.
        model = ModelOptions(model=settings.model)
        options = SearchOptions(model=model, data=data, measurement=measurement, budget=("4bit",))
        folder = RunFolder(out)
        phases, table = measure_sensitivity(options, checked_shape(options), folder, phase="calibration")
        bench, identity = phases.bench, sha256_of(table.identity)
        objective = MeasuredKL(bench.simulator("select", reuse=True), table, bench.options.quant, folder, identity)
        return cls(BudgetSearch(SearchRun(options, phases, table), objective), settings)

    @property
    def window(self) -> ExactWindow:
        """The exact window of all configurations."""
        return self.search.run.bench.options.quant.window

    @property
    def unpadded(self) -> RowShape:
        """Rows of so many heads that none is padded."""
        rows = self.search.run.rows
        return replace(rows, num_kv_heads=rows.num_kv_heads * MANY_HEADS)

    def constraint(self, budget: Budget) -> Constraint:
        """A budget of rows as the settings count them."""
        rows = self.search.run.rows if self.settings.padded else self.unpadded
        return Constraint(budget, rows, (range(self.search.run.table.geometry.num_layers),))

    def stored_bits(self, configuration: Configuration, num_tokens: int, *, padded: bool = False) -> float:
        """Stored bits of an element in a cache of so many tokens, copies of the window counted."""
        rows = self.search.run.rows if padded else self.unpadded
        elements = len(configuration) * rows.num_kv_heads * (rows.head_dim + rows.v_head_dim)
        stored = Fraction(8 * bytes_per_token(pairs_of(configuration), rows), elements)
        return float(stored + self.window.bits_at(num_tokens))

    def specs(self, configuration: Configuration) -> Mapping[int, LayerSpec]:
        """The storage of every layer, as a simulator takes it."""
        return layer_specs(configuration, self.search.run.table, self.search.run.bench.options.quant)

    def key(self, configuration: Configuration) -> str:
        """Text that says everything that decides a configuration's KL besides model and data."""
        quant = self.search.run.bench.options.quant
        layouts = ", ".join(f"{side} {quant.layout(side)}" for side in SIDES)
        return f"{quant.fit}, {layouts}, {self.window}: {configuration_key(configuration)}"

    def best(self, budget: Budget) -> Configuration | None:
        """The exact solution, refined if trials are asked for; None where the budget is below 2 bits everywhere."""
        constraint = self.constraint(budget)
        if not constraint.is_met([PrecisionPair(2, 2)] * constraint.num_layers):
            return None
        space = self.search.space(constraint)
        exact = solve(space, constraint)
        if not self.settings.trials:
            return exact
        uniforms = list(self.search.uniforms().values())
        warm = warm_starts(space, constraint, uniforms, min(self.settings.trials, POPULATION_SIZE))
        objective = self.search.objective
        settings: dict[str, Any] = {"num_trials": self.settings.trials, "seed": self.settings.seed}
        return refine(space, constraint, objective, warm=warm, race=objective.against, **settings).best

    def uniforms(self, budget: Budget) -> dict[str, Configuration]:
        """The uniforms inside a budget of which no other has both sides as wide; with the best transforms."""
        constraint = self.constraint(budget)
        pairs = [PrecisionPair(*bits) for bits in product(self.search.run.bench.options.quant.widths, repeat=2)]
        kept = [pair for pair in pairs if constraint.is_met([pair] * constraint.num_layers)]
        widest = [
            pair
            for pair in kept
            if not any(other != pair and other.k_bits >= pair.k_bits and other.v_bits >= pair.v_bits for other in kept)
        ]
        return {str(pair): self.search.run.uniform(pair, transforms=True) for pair in widest}


def stored_budget(bits: float) -> Budget:
    """A budget of so many stored bits of an element."""
    return Budget("effective_bits", Fraction(bits).limit_denominator(1 << 20), "bpe")


def paper_configuration(search: OwnSearch, budget: str) -> Configuration | None:
    """What the paper's search finds; None where no trial keeps the budget."""
    run = search.search.run
    plain = {candidate: scores for candidate, scores in run.table.scores.items() if candidate.transform == "none"}
    constraint = search.constraint(Budget.parse(budget))
    space = build_space(replace(run.table, scores=plain), "e_o", constraint.shape, groups=True)
    try:
        settings: dict[str, Any] = {"num_trials": search.settings.trials, "seed": search.settings.seed}
        return refine(space, constraint, search.search.objective, warm=[], guidance="none", **settings).best
    except SearchSpaceError:
        return None
