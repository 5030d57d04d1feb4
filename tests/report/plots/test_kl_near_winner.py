from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvtuner.evaluation.statistics import Interval
from kvtuner.report.plots.drawing import Drawing, Widths
from kvtuner.report.plots.kl_near_winner import kl_near_winner

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.report.plots.drawing import Mark
    from kvtuner.report.search_data import ReportData

    MakeReport = Callable[..., ReportData]


def of_row(drawing: Drawing, label: str) -> list[Mark]:
    return [mark for mark in drawing.marks if mark.title.startswith(f"{label}: ")]


def has_symbol(marks: list[Mark]) -> bool:
    return any(mark.look.startswith("symbol") for mark in marks)


@pytest.mark.parametrize("width", Widths())
def test_every_configuration_has_a_row_of_its_own_by_stored_bytes(make_report: MakeReport, width: float) -> None:
    quality = make_report(4).quality[0]
    drawing = kl_near_winner(quality, width)
    heights = {}
    for row in (quality.winner, *quality.baselines):
        names = [mark for mark in of_row(drawing, row.label) if mark.tag == "text"]
        heights[row.label] = float(names[0].place["y"])
    assert len(set(heights.values())) == len(heights) == 12
    beyond = [heights[row.label] for row in quality.baselines if not row.fits_budget]
    inside = [heights[row.label] for row in (quality.winner, *quality.baselines) if row.fits_budget]
    assert max(beyond) < min(inside)
    assert heights["K8V8"] < heights["fp8"] < heights["K8V4"]
    assert heights["K4V4"] < heights["winner"] < heights["K4V2"] < heights["K2V2"]


def test_what_is_far_off_is_written_at_the_end_beyond_which_it_lies(make_report: MakeReport) -> None:
    drawing = kl_near_winner(make_report(4).quality[0], 580)
    near, worse, better = (of_row(drawing, label) for label in ("winner", "K2V2", "K8V8"))
    assert has_symbol(near) and not has_symbol(worse) and not has_symbol(better)
    assert [mark.text for mark in worse if mark.text] == ["K2V2", "4.70"]
    assert [mark.text for mark in better if mark.text] == ["K8V8", "6.00e-5"]
    places = [float(marks[-1].place["x"]) for marks in (better, worse)]
    assert places[0] < 250 < places[1]


def test_a_rival_of_the_winners_bytes_and_kl_is_not_covered(make_report: MakeReport) -> None:
    quality = make_report(4).quality[0]
    twin = replace(quality.winner, name="K4V4", difference=Interval(0.0, -1e-4, 1e-4))
    drawing = kl_near_winner(replace(quality, baselines=(twin,)), 358)
    symbols = [mark for mark in drawing.marks if mark.look.startswith("symbol")]
    assert [mark.look for mark in symbols] == ["symbol empty", "symbol winner"] and symbols[0].tag == "rect"
    assert "unclear" in [mark.text for mark in drawing.marks]
    twin_y = float(symbols[0].place["y"]) + 4.5
    assert f" {twin_y + 19:g}" in symbols[1].place["d"]


@pytest.mark.parametrize(("num_sequences", "word"), [(5, "unclear"), (6, "worse")])
def test_a_rival_on_few_sequences_is_unclear(make_report: MakeReport, num_sequences: int, word: str) -> None:
    quality = make_report(4).quality[0]
    rival = replace(quality.winner, name="K4V4", difference=Interval(0.2, 0.1, 0.3))
    drawing = kl_near_winner(replace(quality, baselines=(rival,), num_sequences=num_sequences), 358)
    assert [mark.text for mark in drawing.marks if mark.text in ("unclear", "worse")] == [word]


@pytest.mark.parametrize("kl", [Interval(0, 0, 0), Interval(math.nan, 0, 1), Interval(math.inf, 0, math.inf), None])
def test_a_winner_without_a_kl_above_zero_is_drawn_too(make_report: MakeReport, kl: Interval | None) -> None:
    quality = make_report(4).quality[0]
    drawing = kl_near_winner(replace(quality, winner=replace(quality.winner, kl=kl)), 358)
    assert has_symbol(of_row(drawing, "fp8")) and has_symbol(of_row(drawing, "K4V4 + transforms"))
    assert "nan" not in str(drawing.marks)
