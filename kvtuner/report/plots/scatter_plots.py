"""Pictures with a KL axis: the Pareto front and the history of the search. Knows nothing of pages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtuner.report.plots.label_placement import Label, place_labels
from kvtuner.report.plots.plot_style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    SKY,
    VERMILION,
    integer_axis,
    is_number,
    log_floor,
    log_kl_axis,
    mark_zero,
    plain_log_ticks,
    render,
    say_nothing_measured,
)
from kvtuner.report.search_data import SAMPLED, OffsetQuality, QualityRow, ReportData, TrialPoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Point = tuple[float, float]  # effective bits, KL

_MARGIN_BITS: Final = 0.3


def pareto_front(data: ReportData) -> bytes:
    """PNG of KL against effective bits: predicted front, measured configurations, baselines, winner."""
    return render(lambda figure: _draw_front(figure, data), height=5.4)


def optimization_history(data: ReportData) -> bytes:
    """PNG of measured KL by trial: warm starts, sampled, best so far; infeasible ones at the lower edge."""
    return render(lambda figure: _draw_history(figure, data.trials), height=4.6)


def _draw_front(figure: Figure, data: ReportData) -> None:
    axes = figure.add_subplot()
    quality = data.quality[0] if data.quality else None
    rows = [(row, row.kl) for row in (quality.winner, *quality.baselines) if row.kl] if quality else []
    ends: list[Point] = [(row.effective_bits, kl) for row, i in rows for kl in (i.low, i.mean, i.high)]
    measured: list[Point] = [(p.effective_bits, p.kl) for p in data.measured if p.kl is not None and is_number(p.kl)]
    predicted = _visible_front(data, [*measured, *ends])
    values = [kl for _, kl in [*predicted, *measured, *ends]]
    if not values:
        return say_nothing_measured(axes)
    floor = log_floor(values)
    measured = _raised(measured, floor)
    log_kl_axis(axes)
    axes.set_xlabel("effective bits per element (codes, scales and padding)")
    if predicted:
        style = {"drawstyle": "steps-post", "color": BLUE, "lw": 1.6, "zorder": 1}
        axes.plot(*np.array(predicted).T, label="predicted exact front", **style)  # type: ignore[arg-type]  # as below
    if measured:
        axes.plot(*np.array(measured).T, "o", ms=4, color=SKY, alpha=0.7, mew=0, label="measured, select split")
    if quality:
        _draw_rows(axes, quality, floor)
    _limit(axes, [*predicted, *measured, *_raised(ends, floor)])
    if min(values) <= 0:
        mark_zero(axes, floor)
    figure.legend(loc="outside lower center", ncols=2)
    if quality:
        marked = _raised([(row.effective_bits, kl.mean) for row, kl in rows], floor)
        place_labels(axes, _labels(quality, floor), marked, [*measured, *predicted])


def _visible_front(data: ReportData, others: Sequence[Point]) -> list[Point]:
    """The front as far as anything else reaches: it ends at 16 bits, far beyond."""
    end = max((bits for bits, _ in others), default=math.inf) + _MARGIN_BITS
    return sorted(
        (p.effective_bits, p.predicted_kl) for p in data.front if p.predicted_kl > 0 and p.effective_bits <= end
    )


def _raised(points: Sequence[Point], floor: float) -> list[Point]:
    return [(bits, max(kl, floor)) for bits, kl in points]


def _draw_rows(axes: Axes, quality: OffsetQuality, floor: float) -> None:
    plain = [row for row in quality.baselines if not row.transforms]
    transformed = [row for row in quality.baselines if row.transforms]
    star = {"marker": "*", "mfc": ORANGE, "mec": INK}
    _draw_marks(axes, plain, floor, mfc="white", ms=10, label="uniform, no transforms")
    _draw_marks(axes, transformed, floor, mfc=VERMILION, ms=7, label="uniform, best transforms")
    _draw_marks(axes, [quality.winner], floor, **star, ms=16)
    axes.plot([], [], ls="", **star, ms=11, label="searched (winner)")  # type: ignore[arg-type]  # as below


def _draw_marks(axes: Axes, rows: Sequence[QualityRow], floor: float, **style: object) -> None:
    intervals = [(row.effective_bits, row.kl) for row in rows if row.kl]
    if not intervals:
        return
    bits = [x for x, _ in intervals]
    lows, means, highs = (
        [max(kl, floor) for kl in kls]
        for kls in zip(*((interval.low, interval.mean, interval.high) for _, interval in intervals), strict=True)
    )
    look = {"marker": "s", "ls": "", "mec": VERMILION, "mew": 1.4, "zorder": 5, **style}
    axes.vlines(bits, lows, highs, color=INK, lw=1.2, zorder=4)
    axes.plot(bits, means, **look)  # type: ignore[arg-type]  # the stub wants each keyword's own type


def _limit(axes: Axes, points: Sequence[Point]) -> None:
    bits, kls = zip(*points, strict=True)
    axes.set_xlim(min(bits) - _MARGIN_BITS, max(bits) + _MARGIN_BITS)
    axes.set_ylim(min(kls) / 1.8, max(kls) * 1.8)
    plain_log_ticks(axes.yaxis)


def _labels(quality: OffsetQuality, floor: float) -> list[Label]:
    """The winner's first; a baseline with and without transforms takes the same bytes and is named once."""
    labels: dict[tuple[str, float], Label] = {}
    for row in (quality.winner, *quality.baselines):
        if row.kl:
            is_winner = row is quality.winner
            text = "winner" if is_winner else row.name
            label = Label(text, row.effective_bits, max(row.kl.mean, floor), bold=is_winner)
            labels.setdefault((text, row.effective_bits), label)
    return list(labels.values())


