"""The keywords that type checkers know, against the options that functions make of them."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from os import PathLike
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from kvtuner.calibration.sensitivity import ScoreName
from kvtuner.pipeline.eval_bench_options import EvalOptions
from kvtuner.pipeline.flags.keyword_types import CalibrateKeywords, EvalKeywords, PlanKeywords, SearchKeywords
from kvtuner.pipeline.flags.option_fields import flag_fields
from kvtuner.pipeline.options import CalibrateOptions, SearchOptions
from kvtuner.pipeline.planning.plan_options import PlanOptions
from kvtuner.precision import ConstantsPlace, Fit, WordChoice
from kvtuner.read_plan_names import ReadPlanName
from kvtuner.transforms import TransformChoice
from kvtuner.tuner.samplers import SamplerName

# What the modules import for type checkers alone.
NAMES: dict[str, Any] = {
    "Mapping": Mapping,
    "Sequence": Sequence,
    "PathLike": PathLike,
    "ScoreName": ScoreName,
    "SamplerName": SamplerName,
    "ConstantsPlace": ConstantsPlace,
    "Fit": Fit,
    "WordChoice": WordChoice,
    "ReadPlanName": ReadPlanName,
    "TransformChoice": TransformChoice,
}
PAIRS: list[tuple[type, type, set[str]]] = [
    (SearchOptions, SearchKeywords, {"model", "budget"}),
    (CalibrateOptions, CalibrateKeywords, {"model"}),
    (EvalOptions, EvalKeywords, {"profile"}),
    (PlanOptions, PlanKeywords, {"model"}),
]
"""Options, the keywords beside what a function names itself, and those names."""


def types_of(kind: type) -> dict[str, Any]:
    """The type of every option by the name of its flag, with those of options that a field holds."""
    hints, found = get_type_hints(kind, localns=NAMES), {}
    for item in fields(kind):
        nested = item.default_factory
        found |= types_of(typing.cast("type", nested)) if is_dataclass(nested) else {item.name: hints[item.name]}
    return found


def members(hint: Any) -> set[Any]:
    """The types of a union; a tuple of any length is any sequence."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return {Sequence[get_args(part)[0]] if get_args(part)[1:] == (...,) else part for part in parts}


@pytest.mark.parametrize(("options", "keywords", "own"), PAIRS)
def test_keywords_are_the_options_with_their_types_and_texts(options: type, keywords: type, own: set[str]) -> None:
    kept, known = types_of(options), get_type_hints(keywords, localns=NAMES)
    flags: dict[str, Field[Any]] = flag_fields(options)
    assert set(known) == set(kept) - own
    for name, hint in known.items():
        taken, needed = members(hint), members(kept[name])
        lacking = {part for part in needed - taken if not (get_origin(part) is Literal and str in taken)}
        assert not lacking, name
        assert (NoneType in taken) == (NoneType in needed), name
        assert str in taken or "type" not in flags[name].metadata or flags[name].metadata.get("action"), name
        assert taken - needed <= {str, int, list[int], PathLike[str], Mapping[str, str]}, name
