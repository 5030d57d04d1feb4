from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvtuner.report.plots.drawing import Drawing, Widths
from kvtuner.report.plots.kl_by_bits import KlPicture, kl_by_bits, search_points
from kvtuner.report.search_data import SAMPLED, MeasuredPoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.report.search_data import ReportData

    MakeReport = Callable[..., ReportData]


def picture_of(data: ReportData) -> KlPicture:
    picture = search_points(data)
    assert picture is not None
    return picture


def names(drawing: Drawing) -> set[str]:
    return {mark.text for mark in drawing.marks if mark.tag == "text" and mark.title}


def corners(path: str) -> list[tuple[float, ...]]:
    return [tuple(map(float, place.split())) for place in path.removeprefix("M").removesuffix("Z").split("L")]


def test_the_winner_is_a_ring_around_its_rival_which_can_be_seen(make_report: MakeReport) -> None:
    data = make_report(6)
    quality = data.quality[0]
    rival = next(row for row in quality.baselines if row.label == "K4V4 + transforms")
    close = replace(rival, kl=quality.winner.kl, effective_bits=quality.winner.effective_bits)
    data = replace(data, quality=(replace(quality, baselines=(close,)),))
    drawing = kl_by_bits(picture_of(data), Widths().wide)
    (ring,) = (mark for mark in drawing.marks if mark.look == "ring own" and mark.title)
    (square,) = (mark for mark in drawing.marks if mark.look == "symbol full" and mark.title)
    left, top, size = (float(square.place[name]) for name in ("x", "y", "width"))
    xs, ys = zip(*corners(ring.place["d"]), strict=True)
    assert min(xs) < left and left + size < max(xs) and min(ys) < top and top + size < max(ys)
    assert (min(xs) + max(xs)) / 2 == pytest.approx(left + size / 2, abs=0.2)


@pytest.mark.parametrize("width", Widths())
def test_every_configuration_has_a_mark_with_its_figures(make_report: MakeReport, width: float) -> None:
    data = make_report(6)
    drawing = kl_by_bits(picture_of(data), width)
    quality = data.quality[0]
    symbols = [mark.title for mark in drawing.marks if mark.look.startswith(("symbol", "ring")) and mark.title]
    assert len(symbols) == 1 + len(quality.baselines)
    for row in (quality.winner, *quality.baselines):
        assert any(f"at {row.effective_bits:.2f} bits" in title for title in symbols)
    dots = [mark for mark in drawing.marks if mark.look == "dot s6" and mark.place["r"] == "2"]
    assert len(dots) == len(data.measured)
    assert "winner" in names(drawing)
    if width == Widths().wide:
        assert {"K8V8", "K8V4", "K4V4", "K4V2", "K2V2", "fp8"} <= names(drawing)


def test_a_kl_of_zero_lies_at_the_bottom_which_is_marked_zero(make_report: MakeReport) -> None:
    data = make_report(6)
    zero = MeasuredPoint(8.0, 8.0, 0.0, SAMPLED)
    plain, with_zero = (
        kl_by_bits(picture_of(each), Widths().wide) for each in (data, replace(data, measured=(*data.measured, zero)))
    )
    assert "0" not in {mark.text for mark in plain.marks} and "0" in {mark.text for mark in with_zero.marks}
    dots = [mark for mark in with_zero.marks if mark.look == "dot s6" and mark.place["r"] == "2"]
    lowest = max(float(mark.place["cy"]) for mark in dots)
    axis = next(mark for mark in with_zero.marks if mark.look == "axis")
    assert lowest == float(axis.place["y1"])


def test_nothing_measured_is_nothing_drawn(make_report: MakeReport) -> None:
    data = make_report(2)
    assert search_points(replace(data, quality=(), measured=(), front=())) is None
