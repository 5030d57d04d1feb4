"""The pictures of a search by name, and those with a KL axis: the Pareto front and the history."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtuner.report.plots.grid_plots import chosen_bits, sensitivity_heatmap, uniform_kl_table
from kvtuner.report.plots.label_placement import Label, place_labels
from kvtuner.report.plots.plot_style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    SKY,
    VERMILION,
    draw_intervals,
    integer_axis,
    is_number,
    limit_axes,
    log_floor,
    log_kl_axis,
    mark_zero,
    render,
    say_nothing_measured,
)
from kvtuner.report.search_data import SAMPLED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvtuner.evaluation.statistics import Interval
    from kvtuner.report.search_data import OffsetQuality, QualityRow, ReportData, TrialPoint

    Point = tuple[float, float]  # effective bits, KL

_MARGIN_BITS: Final = 0.3
_WINNER: Final[dict[str, Any]] = {"marker": "*", "mfc": ORANGE, "mec": INK}


def pareto_front(data: ReportData) -> bytes:
    """PNG of KL against effective bits: predicted front, measured configurations, baselines, winner."""
    return render(lambda figure: _draw_front(figure, data), height=5.4)


def optimization_history(data: ReportData) -> bytes:
    """PNG of measured KL by trial: warm starts, sampled, best so far; infeasible ones at the lower edge."""
    return render(lambda figure: _draw_history(figure, data.trials), height=4.6)


PICTURES: Final[Mapping[str, Callable[[ReportData], bytes]]] = MappingProxyType(
    {
        "chosen-bits": chosen_bits,
        "pareto-front": pareto_front,
        "sensitivity": sensitivity_heatmap,
        "uniform-kl": uniform_kl_table,
        "history": optimization_history,
    }
)


def _draw_front(figure: Figure, data: ReportData) -> None:
    axes = figure.add_subplot()
    quality = data.quality[0] if data.quality else None
    rows = [] if quality is None else _measured_rows(quality.winner, *quality.baselines)
    ends = [(row.effective_bits, value) for row, kl in rows for value in (kl.low, kl.mean, kl.high)]
    measured = [(p.effective_bits, p.kl) for p in data.measured if p.kl is not None and is_number(p.kl)]
    predicted = _visible_front(data, [*measured, *ends])
    values = [kl for _, kl in [*predicted, *measured, *ends]]
    if not values:
        return say_nothing_measured(axes)
    floor = log_floor(values)
    measured = _raised(measured, floor)
    log_kl_axis(axes)
    axes.set_xlabel("effective bits per element (codes, scales and padding)")
    if predicted:
        line: dict[str, Any] = {"drawstyle": "steps-post", "color": BLUE, "lw": 1.6, "zorder": 1}
        axes.plot(*np.array(predicted).T, label="predicted exact front", **line)
    if measured:
        axes.plot(*np.array(measured).T, "o", ms=4, color=SKY, alpha=0.7, mew=0, label="measured, select split")
    if quality:
        _draw_quality(axes, quality, floor)
    limit_axes(axes, [*predicted, *measured, *_raised(ends, floor)], _MARGIN_BITS)
    if min(values) <= 0:
        mark_zero(axes, floor)
    figure.legend(loc="outside lower center", ncols=2)
    means = _raised([(row.effective_bits, kl.mean) for row, kl in rows], floor)
    place_labels(axes, _labels(rows, means, quality), means, [*measured, *predicted])


def _measured_rows(*rows: QualityRow) -> list[tuple[QualityRow, Interval]]:
    return [(row, row.kl) for row in rows if row.kl]


def _visible_front(data: ReportData, others: Sequence[Point]) -> list[Point]:
    """The front as far as anything else reaches: it ends at 16 bits, far beyond."""
    end = max((bits for bits, _ in others), default=math.inf) + _MARGIN_BITS
    return sorted(
        (p.effective_bits, p.predicted_kl) for p in data.front if p.predicted_kl > 0 and p.effective_bits <= end
    )


def _raised(points: Sequence[Point], floor: float) -> list[Point]:
    return [(bits, max(kl, floor)) for bits, kl in points]


def _draw_quality(axes: Axes, quality: OffsetQuality, floor: float) -> None:
    square: dict[str, Any] = {"marker": "s", "mec": VERMILION, "mew": 1.4}
    plain = [row for row in quality.baselines if not row.transforms]
    transformed = [row for row in quality.baselines if row.transforms]
    _draw_rows(axes, plain, floor, **square, mfc="white", ms=10, label="uniform, no transforms")
    _draw_rows(axes, transformed, floor, **square, mfc=VERMILION, ms=7, label="uniform, best transforms")
    _draw_rows(axes, [quality.winner], floor, **_WINNER, mew=1.4, ms=16)
    axes.plot([], [], ls="", **_WINNER, ms=11, label="searched (winner)")  # smaller in the legend


def _draw_rows(axes: Axes, rows: Sequence[QualityRow], floor: float, **look: Any) -> None:
    if points := [(row.effective_bits, kl) for row, kl in _measured_rows(*rows)]:
        draw_intervals(axes, points, floor, **look)


def _labels(
    rows: Sequence[tuple[QualityRow, Interval]], points: Sequence[Point], quality: OffsetQuality | None
) -> list[Label]:
    """The winner's first; a baseline with and without transforms takes the same bytes and is named once."""
    labels: dict[tuple[str, float], Label] = {}
    for (row, _), (bits, kl) in zip(rows, points, strict=True):
        is_winner = quality is not None and row is quality.winner
        text = "winner" if is_winner else row.name
        labels.setdefault((text, bits), Label(text, bits, kl, bold=is_winner))
    return list(labels.values())


