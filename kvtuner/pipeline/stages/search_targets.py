"""The profiles that a search is asked for, checked against the model, and the files that they may replace."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import BudgetError, RunFolderError
from kvtuner.exported_configs.profile.field_types import MAX_TEXT
from kvtuner.layer_ranges import write_ranges
from kvtuner.pipeline.stages.search_run import check_measured, kept_pairs, serving_ranks
from kvtuner.run_folder import RunFolder, refuse_difference, sha256_of
from kvtuner.search_spaces.budget import NATIVE_PAIR, SMALLEST_PAIR, Budget, Constraint
from kvtuner.search_spaces.layer_notation import check_layers, parse_ranges

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.calibration.quantization_options import QuantizationOptions
    from kvtuner.evaluation.cache_scheme import RankLayout
    from kvtuner.pipeline.options import SearchOptions
    from kvtuner.precision import PrecisionPair

WRITE_LOCK: Final = "finish.lock"
"""The lock of whoever notes the targets of a run folder, or writes its results."""


@dataclass(frozen=True, slots=True)
class SearchTarget:
    """One profile to make: of a budget, which has a constraint, or of a hand-written one, which has pairs and ranks.

    `asked` is the budget, or the configuration with equal neighbours as one range. The suffix ends its files' names; it
    is empty where there is one target. The identity decides the profile besides the measurements, plain JSON values.
    """

    asked: str
    name: str
    suffix: str
    identity: Mapping[str, Any]
    constraint: Constraint | None = None
    pairs: tuple[PrecisionPair, ...] | None = None
    ranks: RankLayout | None = None

    def is_met(self, pairs: Sequence[PrecisionPair]) -> bool:
        """Whether pairs keep the budget, or take no more bytes of a rank than the hand-written configuration."""
        if self.constraint is not None:
            return self.constraint.is_met(pairs)
        assert self.pairs is not None and self.ranks is not None
        return self.ranks.bytes_per_token(pairs) <= self.ranks.bytes_per_token(self.pairs)

    @property
    def profile_file(self) -> str:
        """Name of the profile in the run folder."""
        return f"profile{self.suffix}.json"

    @property
    def identity_file(self) -> str:
        """Name of what says whose profile that is."""
        return f"target{self.suffix}.json"


def targets_of(options: SearchOptions, shape: ModelShape, quant: QuantizationOptions) -> list[SearchTarget]:
    """The targets of a search of this model; refuses what the model or the ranks cannot keep."""
    if options.layers:
        return [_hand_written(options, options.layers, shape, quant)]
    budgets = [Budget.parse(text) for text in options.budget]
    if len({budget.name for budget in budgets}) < len(budgets):
        raise BudgetError(f"a budget is given twice: {' '.join(options.budget)}")
    constraints = [_constraint(options, shape, quant, budget) for budget in budgets]
    if options.nested:
        _check_ascending(constraints)
    restrictions = {
        "keep": {str(layer): str(pair) for layer, pair in sorted(kept_pairs(options, shape).items())},
        "groups": options.groups,
        "sampler": options.refinement_sampler,
        "nested": [budget.text for budget in budgets] if options.nested else None,
    }
    return [
        SearchTarget(
            asked=budget.text,
            name=budget.name,
            suffix=f"-{budget.name}" if len(budgets) > 1 else "",
            identity={**_identity(options, budget.text), **restrictions},
            constraint=constraint,
        )
        for budget, constraint in zip(budgets, constraints, strict=True)
    ]


def refuse_other_targets(folder: RunFolder, targets: Sequence[SearchTarget]) -> None:
    """Refuse a folder in which a search makes, or made, the profile of another target; the error names a difference."""
    for target in targets:
        if not folder.has(target.identity_file):
            continue
        known = folder.read_checked(target.identity_file)
        noted = folder.file(target.profile_file if folder.has(target.profile_file) else target.identity_file)
        try:
            refuse_difference(known, target.identity, f"{noted} is of another search")
        except RunFolderError as error:
            raise RunFolderError(
                f"{error}, or ask for all budgets in one command, such as --budget 3bit 6bit, which makes a profile"
                f" for each and reuses all measurements; or delete {target.identity_file} to give that search up"
            ) from error


def bind_targets(folder: RunFolder, targets: Sequence[SearchTarget]) -> None:
    """Note whose profiles this search makes, before it works for them; another search may have done so meanwhile."""
    with folder.lock(WRITE_LOCK, waiting="another worker writes"):
        refuse_other_targets(folder, targets)
        for target in targets:
            folder.write_checked(target.identity_file, target.identity)


def _identity(options: SearchOptions, asked: str) -> dict[str, Any]:
    measurement = options.measurement
    return {
        "asked": asked,
        "tp_size": options.tp_size,
        "pp_size": options.pp_size,
        "read_plan": measurement.read_plan,
        "score": measurement.score,
        "seed": measurement.seed,
    }


def _hand_written(options: SearchOptions, layers: str, shape: ModelShape, quant: QuantizationOptions) -> SearchTarget:
    pairs = tuple(parse_ranges(layers, shape.geometry.ids))
    check_measured(pairs, options.measurement, shape)
    asked = write_ranges(pairs, ids=shape.geometry.ids)
    if len(asked) > MAX_TEXT:  # the limit of a profile's field; the layers themselves stand beside it
        asked = f"{len(pairs)} layers by hand, {sha256_of(asked)[:19]}"
    return SearchTarget(
        asked=asked,
        name="layers-" + sha256_of(asked)[7:15],
        suffix="",
        identity=_identity(options, asked),
        pairs=pairs,
        ranks=serving_ranks(quant, shape, tp_size=options.tp_size, pp_size=options.pp_size),
    )


def _constraint(options: SearchOptions, shape: ModelShape, quant: QuantizationOptions, budget: Budget) -> Constraint:
    geometry, kept = shape.geometry, kept_pairs(options, shape)
    check_layers(kept, geometry.ids)
    constraint = budget.constraint(
        geometry,
        quant.k_layout,
        quant.v_layout,
        tp_size=options.tp_size,
        pp_size=options.pp_size,
        window=quant.window,
        others=shape.cache,
    )
    native = [NATIVE_PAIR] * geometry.num_layers
    if constraint.is_met(native):
        raise BudgetError(
            f"{budget.text} holds every layer in bf16, so there is nothing to search; give less than"
            f" {constraint.smallest(native)}, or serve the model without a profile"
        )
    least = [kept.get(layer, SMALLEST_PAIR) for layer in geometry.ids]
    if not constraint.is_met(least):
        raise BudgetError(
            f"a budget must hold what --keep forces and {SMALLEST_PAIR} elsewhere, but {budget.text} does not hold"
            f" {options.keep!r}; the smallest possible is {constraint.smallest(least)}"
        )
    return constraint


def _check_ascending(constraints: Sequence[Constraint]) -> None:
    if len({constraint.budget.kind == "mean_bits" for constraint in constraints}) > 1:
        raise BudgetError("nested budgets must all count payload (4bit) or all count bytes; do not mix the two")
    for smaller, larger in pairwise(constraints):
        if any(larger.cap(stage) < smaller.cap(stage) for stage in range(len(larger.stages))):
            raise BudgetError(
                f"nested budgets must ascend, but {larger.budget.text} is smaller than {smaller.budget.text} before it"
            )
