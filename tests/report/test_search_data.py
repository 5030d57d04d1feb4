from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import RunFolderError
from kvtuner.report.search_data import BudgetOutcome, ReportData, TrialPoint

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("num_layers", [1, 6])
def test_report_data_survives_the_way_through_json_text(
    make_report: Callable[..., ReportData], num_layers: int
) -> None:
    data = make_report(num_layers)
    text = json.dumps(data.to_json(), allow_nan=False)
    assert ReportData.from_json(json.loads(text)) == data


def test_report_data_without_any_measurement_survives_too(make_report: Callable[..., ReportData]) -> None:
    bare = ReportData("m", "c", "decode", "e_o", BudgetOutcome("35%", 5, 6, 10, 30, 2, 4), make_report(3).layers)
    assert ReportData.from_json(json.loads(json.dumps(bare.to_json()))) == bare


def test_a_number_that_is_not_finite_comes_back_as_not_measured(make_report: Callable[..., ReportData]) -> None:
    data = make_report(2, trials=(TrialPoint(0, math.inf, True, "exact"),))
    text = json.dumps(data.to_json(), allow_nan=False)
    assert ReportData.from_json(json.loads(text)).trials == (TrialPoint(0, None, True, "exact"),)


def damaged(payload: dict[str, Any], *path: str | int, value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(payload))
    spot = copy
    for step in path[:-1]:
        spot = spot[step]
    spot[path[-1]] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (("layers", 1, "k_bits"), "4", r"layers\.1\.k_bits"),
        (("layers", 1, "k_bits"), 4.5, r"layers\.1\.k_bits"),
        (("score",), "loss", "score"),
        (("sensitivity", 0, "side"), "q", r"sensitivity\.0\.side"),
        (("budget",), None, "budget"),
        (("quality", 0, "winner", "kl"), [1, 2, 3], r"quality\.0\.winner\.kl"),
        (("front", 0), {"effective_bits": 3.0}, r"front\.0"),
    ],
)
def test_damaged_report_data_is_refused_in_one_line_that_names_the_field(
    make_report: Callable[..., ReportData], path: tuple[str | int, ...], value: Any, where: str
) -> None:
    payload = damaged(make_report(2).to_json(), *path, value=value)
    with pytest.raises(RunFolderError, match=f"damaged at {where}.*run the search again") as caught:
        ReportData.from_json(payload)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [None, 0, 2, "1"])
def test_report_data_of_another_version_is_refused(make_report: Callable[..., ReportData], version: object) -> None:
    with pytest.raises(RunFolderError, match=r"has version .* this kvtuner reads 1"):
        ReportData.from_json({**make_report(1).to_json(), "version": version})


def test_the_best_baseline_is_inside_the_budget_and_of_the_kind_asked_for(
    make_report: Callable[..., ReportData],
) -> None:
    quality = make_report(2).quality[0]
    plain, transformed = (quality.best_baseline(transforms=flag) for flag in (False, True))
    assert plain is not None and transformed is not None
    assert (plain.label, transformed.label) == ("K4V4", "K4V4 + transforms")
    none_fits = replace(quality, baselines=tuple(replace(row, fits_budget=False) for row in quality.baselines))
    assert none_fits.best_baseline(transforms=False) is None
