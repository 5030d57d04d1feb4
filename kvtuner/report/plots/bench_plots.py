"""Pictures of a benchmark: memory and quality by bits, throughput by concurrency, first token by prompt."""

from __future__ import annotations

import math
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

from matplotlib.ticker import NullFormatter

from kvtuner.evaluation.cache_scheme import REFERENCE
from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME
from kvtuner.precision import GIB
from kvtuner.report.plots import style

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvtuner.report.bench_result import BenchResult, SchemeResult

OTHERS: Final = (style.BLUE, style.SKY, style.ORANGE, style.GREEN, style.PURPLE, "#8C6D1F", "#5B5B9E", "#3D8B8B")
MARKERS: Final = ("o", "s", "^", "v", "D", "P", "X", "<")


def charts(result: BenchResult) -> dict[str, bytes]:
    """PNG bytes by the names of the charts, of what was measured."""
    kinds = {row["kind"] for scheme in result.schemes for row in scheme.run.rows()}
    drawn: dict[str, tuple[bool, Callable[[Axes, BenchResult], None]]] = {
        "memory-by-bits": (len(result.schemes) > 1, _memory),
        "quality-by-bits": (any(_kl(result, scheme) for scheme in result.schemes), _quality),
        "throughput-by-concurrency": ("concurrency" in kinds, _throughput),
        "first-token-by-prompt": ("prompt" in kinds, _first_token),
    }
    return {name: _chart(draw, result) for name, (is_measured, draw) in drawn.items() if is_measured}


@style.picture
def _chart(figure: Figure, draw: Callable[[Axes, BenchResult], None], result: BenchResult) -> None:
    figure.set_size_inches(5.0, 3.9)  # narrow, so that a phone need not shrink it much
    draw(figure.add_subplot(), result)


def _memory(axes: Axes, result: BenchResult) -> None:
    axes.set_ylabel("tokens per GiB, thousands")
    axes.grid(axis="y")
    _scatter(axes, result, lambda scheme: GIB / size / 1e3 if (size := scheme.scheme.bytes_per_token) else None)


def _quality(axes: Axes, result: BenchResult) -> None:
    axes.set_yscale("log")
    _scatter(axes, result, lambda scheme: _kl(result, scheme))
    style.log_kl_axis(axes)


def _kl(result: BenchResult, scheme: SchemeResult) -> float | None:
    kl = result.quality(scheme.name, "kl_nats_per_token")
    return kl if style.is_positive(kl) else None


def _scatter(axes: Axes, result: BenchResult, value: Callable[[SchemeResult], float | None]) -> None:
    """A named point for each scheme that has bits and a value."""
    labels = [
        style.Label(scheme.name, bits, y)
        for scheme in result.schemes
        if (bits := scheme.scheme.effective_bits) is not None and (y := value(scheme)) is not None
    ]
    colours = _colours(result)
    for label in labels:
        marker, size = ("D", 8) if label.text == PROFILE_SCHEME else ("o", 6)
        axes.plot(label.x, label.y, marker, color=colours[label.text], ms=size)
    axes.set(xlabel="effective bits of a value, with its scales", xlim=(0, 17.5))
    axes.margins(y=0.15)
    axes.grid(axis="x")
    style.place_labels(axes, labels, [(label.x, label.y) for label in labels])


def _throughput(axes: Axes, result: BenchResult) -> None:
    _lines(axes, result, "concurrency", "concurrency", lambda row: row["output_tokens_per_s"])
    axes.set(xlabel="requests in flight (log scale)", ylabel="output tokens per second")
    axes.set_ylim(bottom=0)


def _first_token(axes: Axes, result: BenchResult) -> None:
    _lines(axes, result, "prompt", "prompt_tokens", lambda row: row["ttft_s"]["p50"])
    axes.set(xlabel="prompt tokens (log scale)", ylabel="median s to the first token (log scale)", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _lines(axes: Axes, result: BenchResult, kind: str, x: str, y: Callable[[Mapping[str, Any]], float | None]) -> None:
    """A line for each scheme over the loads of a kind."""
    ticks: set[int] = set()
    for scheme, marker in zip(result.schemes, cycle(MARKERS), strict=False):
        if points := [(row[x], value) for row in scheme.rows(kind) if style.is_positive(value := y(row))]:
            ticks.update(size for size, _ in points)
            width, colour = 2.4 if scheme.name == PROFILE_SCHEME else 1.3, _colours(result)[scheme.name]
            axes.plot(*zip(*points, strict=True), marker=marker, ms=5, lw=width, color=colour, label=scheme.name)
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


def _colours(result: BenchResult) -> dict[str, str]:
    """The colours of schemes by name, one for each as long as there are enough."""
    others = [scheme.name for scheme in result.schemes if scheme.name not in (PROFILE_SCHEME, REFERENCE)]
    return {PROFILE_SCHEME: style.VERMILION, REFERENCE: style.INK, **dict(zip(others, cycle(OTHERS), strict=False))}
