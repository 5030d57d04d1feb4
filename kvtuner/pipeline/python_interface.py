"""The pipeline for notebooks and scripts: functions that take a command's flags as keywords, under the same names.

Importing this module imports nothing heavy; calling a function does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, TypeVar, overload

from kvtuner.pipeline.eval_bench_options import EvalOptions
from kvtuner.pipeline.flags.option_fields import defaults_of, flag_fields, options_from
from kvtuner.pipeline.options import CalibrateOptions, SearchOptions
from kvtuner.pipeline.planning.plan_options import PlanOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Unpack

    from kvtuner.pipeline.evaluate import EvaluationResult
    from kvtuner.pipeline.flags.keyword_types import CalibrateKeywords, EvalKeywords, PlanKeywords, SearchKeywords
    from kvtuner.pipeline.planning.capacity_plan import CapacityPlan
    from kvtuner.pipeline.search import CalibrationResult, SearchResult

_Options = TypeVar("_Options")
Function = TypeVar("Function", bound="Callable[..., Any]")


def _takes(kind: type) -> Callable[[Function], Function]:
    """Show the options of a class in a function's signature, in place of ``**options``."""

    def decorate(function: Function) -> Function:
        own = [item for item in signature(function).parameters.values() if item.kind is not Parameter.VAR_KEYWORD]
        names = {item.name for item in own}
        rest = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default)
            for name, default in defaults_of(kind).items()
            if name not in names
        ]
        # Notebooks complete names by it, and help() shows it.
        function.__signature__ = Signature([*own, *rest])  # type: ignore[attr-defined]  # what inspect reads first
        return function

    return decorate


@overload
def search(
    model: str | os.PathLike[str], *, budget: str | None = None, **options: Unpack[SearchKeywords]
) -> SearchResult: ...
@overload
def search(
    model: str | os.PathLike[str], *, budget: list[str] | tuple[str, ...], **options: Unpack[SearchKeywords]
) -> list[SearchResult]: ...
@_takes(SearchOptions)
def search(
    model: str | os.PathLike[str], *, budget: str | Sequence[str] | None = None, **options: Unpack[SearchKeywords]
) -> SearchResult | list[SearchResult]:
    """Search as ``kvtuner search`` does, and go on where the same search was interrupted; a result for each budget.

    Args:
        model: The hub id, the folder, or ``demo``.
        budget: The budget, such as ``4bit``, ``18KiB/token`` or ``35%``; a list of them makes a list of results. None
            with `layers`.
        **options: The other flags of the command with underscores, such as ``tp_size=2``; see
            ``kvtuner search --help``.

    Raises:
        KVTunerError: Something that is asked for cannot be done; the message says what would work.
    """
    from kvtuner.pipeline.search import run_search

    budgets = () if budget is None else (budget,) if isinstance(budget, str) else tuple(budget)
    results = run_search(_options(SearchOptions, {**options, "model": model, "budget": budgets}))
    return results[0] if budget is None or isinstance(budget, str) else results


@_takes(CalibrateOptions)
def calibrate(model: str | os.PathLike[str], **options: Unpack[CalibrateKeywords]) -> CalibrationResult:
    """Measure sensitivity only, as ``kvtuner calibrate`` does; a search with the same `out` reuses it.

    Args:
        model: The hub id, the folder, or ``demo``.
        **options: The other flags of the command with underscores; see ``kvtuner calibrate --help``.

    Raises:
        KVTunerError: Something that is asked for cannot be done; the message says what would work.
    """
    from kvtuner.pipeline.search import run_calibration

    return run_calibration(_options(CalibrateOptions, {**options, "model": model}))


@_takes(EvalOptions)
def evaluate(profile: str | os.PathLike[str], **options: Unpack[EvalKeywords]) -> EvaluationResult:
    """Evaluate a profile beside other schemes, as ``kvtuner eval`` does, and write the evaluation beside it.

    Args:
        profile: The profile's file or run folder, or its name on the hub or in the catalogue.
        **options: The other flags of the command with underscores, such as ``levels=["recall"]`` or
            ``endpoint={"profile": "http://127.0.0.1:30000"}``; see ``kvtuner eval --help``.

    Raises:
        KVTunerError: Something that is asked for cannot be done; the message says what would work.
    """
    from kvtuner.pipeline.evaluate import run_evaluation

    return run_evaluation(_options(EvalOptions, {**options, "profile": profile}))


@_takes(PlanOptions)
def plan(model: str | os.PathLike[str], **options: Unpack[PlanKeywords]) -> CapacityPlan:
    """Plan what fits some GPUs by each scheme and budget, as ``kvtuner plan`` does; loads no weights.

    Args:
        model: The hub id, the folder, or ``demo``.
        **options: The flags of the command with underscores, such as ``gpu="H100"`` and ``context_length="32k"``; see
            ``kvtuner plan --help``.

    Raises:
        KVTunerError: The model is not supported or does not fit; the message says what would work.
    """
    from kvtuner.pipeline.planning.capacity_plan import make_plan

    return make_plan(_options(PlanOptions, {**options, "model": model}))


def _options(kind: type[_Options], values: Mapping[str, Any]) -> _Options:
    names = flag_fields(kind)
    for name in values:
        if name not in names:
            raise TypeError(f"{name!r} is no option; the options are {', '.join(sorted(names))}")
    plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values.items()}
    if isinstance(endpoints := plain.get("endpoint"), Mapping):
        plain["endpoint"] = tuple(endpoints.items())
    if isinstance(budget := plain.get("budget"), str):
        plain["budget"] = (budget,)
    return options_from(kind, plain)
