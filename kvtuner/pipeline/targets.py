"""What a search is asked for, checked before anything is loaded, and the run folder that it may write to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import BudgetError, RunFolderError, SearchSpaceError
from kvtuner.exported_configs.profile.fields import MAX_TEXT
from kvtuner.layer_ranges import write_ranges
from kvtuner.pipeline.defaults import REFINEMENT
from kvtuner.pipeline.session import ranks_of
from kvtuner.run_folder import refuse_difference, sha256_of
from kvtuner.search_spaces.budget import SMALLEST_PAIR, Budget
from kvtuner.search_spaces.written_layers import check_layers, parse_keep, parse_ranges

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence

    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.precision import PrecisionPair
    from kvtuner.run_folder import RunFolder
    from kvtuner.search_spaces.budget import Constraint

_SEARCH_FLAGS: Final = ("keep", "groups", "nested", "sampler", "trials", "storage")


@dataclass(frozen=True, slots=True)
class SearchTarget:
    """One profile to make.

    Attributes:
        asked: the budget, or the hand-written configuration with equal neighbours as one range.
        name: as part of a file name.
        suffix: of its files' names; empty where it is the only one of a command.
        identity: what decides the profile besides the measurements; plain JSON values.
        constraint: of a budget; None for a hand-written configuration.
        pairs: of a hand-written configuration; None for a budget.
    """

    asked: str
    name: str
    suffix: str
    identity: Mapping[str, Any]
    constraint: Constraint | None = None
    pairs: tuple[PrecisionPair, ...] | None = None

    @property
    def profile_file(self) -> str:
        """Name of the profile in the run folder."""
        return f"profile{self.suffix}.json"

    @property
    def identity_file(self) -> str:
        """Name of what says whose profile that is."""
        return f"target{self.suffix}.json"


def targets_of(args: Namespace, shape: ModelShape) -> list[SearchTarget]:
    """What the flags ask for; those of the refinement that say nothing get their defaults.

    Raises:
        BudgetError: neither or both of --budget and --layers, a budget that cannot be kept, or budgets that do not
            ascend where they are nested.
        SearchSpaceError: layers that contradict the model or other flags.
        GeometryError: ranks that the model cannot be split over.
    """
    if bool(args.budget) == bool(args.layers):
        raise BudgetError("give --budget (such as 4bit) or --layers (such as 0-1:bf16,2-27:K4V2), one of the two")
    if args.layers:
        _refuse_search_flags(args)
    for name, usual in REFINEMENT.items():
        if getattr(args, name) is None:
            setattr(args, name, usual)
    if args.layers:
        return [_hand_written(args, shape)]
    if args.nested and args.sampler != "none":
        raise SearchSpaceError("--nested keeps the exact family, which refinement would break; add --sampler none")
    budgets = [Budget.parse(text) for text in args.budget]
    if len({budget.name for budget in budgets}) < len(budgets):
        raise BudgetError(f"a budget is given twice: {' '.join(args.budget)}")
    constraints = [_constraint(args, shape, budget) for budget in budgets]
    if args.nested:
        _check_ascending(constraints)
    family = [budget.text for budget in budgets]
    return [
        SearchTarget(
            budget.text,
            budget.name,
            f"-{budget.name}" if len(budgets) > 1 else "",
            {
                **_identity(args, budget.text),
                "keep": {str(layer): str(pair) for layer, pair in sorted(_kept(args).items())},
                "groups": args.groups,
                "sampler": args.sampler,
                "nested": family if args.nested else None,
            },
            constraint,
        )
        for budget, constraint in zip(budgets, constraints, strict=True)
    ]


def refuse_other_targets(folder: RunFolder, targets: Sequence[SearchTarget]) -> None:
    """Check that a profile of the folder is replaced only by one of the same target.

    Raises:
        RunFolderError: it was made for another target; names the first field that differs.
    """
    for target in targets:
        if not folder.file(target.identity_file).exists():
            continue
        known = folder.read_checked(target.identity_file)
        try:
            refuse_difference(known, target.identity, f"{folder.file(target.profile_file)} is of another search")
        except RunFolderError as error:
            raise RunFolderError(
                f"{error}, or ask for all budgets in one command, such as --budget 3bit 6bit, which makes a profile"
                " for each and reuses all measurements"
            ) from error


def bind_target(folder: RunFolder, target: SearchTarget) -> None:
    """Note whose profile is about to be written.

    Raises:
        RunFolderError: another target's has been written meanwhile.
    """
    refuse_other_targets(folder, [target])
    folder.write_checked(target.identity_file, target.identity)


def _identity(args: Namespace, asked: str) -> dict[str, Any]:
    names = ("tp_size", "pp_size", "read_plan", "score", "seed")
    return {"asked": asked, **{name: getattr(args, name) for name in names}}


def _kept(args: Namespace) -> dict[int, PrecisionPair]:
    return parse_keep(args.keep) if args.keep else {}


def _refuse_search_flags(args: Namespace) -> None:
    for name in _SEARCH_FLAGS:
        if getattr(args, name):
            raise SearchSpaceError(
                f"--{name} is of a search, but --layers writes one configuration; leave one out, here or in --config"
            )


def _hand_written(args: Namespace, shape: ModelShape) -> SearchTarget:
    pairs = tuple(parse_ranges(args.layers, shape.geometry.num_layers))
    asked = write_ranges(pairs)
    if len(asked) > MAX_TEXT:  # of a profile's field, which the layers themselves stand beside
        asked = f"{len(pairs)} layers by hand, {sha256_of(asked)[:19]}"
    ranks_of(args, shape)
    return SearchTarget(asked, "layers-" + sha256_of(asked)[7:15], "", _identity(args, asked), pairs=pairs)


def _constraint(args: Namespace, shape: ModelShape, budget: Budget) -> Constraint:
    geometry, kept = shape.geometry, _kept(args)
    check_layers(kept, geometry.num_layers)
    constraint = budget.constraint(
        geometry,
        k_group_size=args.k_group_size,
        v_group_size=args.v_group_size,
        tp_size=args.tp_size,
        pp_size=args.pp_size,
    )
    least = [kept.get(layer, SMALLEST_PAIR) for layer in range(geometry.num_layers)]
    if not constraint.is_met(least):
        raise BudgetError(
            f"a budget must hold what --keep forces and {SMALLEST_PAIR} elsewhere, but {budget.text} does not hold"
            f" {args.keep!r}; the smallest possible is {constraint.smallest(least)}"
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
