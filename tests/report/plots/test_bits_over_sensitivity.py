from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvtuner.report.plots.bits_over_sensitivity import bits_over_sensitivity, least_width
from kvtuner.report.plots.drawing import CHARACTER, Drawing, Widths
from kvtuner.report.search_data import ScoreSet
from kvtuner.report.search_report import search_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.report.plots.drawing import Mark
    from kvtuner.report.search_data import ReportData

    MakeReport = Callable[..., ReportData]


def marks(drawing: Drawing, look: str) -> list[Mark]:
    return [mark for mark in drawing.marks if look in mark.look.split()]


@pytest.mark.parametrize("width", Widths())
@pytest.mark.parametrize("num_layers", [1, 28, 80, 126])
def test_every_layer_has_a_cell_for_keys_and_values_above_its_bars(
    make_report: MakeReport, num_layers: int, width: float
) -> None:
    data = make_report(num_layers)
    drawing = bits_over_sensitivity(data, width)
    for row in data.layers:
        cells = [mark for mark in marks(drawing, "cell") if mark.title.startswith(f"layer {row.layer}: ")]
        assert [mark.look for mark in cells] == [f"cell p{row.k_bits}", f"cell p{row.v_bits}"]
        (keys,), (values,) = (
            [mark for mark in marks(drawing, name) if mark.title.startswith(f"layer {row.layer}, {name} alone: ")]
            for name in ("keys", "values")
        )
        left = float(cells[0].place["x"])
        assert left < float(keys.place["x"]) < float(values.place["x"]) < left + float(cells[0].place["width"])
        assert float(keys.place["y"]) > float(cells[1].place["y"])
    assert max(float(mark.place["x"]) + float(mark.place["width"]) for mark in marks(drawing, "cell")) <= width
    # Numbers of layers stand apart.
    digits = len(str(num_layers - 1))
    assert min(float(mark.place["width"]) for mark in marks(drawing, "cell")) >= digits * CHARACTER


def test_bars_rise_with_the_score_at_the_least_width(make_report: MakeReport) -> None:
    data = make_report(4)
    drawing = bits_over_sensitivity(data, 580)
    assert least_width(data) == 2
    heights = {mark.title: float(mark.place["height"]) for mark in marks(drawing, "bar")}
    scores = {f"layer {row.layer}, {'keys' if row.side == 'k' else 'values'}": row.best.kl for row in data.sensitivity
              if row.bits == 2}  # fmt: skip
    ranked = sorted(heights, key=lambda title: heights[title])
    assert [title.partition(" alone")[0] for title in ranked] == sorted(scores, key=lambda name: scores[name] or 0)


def test_what_was_not_measured_has_no_bar_and_says_so(make_report: MakeReport) -> None:
    data = make_report(2)
    nothing = tuple(
        replace(row, best=ScoreSet(None, None, None)) if row.layer == 1 else row for row in data.sensitivity
    )
    drawing = bits_over_sensitivity(replace(data, sensitivity=nothing), 580)
    assert len(marks(drawing, "bar")) == len(marks(drawing, "unmeasured")) == 2
    bare = bits_over_sensitivity(replace(data, sensitivity=()), 580)
    assert len(marks(bare, "cell")) == 4 and not marks(bare, "bar")


@pytest.mark.parametrize("score", [0.0, None, float("nan")])
def test_no_bars_are_promised_where_no_score_is_positive(make_report: MakeReport, score: float | None) -> None:
    data = make_report(2)
    nothing = tuple(replace(row, best=ScoreSet(score, score, score)) for row in data.sensitivity)
    data = replace(data, sensitivity=nothing)
    assert least_width(data) is None and not marks(bits_over_sensitivity(data, 580), "bar")
    assert "alone cost at" not in search_page(data) and "alone cost at 2 bits" in search_page(make_report(2))
