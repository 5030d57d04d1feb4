"""Pictures of a benchmark: memory and quality by bits, throughput by concurrency, first token by prompt."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from matplotlib.ticker import FuncFormatter, NullFormatter

from kvtuner.evaluation.scheme import REFERENCE
from kvtuner.exported_configs.profile.evaluation_record import PROFILE
from kvtuner.precision import GIB
from kvtuner.report.plots.label_placement import Label, place_labels
from kvtuner.report.plots.plot_style import (
    BLUE,
    INK,
    ORANGE,
    SKY,
    VERMILION,
    is_positive,
    log_kl_axis,
    render,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvtuner.report.bench_result import BenchResult, SchemeResult

GREEN: Final = "#009E73"
PURPLE: Final = "#CC79A7"
OTHERS: Final = (BLUE, SKY, ORANGE, GREEN, PURPLE, "#8C6D1F", "#5B5B9E", "#3D8B8B")
MARKERS: Final = ("o", "s", "^", "v", "D", "P", "X", "<")
WIDTH: Final = 5.0
"""Inches: narrow, so that a phone need not shrink it much."""
HEIGHT: Final = 3.9


def charts(result: BenchResult) -> dict[str, bytes]:
    """PNG bytes by the names of the charts, of what was measured."""
    return {
        name: render(partial(_on_axes, draw, result), width=WIDTH, height=HEIGHT)
        for name, (is_there, draw) in _CHARTS.items()
        if is_there(result)
    }


def _on_axes(draw: Callable[[Axes, BenchResult], None], result: BenchResult, figure: Figure) -> None:
    draw(figure.add_subplot(), result)


def _scatter(axes: Axes, result: BenchResult, value: Callable[[SchemeResult], float | None]) -> None:
    """A named point for each scheme that has bits and a value."""
    labels = [
        Label(scheme.name, scheme.bits, y)
        for scheme in result.schemes
        if scheme.bits is not None and (y := value(scheme)) is not None
    ]
    for label in labels:
        marker, size = ("D", 8) if label.text == PROFILE else ("o", 6)
        axes.plot(label.x, label.y, marker, color=_colour(result, label.text), ms=size)
    axes.set_xlabel("effective bits of a value, with its scales")
    axes.set_xlim(0, 17.5)
    axes.margins(y=0.15)
    axes.grid(axis="x")
    place_labels(axes, labels, [(label.x, label.y) for label in labels])


def _memory(axes: Axes, result: BenchResult) -> None:
    axes.set_ylabel("tokens per GiB, thousands")
    axes.grid(axis="y")
    _scatter(axes, result, lambda scheme: GIB / scheme.bytes_per_token / 1e3 if scheme.bytes_per_token else None)


def _kl(result: BenchResult, scheme: SchemeResult) -> float | None:
    measured = result.quality(scheme.name, "kl_nats_per_token")
    return measured[1].mean if measured and is_positive(measured[1].mean) else None


def _quality(axes: Axes, result: BenchResult) -> None:
    axes.set_yscale("log")
    _scatter(axes, result, lambda scheme: _kl(result, scheme))
    log_kl_axis(axes)


def _throughput(axes: Axes, result: BenchResult) -> None:
    _lines(axes, result, "concurrency", "concurrency", lambda row: row["output_tokens_per_s"])
    axes.set_xlabel("requests in flight (log scale)")
    axes.set_ylabel("output tokens per second")
    axes.set_ylim(bottom=0)


def _first_token(axes: Axes, result: BenchResult) -> None:
    _lines(axes, result, "prompt", "prompt_tokens", lambda row: row["ttft_s"]["p50"])
    axes.set_yscale("log")
    axes.set_xlabel("prompt tokens (log scale)")
    axes.set_ylabel("median s to the first token (log scale)")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _lines(axes: Axes, result: BenchResult, kind: str, x: str, y: Callable[[Mapping[str, Any]], float | None]) -> None:
    ticks: set[int] = set()
    for number, scheme in enumerate(result.schemes):
        points = [(row[x], value) for row in scheme.rows(kind) if is_positive(value := y(row))]
        if not points:
            continue
        ticks |= {point[0] for point in points}
        name, width = scheme.name, 2.4 if scheme.name == PROFILE else 1.3
        xs, ys = zip(*points, strict=True)
        axes.plot(
            xs, ys, marker=MARKERS[number % len(MARKERS)], ms=5, lw=width, color=_colour(result, name), label=name
        )
    axes.set_xscale("log")
    shown = _spread(sorted(ticks))
    axes.set_xticks(shown, [f"{tick:,}" for tick in shown])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid()
    axes.legend(ncols=2)


def _spread(ticks: list[int]) -> list[int]:
    """The ticks that have room for their numbers on a logarithmic axis."""
    kept: list[int] = []
    span = math.log(ticks[-1] / ticks[0]) if len(ticks) > 1 else 1.0
    for tick in ticks:
        if not kept or math.log(tick / kept[-1]) >= span / 12:
            kept.append(tick)
    return kept


def _colour(result: BenchResult, name: str) -> str:
    """The colour of a scheme, its own as long as there are enough."""
    if name == PROFILE:
        return VERMILION
    if name == REFERENCE:
        return INK
    others = [scheme.name for scheme in result.schemes if scheme.name not in (PROFILE, REFERENCE)]
    return OTHERS[others.index(name) % len(OTHERS)]


def _has_rows(kind: str) -> Callable[[BenchResult], bool]:
    return lambda result: any(scheme.rows(kind) for scheme in result.schemes)


_CHARTS: Final[dict[str, tuple[Callable[[BenchResult], bool], Callable[[Axes, BenchResult], None]]]] = {
    "memory-by-bits": (lambda result: len(result.schemes) > 1, _memory),
    "quality-by-bits": (lambda result: any(_kl(result, scheme) for scheme in result.schemes), _quality),
    "throughput-by-concurrency": (_has_rows("concurrency"), _throughput),
    "first-token-by-prompt": (_has_rows("prompt"), _first_token),
}
