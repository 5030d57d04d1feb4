from __future__ import annotations

import io
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from kvtuner.evaluation.statistics import Interval
from kvtuner.precision import ALL_BITS
from kvtuner.report.layer_strip import LayerRow
from kvtuner.report.plots import style
from kvtuner.report.plots.pareto_front import search_picture
from kvtuner.report.plots.search_plots import (
    PICTURES,
    chosen_bits,
    optimization_history,
    sensitivity_heatmap,
    uniform_kl_table,
)
from kvtuner.report.plots.style import BITS_COLOURS
from kvtuner.report.search_data import SAMPLED, MeasuredPoint, ReportData, ScoreSet, TrialPoint, UniformKl

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

    MakeReport = Callable[..., ReportData]


def chunk_names(png: bytes) -> list[bytes]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    names, at = [], 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        names.append(png[at + 4 : at + 8])
        at += 12 + length
    return names


def pixels(png: bytes) -> np.ndarray:
    return imread(io.BytesIO(png))[:, :, :3]


def is_colour(image: np.ndarray, colour: str) -> np.ndarray:
    return np.abs(image - np.array(to_rgb(colour))).max(axis=2) < 0.01


def where(image: np.ndarray, colour: str) -> tuple[float, float]:
    """Middle row and column of a colour's pixels."""
    rows, columns = np.nonzero(is_colour(image, colour))
    return float(np.median(rows)), float(np.median(columns))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[ReportData], bytes], ReportData], Axes]:
    """Axes that a picture of the search plots puts on its figure."""

    def draw(picture: Callable[[ReportData], bytes], data: ReportData) -> Axes:
        figure = Figure(figsize=(7.6, 5.4), layout="constrained")
        monkeypatch.setattr(style, "Figure", lambda: figure)
        picture(data)
        (axes,) = figure.axes
        return axes

    return draw


@pytest.mark.slow
@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
@pytest.mark.parametrize("num_layers", [1, pytest.param(80, marks=pytest.mark.slow)])
def test_pictures_come_out_the_same_twice_and_carry_no_time_or_program(
    make_report: MakeReport, picture: Callable[[ReportData], bytes], num_layers: int
) -> None:
    png = picture(make_report(num_layers))
    assert set(chunk_names(png)) == {b"IHDR", b"pHYs", b"IDAT", b"IEND"}
    assert picture(make_report(num_layers)) == png


def test_the_users_matplotlib_settings_neither_change_a_picture_nor_are_changed(make_report: MakeReport) -> None:
    data = make_report(2)
    plain = optimization_history(data)
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "figure.dpi": 40}):
        assert optimization_history(data) == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_a_name_with_dollar_signs_is_not_read_as_a_formula(make_report: MakeReport) -> None:
    data = make_report(2)
    quality = data.quality[0]
    odd = replace(quality, baselines=(replace(quality.baselines[0], name="$\\frac{x$"),))
    assert chunk_names(search_picture(replace(data, quality=(odd,))))


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
@pytest.mark.parametrize("kl", [0.0, float("nan")])
def test_pictures_stand_kl_that_is_zero_or_no_number(
    make_report: MakeReport, picture: Callable[[ReportData], bytes], kl: float
) -> None:
    data = make_report(3)
    nothing = ScoreSet(kl, kl, kl)
    bad = replace(
        data,
        sensitivity=tuple(replace(row, best=nothing) for row in data.sensitivity),
        measured=(MeasuredPoint(4.0, 4.0, kl, SAMPLED),),
        trials=(TrialPoint(0, kl, True, "exact"), TrialPoint(1, None, False, SAMPLED)),
        uniform_kl=tuple(replace(cell, kl=kl) for cell in data.uniform_kl),
        front=(),
        quality=(),
    )
    assert chunk_names(picture(bad))


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_pictures_of_a_run_that_measured_nothing_are_still_pictures(
    make_report: MakeReport, picture: Callable[[ReportData], bytes]
) -> None:
    data = make_report(1)
    bare = ReportData(data.model, data.corpus, "decode", "kl", data.budget, ())
    assert chunk_names(picture(bare))
    unmeasured = tuple(replace(row, best=ScoreSet(None, None, None)) for row in data.sensitivity)
    cells = (UniformKl(4, 4, None),)
    trials = (TrialPoint(0, None, False, SAMPLED),)
    assert chunk_names(picture(replace(bare, sensitivity=unmeasured, uniform_kl=cells, trials=trials)))