def _draw_history(figure: Figure, trials: Sequence[TrialPoint]) -> None:
    axes = figure.add_subplot()
    measured = [trial for trial in trials if is_number(trial.value)]
    if not trials:
        return say_nothing_measured(axes)
    floor = log_floor(trial.value for trial in measured)
    _draw_best(axes, [trial for trial in measured if trial.feasible], floor)
    for warm, marker, colour, label in ((True, "D", ORANGE, "warm start"), (False, "o", BLUE, "sampled")):
        chosen = [trial for trial in measured if trial.feasible and (trial.source != SAMPLED) == warm]
        if chosen:
            values = [max(trial.value or 0.0, floor) for trial in chosen]
            axes.plot([t.number for t in chosen], values, marker, ms=5, mew=0, color=colour, alpha=0.9, label=label)
    outside = [trial.number for trial in trials if not trial.feasible]
    if outside:
        axes.plot(
            outside,
            [0.02] * len(outside),
            "x",
            ms=5,
            color=GREY,
            transform=axes.get_xaxis_transform(),
            label="outside the budget, not measured",
        )
    if measured:
        log_kl_axis(axes)
        _leave_room_below(axes)
        if min(trial.value or 0.0 for trial in measured) <= 0:
            mark_zero(axes, floor)
    else:
        axes.set_yticks([])
    axes.set_xlabel("trial")
    _limit_trials(axes, [trial.number for trial in trials])
    figure.legend(loc="outside lower center", ncols=2)


def _draw_best(axes: Axes, trials: Sequence[TrialPoint], floor: float) -> None:
    if trials:
        best = np.minimum.accumulate([max(trial.value or 0.0, floor) for trial in trials])
        axes.plot(
            [t.number for t in trials],
            best,
            drawstyle="steps-post",
            color=VERMILION,
            lw=1.6,
            label="best so far",
        )


def _leave_room_below(axes: Axes) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(low / (high / low) ** 0.08, high)


def _limit_trials(axes: Axes, numbers: Sequence[int]) -> None:
    axes.set_xlim(min(numbers) - 0.5 - 0.01 * len(numbers), max(numbers) + 0.5 + 0.01 * len(numbers))
    integer_axis(axes.xaxis)
