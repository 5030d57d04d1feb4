from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvtuner.report.plots.drawing import Widths
from kvtuner.report.plots.score_cells import NUM_SHADES, Shades, sensitivity_cells, uniform_cells
from kvtuner.report.search_data import ScoreSet, UniformKl

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.report.search_data import ReportData

    MakeReport = Callable[..., ReportData]


def test_shades_follow_the_logarithm_and_hold_what_is_outside_at_their_ends() -> None:
    shades = Shades.of([1e-4, 1e-2, 1.0, 0.0, math.nan])
    assert [shades.at(value) for value in (0.0, 1e-4, 1e-2 * 1.01, 1.0, 9.0)] == [
        0, 0, NUM_SHADES // 2, NUM_SHADES - 1, NUM_SHADES - 1,
    ]  # fmt: skip
    assert Shades.of([1e-12, 1.0]).low == pytest.approx(1e-6)


@pytest.mark.parametrize("width", Widths())
@pytest.mark.parametrize("num_layers", [1, 80])
def test_the_worst_layer_has_the_worst_shade_and_every_layer_fits(
    make_report: MakeReport, num_layers: int, width: float
) -> None:
    data = make_report(num_layers)
    drawing = sensitivity_cells(data, width)
    cells = [mark for mark in drawing.marks if mark.tag == "rect" and mark.title]
    assert len(cells) == len(data.sensitivity)
    assert max(float(mark.place["x"]) + float(mark.place["width"]) for mark in cells) <= width
    worst = max(data.sensitivity, key=lambda row: row.best.kl or 0.0)
    title = f"layer {worst.layer}, {worst.side.upper()} at {worst.bits} bits"
    (cell,) = (mark for mark in cells if mark.title.startswith(title))
    assert cell.look == f"cell h{NUM_SHADES - 1}"


def test_what_was_not_measured_is_an_empty_cell_that_says_so(make_report: MakeReport) -> None:
    data = make_report(2)
    rows = (replace(data.sensitivity[0], best=ScoreSet(None, None, None)), *data.sensitivity[1:])
    drawing = sensitivity_cells(replace(data, sensitivity=rows), Widths().wide)
    (absent,) = (mark for mark in drawing.marks if mark.look == "cell absent")
    assert absent.title == "layer 0, K at 2 bits: not measured"


def test_the_description_names_the_least_width_that_was_measured(make_report: MakeReport) -> None:
    data = make_report(3)
    rows = tuple(row for row in data.sensitivity if row.bits > 2)
    drawing = sensitivity_cells(replace(data, sensitivity=rows), Widths().wide)
    assert "at 4 and 8 bits" in drawing.description and "at 4 bits is worst" in drawing.description
    assert "2 bits" not in drawing.description


@pytest.mark.parametrize("width", Widths())
def test_the_table_of_uniforms_puts_keys_down_and_values_across(make_report: MakeReport, width: float) -> None:
    cells = (UniformKl(2, 2, 1.0), UniformKl(2, 4, 0.5), UniformKl(4, 2, 0.1), UniformKl(4, 4, None))
    drawing = uniform_cells(replace(make_report(1), uniform_kl=cells), width)
    texts = [mark for mark in drawing.marks if mark.title and mark.text]
    places = {mark.text: (float(mark.place["y"]), float(mark.place["x"])) for mark in texts}
    assert places["1.00"][0] == places["0.500"][0] < places["0.100"][0] == places["-"][0]
    assert places["1.00"][1] == places["0.100"][1] < places["0.500"][1] == places["-"][1]