def test_the_front_is_drawn_as_far_as_anything_was_measured(make_report: MakeReport, drawn: Any) -> None:
    data = make_report(6)
    axes = drawn(search_picture, data)
    assert axes.get_yscale() == "log"
    lines = {line.get_label(): line for line in axes.lines}
    front = np.array(lines["predicted exact front"].get_data()).T
    end = max(row.effective_bits for row in data.quality[0].baselines)
    expected = [(p.effective_bits, p.predicted_kl) for p in data.front if p.effective_bits <= end]
    assert front[: len(expected)] == pytest.approx(np.array(expected))
    assert front[-1, 0] < end + 0.5
    dots = np.array(lines["measured, select split"].get_data()).T
    assert dots == pytest.approx(np.array([(p.effective_bits, p.kl) for p in data.measured]))


def test_every_baseline_and_the_winner_are_named_at_their_points(make_report: MakeReport, drawn: Any) -> None:
    data = make_report(6)
    axes = drawn(search_picture, data)
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert set(boxes) == {"winner", "K8V8", "K8V4", "K4V4", "K4V2", "K2V2", "fp8"}
    quality = data.quality[0]
    for name, row in [("winner", quality.winner), *((row.name, row) for row in quality.baselines[:6])]:
        assert row.kl is not None
        x, y = axes.transData.transform((row.effective_bits, row.kl.mean))
        assert boxes[name].padded(30).contains(x, y)
    (star,) = [line for line in axes.lines if line.get_marker() == "*" and len(line.get_xdata())]
    assert quality.winner.kl is not None
    place = (quality.winner.effective_bits, quality.winner.kl.mean)
    assert (*star.get_xdata(), *star.get_ydata()) == pytest.approx(place)
    assert star.get_markerfacecolor() == "none", "a full star hides what lies near it"


def test_no_label_of_the_front_hides_another(make_report: MakeReport, drawn: Any) -> None:
    data = make_report(6)
    quality = data.quality[0]
    close = tuple(
        replace(row, kl=Interval(0.01 + 0.0001 * i, 0.009, 0.011), effective_bits=4 + 0.02 * i)
        for i, row in enumerate(quality.baselines)
    )
    axes = drawn(search_picture, replace(data, quality=(replace(quality, baselines=close),)))
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) > 6
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_point_without_measurable_kl_stands_on_a_line_marked_zero(make_report: MakeReport, drawn: Any) -> None:
    data = make_report(6)
    zero = MeasuredPoint(8.0, 8.0, 0.0, SAMPLED)
    axes = drawn(search_picture, replace(data, measured=(*data.measured, zero)))
    (mark,) = [text for text in axes.texts if text.get_text() == "0"]
    dots = {line.get_label(): line for line in axes.lines}["measured, select split"]
    positive = [point.kl for point in data.measured if point.kl]
    assert dots.get_ydata()[-1] == mark.get_position()[1] < min(positive) / 2
    assert "0" not in [text.get_text() for text in drawn(search_picture, data).texts]


def test_the_history_tells_warm_starts_sampled_and_infeasible_apart(make_report: MakeReport, drawn: Any) -> None:
    trials = (
        TrialPoint(0, 0.02, True, "exact"),
        TrialPoint(1, 0.05, True, "K4V4"),
        TrialPoint(2, None, False, SAMPLED),
        TrialPoint(3, 0.01, True, SAMPLED),
        TrialPoint(4, 0.03, True, SAMPLED),
    )
    axes = drawn(optimization_history, make_report(2, trials=trials))
    found = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}
    assert found["warm start"] == [(0, 0.02), (1, 0.05)]
    assert found["sampled"] == [(3, 0.01), (4, 0.03)]
    assert found["best so far"] == [(0, 0.02), (1, 0.02), (3, 0.01), (4, 0.01)]
    assert [x for x, _ in found["outside the budget, not measured"]] == [2]


