"""Drawings of a benchmark: tokens that fit, quality, throughput by concurrency, first token by prompt."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME
from kvtuner.precision import MIB
from kvtuner.report.formatting import count, is_positive, number
from kvtuner.report.plots.drawing import CHARACTER, NUM_SERIES, Drawing, LinearAxis, LogAxis, drawn, shortened
from kvtuner.report.plots.frame import Frame, PointName, write_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtuner.report.bench_result import BenchResult, SchemeResult
    from kvtuner.report.plots.drawing import Drawn

    RowValue = Callable[[Mapping[str, Any]], float | None]

_ROW: Final = 22.0
_HEADINGS: Final = 34.0
_LINES_TOP: Final = 28.0
_LINES_HEIGHT: Final = 230.0


class LoadAxes(NamedTuple):
    """What a chart of loads shows: the kind of load, its size, a figure of its row, and the titles of both axes."""

    kind: str
    size: str
    figure: RowValue
    x_title: str
    y_title: str
    is_logarithmic: bool


THROUGHPUT: Final = LoadAxes(
    *("concurrency", "concurrency", lambda row: row["output_tokens_per_s"]),
    *("requests in flight, log scale", "output tokens/s", False),
)
FIRST_TOKEN: Final = LoadAxes(
    *("prompt", "prompt_tokens", lambda row: None if (s := row["ttft_s"]["p50"]) is None else 1e3 * s),
    *("prompt tokens, log scale", "TTFT p50 ms, log scale", True),
)


def bench_drawings(result: BenchResult) -> dict[str, Drawn]:
    """The drawings of what was measured, by the names that ``templates/bench_sections.html`` has for them."""
    drawings = {}
    if any(scheme.tokens_that_fit and scheme.scheme.bytes_per_token for scheme in result.schemes):
        drawings["tokens-that-fit"] = drawn(partial(tokens_of_servers, result))
    if any(_kl(result, scheme) for scheme in result.schemes):
        drawings["quality-by-scheme"] = drawn(partial(quality_by_scheme, result))
    for name, axes in (("throughput-by-concurrency", THROUGHPUT), ("first-token-by-prompt", FIRST_TOKEN)):
        if any(_line(scheme, axes) for scheme in result.schemes):
            drawings[name] = drawn(partial(lines_by_load, result, axes))
    return drawings


def tokens_of_servers(result: BenchResult, width: float) -> Drawing:
    """A row for each scheme: the bytes of a token, a bar of the tokens that its server holds, and their memory."""
    rows = [
        (scheme, size, scheme.tokens_that_fit)
        for scheme in result.schemes
        if (size := scheme.scheme.bytes_per_token) is not None
    ]
    most = max(tokens or 0 for _, _, tokens in rows)
    names = _name_width(width, [scheme.name for scheme, _, _ in rows])
    start, end = names + 62.0, width - 56.0
    room = end - start - 9 * CHARACTER
    texts = [f"{scheme.name} {count(tokens)} in {_mib(size, tokens)} MiB" for scheme, size, tokens in rows]
    drawing = Drawing(width, f"Tokens that fit the server: {'; '.join(texts)}", _HEADINGS)
    drawing.write(start - 8, 8, "bytes", "soft", anchor="end")
    drawing.write(start - 8, 24, "/token", "soft", anchor="end")
    drawing.write(start, 24, "tokens that fit", "soft")
    drawing.write(width, 8, "MiB of", "soft", anchor="end")
    drawing.write(width, 24, "memory", "soft", anchor="end")
    for (scheme, size, tokens), title in zip(rows, texts, strict=True):
        middle, is_profile = drawing.height + _ROW / 2, scheme.name == PROFILE_SCHEME
        drawing.write(0, middle, shortened(scheme.name, names), "strong" if is_profile else "", title=title)
        drawing.write(start - 8, middle, count(size), "soft", anchor="end")
        length = room * (tokens or 0) / most
        drawing.rect(start, middle - 7, max(length, 1.0), 14, f"bar {'winner' if is_profile else 'other'}", title)
        text = "not served" if scheme.server is None else count(tokens)
        drawing.write(start + length + 6, middle, text, title=title)
        drawing.write(width, middle, _mib(size, tokens), "soft", anchor="end")
        drawing.height += _ROW
    return drawing


def quality_by_scheme(result: BenchResult, width: float) -> Drawing:
    """A row for each scheme with KL, by stored bits from most to least: its bits, and its KL with its interval."""
    found = [(scheme, kl) for scheme in result.schemes if (kl := _kl(result, scheme)) is not None]
    found.sort(key=lambda pair: -(pair[0].scheme.effective_bits or 0.0))
    names = _name_width(width, [scheme.name for scheme, _ in found])
    start, end = names + 50.0, width - 54.0
    means = [mean for _, (mean, _, _) in found]
    axis = LogAxis(min(means) / 2, max(means) * 2, start, end)
    bottom = _HEADINGS / 2 + len(found) * _ROW
    texts = [
        f"{scheme.name} {number(mean)} [{number(low)}, {number(high)}] at"
        f" {number(scheme.scheme.effective_bits)} bits" for scheme, (mean, low, high) in found
    ]  # fmt: skip
    drawing = Drawing(width, f"KL, nats/token: {'; '.join(texts)}", _HEADINGS / 2)
    drawing.write(start - 8, 8, "bits", "soft", anchor="end")
    for place, text in axis.ticks():
        drawing.line(place, _HEADINGS / 2, place, bottom, "grid")
        drawing.write(place, bottom + 10, text, "soft", anchor="middle")
    drawing.line(start, bottom, end, bottom, "axis")
    for (scheme, (mean, low, high)), title in zip(found, texts, strict=True):
        middle, is_profile = drawing.height + _ROW / 2, scheme.name == PROFILE_SCHEME
        drawing.write(0, middle, shortened(scheme.name, names), "strong" if is_profile else "", title=title)
        drawing.write(start - 8, middle, number(scheme.scheme.effective_bits), "soft", anchor="end")
        drawing.line(axis.at(low), middle, axis.at(high), middle, "interval", title)
        look = "winner" if is_profile else "full"
        drawing.rect(axis.at(mean) - 4.5, middle - 4.5, 9, 9, f"symbol {look}", title)
        drawing.write(width, middle, number(mean), "soft", anchor="end", title=title)
        drawing.height += _ROW
    drawing.write((start + end) / 2, bottom + 26, "KL nats/token, log scale", "soft", anchor="middle")
    drawing.height = bottom + 34
    return drawing


def lines_by_load(result: BenchResult, axes: LoadAxes, width: float) -> Drawing:
    """A line for each scheme over the loads of a kind, with its name at its end."""
    lines = {scheme.name: line for scheme in result.schemes if (line := _line(scheme, axes))}
    sizes, figures = zip(*(point for line in lines.values() for point in line), strict=True)
    names = _name_width(width, list(lines)) + 16
    low, high = min(sizes), max(max(sizes), 2 * min(sizes))
    x = LogAxis(low, high, 46.0, width - names)
    places = _LINES_TOP + _LINES_HEIGHT, _LINES_TOP
    y: LinearAxis | LogAxis = LinearAxis(0.0, 1.05 * max(figures), *places)
    if axes.is_logarithmic:
        y = LogAxis(min(figures) / 1.3, max(figures) * 1.3, *places)
    texts = [f"{name} {', '.join(f'{number(figure)} at {count(size)}' for size, figure in line)}"
             for name, line in lines.items()]  # fmt: skip
    drawing = Drawing(width, f"{axes.y_title} by {axes.x_title}: {'; '.join(texts)}")
    frame = Frame(x, y, axes.x_title, axes.y_title, tuple(sorted(set(sizes))))
    frame.draw(drawing)
    ends = []
    for (name, line), look in zip(lines.items(), _looks(list(lines)), strict=True):
        points = [(x.at(size), y.at(figure)) for size, figure in line]
        drawing.trace(points, look, name)
        for (size, figure), (left, top) in zip(line, points, strict=True):
            drawing.circle(left, top, 3.5, f"dot {look}", f"{name}: {number(figure)} at {count(size)}")
        text_look = "strong" if name == PROFILE_SCHEME else ""
        ends.append(PointName(shortened(name, names), *points[-1], text_look, name))
    write_beside(drawing, frame, ends, width - names + 14)
    return drawing


def _line(scheme: SchemeResult, axes: LoadAxes) -> list[tuple[int, float]]:
    """The sizes of loads, ascending, with their figures."""
    rows = [(int(row[axes.size]), axes.figure(row)) for row in scheme.rows(axes.kind)]
    return sorted((size, figure) for size, figure in rows if figure is not None and is_positive(figure))


def _looks(names: Sequence[str]) -> list[str]:
    others = [name for name in names if name != PROFILE_SCHEME]
    return ["own" if name == PROFILE_SCHEME else f"s{others.index(name) % NUM_SERIES}" for name in names]


def _kl(result: BenchResult, scheme: SchemeResult) -> tuple[float, float, float] | None:
    """The mean KL with its interval; None where it is not measured or nothing that a logarithmic scale has."""
    found = result.quality(scheme.name, "kl_nats_per_token")
    return (found.mean, found.low, found.high) if found is not None and is_positive(found.mean) else None


def _mib(size: int, tokens: int | None) -> str:
    return count(None if tokens is None else round(size * tokens / MIB))


def _name_width(width: float, names: Sequence[str]) -> float:
    return min(0.32 * width, max(map(len, names)) * CHARACTER + 8)