def _draw_history(figure: Figure, trials: Sequence[TrialPoint]) -> None:
    axes = figure.add_subplot()
    if not trials:
        return say_nothing_measured(axes)
    measured = [(trial, trial.value) for trial in trials if trial.value is not None and is_number(trial.value)]
    floor = log_floor(value for _, value in measured)
    feasible = [(trial, max(value, floor)) for trial, value in measured if trial.feasible]
    _draw_trials(axes, feasible)
    _draw_outside(axes, [trial.number for trial in trials if not trial.feasible])
    if measured:
        log_kl_axis(axes)
        low, high = axes.get_ylim()
        axes.set_ylim(low / (high / low) ** 0.08, high)  # room for the crosses
        if min(value for _, value in measured) <= 0:
            mark_zero(axes, floor)
    else:
        axes.set_yticks([])
    axes.set_xlabel("trial")
    numbers = [trial.number for trial in trials]
    axes.set_xlim(min(numbers) - 0.5 - 0.01 * len(numbers), max(numbers) + 0.5 + 0.01 * len(numbers))
    integer_axis(axes.xaxis)
    figure.legend(loc="outside lower center", ncols=2)


def _draw_trials(axes: Axes, trials: Sequence[tuple[TrialPoint, float]]) -> None:
    if trials:
        best = np.minimum.accumulate([value for _, value in trials])
        numbers = [trial.number for trial, _ in trials]
        axes.plot(numbers, best, drawstyle="steps-post", color=VERMILION, lw=1.6, label="best so far")
    for warm, marker, colour, label in ((True, "D", ORANGE, "warm start"), (False, "o", BLUE, "sampled")):
        if points := [(trial.number, value) for trial, value in trials if (trial.source != SAMPLED) == warm]:
            axes.plot(*zip(*points, strict=True), marker, ms=5, mew=0, color=colour, alpha=0.9, label=label)


def _draw_outside(axes: Axes, numbers: Sequence[int]) -> None:
    if numbers:
        lower_edge: dict[str, Any] = {"transform": axes.get_xaxis_transform()}
        label = "outside the budget, not measured"
        axes.plot(numbers, [0.02] * len(numbers), "x", ms=5, color=GREY, label=label, **lower_edge)