@pytest.mark.parametrize("num_layers", [1, 7, 61, 80])
def test_the_strip_gives_every_cell_the_colour_of_its_bits(make_report: MakeReport, num_layers: int) -> None:
    widths = [(2, 16), (4, 8), (3, 4), (8, 2)]
    layers = tuple(LayerRow(i, *widths[i % 4], "none", "none") for i in range(num_layers))
    image = pixels(chosen_bits(make_report(2, layers=layers)))
    cells = [bits for row in layers for bits in (row.k_bits, row.v_bits)]
    area = {bits: int(is_colour(image, colour).sum()) for bits, colour in BITS_COLOURS.items()}
    legend = dict.fromkeys(set(cells), 1.0)  # one more patch each, smaller than a cell
    for bits in BITS_COLOURS:
        share = area[bits] / sum(area.values())
        low = cells.count(bits) / (len(cells) + len(legend))
        high = (cells.count(bits) + legend.get(bits, 0)) / len(cells)
        assert low * 0.85 <= share <= high * 1.15


def test_the_strip_has_keys_above_values_and_layers_from_the_left(make_report: MakeReport) -> None:
    layers = (LayerRow(0, 2, 16, "none", "none"), LayerRow(1, 8, 8, "none", "none"))
    image = pixels(chosen_bits(make_report(2, layers=layers)))[100:]  # without the legend
    keys, values, right = (where(image, BITS_COLOURS[bits]) for bits in (2, 16, 8))
    assert keys[0] < values[0]
    assert keys[1] == pytest.approx(values[1], abs=5) and keys[1] < right[1]


def test_the_worst_layer_is_the_darkest_column_of_its_panel(make_report: MakeReport) -> None:
    data = make_report(4)
    rows = tuple(
        replace(row, best=replace(row.best, kl=5.0 if (row.layer, row.side, row.bits) == (3, "v", 4) else 1e-3))
        for row in data.sensitivity
    )
    image = pixels(sensitivity_heatmap(replace(data, sensitivity=rows))).mean(axis=2)
    height, width = image.shape
    cells = image[:, : int(0.8 * width)]  # without the colour bar
    ys, xs = np.nonzero(cells < 0.01)
    assert 0.6 * width < np.median(xs) < 0.85 * width
    assert 0.45 * height < np.median(ys) < 0.65 * height


@pytest.mark.parametrize("added", [(), (3,)])
def test_every_width_that_was_measured_has_a_panel(
    added: tuple[int, ...], make_report: MakeReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, figure = make_report(4), Figure(figsize=(7.6, 5.4), layout="constrained")
    rows = [replace(row, bits=bits) for row in data.sensitivity if row.bits == 2 for bits in added]
    monkeypatch.setattr(style, "Figure", lambda: figure)
    sensitivity_heatmap(replace(data, sensitivity=(*data.sensitivity, *rows)))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert list(filter(None, titles)) == [f"{bits} bits" for bits in sorted((2, 4, 8, *added))]


def test_the_sensitivity_picture_follows_the_score_that_allocated_the_bits(make_report: MakeReport) -> None:
    data = make_report(4)
    by_kl, by_fisher = (sensitivity_heatmap(replace(data, score=score)) for score in ("kl", "fisher"))
    assert by_kl != by_fisher


def test_the_table_of_uniform_kl_puts_keys_down_and_values_across(make_report: MakeReport) -> None:
    cells = tuple(UniformKl(k, v, 1.0 if (k, v) == (2, 16) else 1e-4) for k in ALL_BITS for v in ALL_BITS)
    image = pixels(uniform_kl_table(make_report(2, uniform_kl=cells))).mean(axis=2)
    height, width = image.shape
    ys, xs = np.nonzero(image[:, : int(0.79 * width)] < 0.01)
    assert np.median(ys) < 0.3 * height
    assert np.median(xs) > 0.55 * width
