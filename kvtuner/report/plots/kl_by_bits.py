"""A drawing of measured KL against bits: of profiles with their baselines, and of a search."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from kvtuner.evaluation.statistics import Interval
from kvtuner.report.formatting import ascii_text, interval, is_positive
from kvtuner.report.plots.drawing import Drawing, LinearAxis, LogAxis
from kvtuner.report.plots.frame import Frame, PointName, draw_legend, draw_symbol, write_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.report.plots.frame import Symbol
    from kvtuner.report.search_data import ReportData

    Kind = Literal["first", "second", "transforms", "plain"]
    Place = tuple[float, float]  # effective bits, KL

WITH_TRANSFORMS: Final = " + transforms"
MAX_BITS: Final = 64.0
MAX_KL: Final = 1e4
LEAST_KL: Final = 1e-12
MAX_NAME: Final = 24
MAX_LABELS: Final = 40
_TOP: Final = 28.0
_HEIGHT: Final = 280.0
_LEFT: Final = 46.0
# Rings last: they stand around what they would cover.
_SYMBOLS: Final[dict[Kind, Symbol]] = {"plain": "empty", "transforms": "full", "second": "ring s0", "first": "ring own"}
_BASELINES: Final = {"plain": "uniform or fp8, no transforms", "transforms": "uniform, best transforms"}


@dataclass(frozen=True, slots=True)
class KlPoint:
    """One configuration in the drawing; its kind decides how it is drawn."""

    name: str
    effective_bits: float
    kl: Interval
    kind: Kind


@dataclass(frozen=True, slots=True)
class KlPicture:
    """All that stands in the drawing.

    Attributes:
        points: What is named, with intervals.
        titles: The texts of the legend for the kinds ``first`` and ``second``.
        front: The predicted front, by ascending bits.
        measured: Configurations that are dots.
    """

    points: Sequence[KlPoint]
    titles: Mapping[str, str]
    front: Sequence[Place] = ()
    measured: Sequence[Place] = ()


def profile_points(profile: Profile, name: str, kind: Kind = "first") -> list[KlPoint]:
    """A profile and its baselines as far as they can be drawn; nothing where nothing was measured."""
    if (quality := profile.quality) is None:
        return []
    kl = quality.measured_kl
    points = [KlPoint(_plain(name), float(profile.effective_bits), Interval(kl.mean, kl.low, kl.high), kind)]
    for row in quality.baselines:
        kl_of_row = Interval(row.kl_mean, row.kl_low, row.kl_high)
        kind = "transforms" if row.name.endswith(WITH_TRANSFORMS) else "plain"
        points.append(KlPoint(_plain(row.name), row.effective_bits, kl_of_row, kind))
    # Others are not figures of a cache: a profile may come from anybody.
    return [
        point
        for point in points
        if 0 < point.effective_bits <= MAX_BITS and -MAX_KL <= point.kl.low <= point.kl.mean <= point.kl.high <= MAX_KL
    ]


def search_points(data: ReportData) -> KlPicture | None:
    """The predicted front, the measured configurations, the baselines and the winner; None where there is nothing."""
    points = []
    if data.quality:
        winner, baselines = data.quality[0].winner, data.quality[0].baselines
        points += [KlPoint("winner", winner.effective_bits, winner.kl, "first")] if winner.kl else []
        for row in baselines:
            if row.kl:
                points.append(
                    KlPoint(row.name, row.effective_bits, row.kl, "transforms" if row.transforms else "plain")
                )
    points = [point for point in points if all(map(math.isfinite, (point.kl.low, point.kl.mean, point.kl.high)))]
    measured = [(p.effective_bits, p.kl) for p in data.measured if p.kl is not None and math.isfinite(p.kl)]
    # The front ends at 16 bits, far beyond all that was measured.
    end = max((*(bits for bits, _ in measured), *(p.effective_bits for p in points)), default=math.inf) + 0.3
    front = [(p.effective_bits, p.predicted_kl) for p in data.front if p.predicted_kl > 0 and p.effective_bits <= end]
    if not (points or measured or front):
        return None
    return KlPicture(points, {"first": "searched (winner)"}, sorted(front), measured)


def kl_by_bits(picture: KlPicture, width: float) -> Drawing:
    """Points with their intervals and names, over a front and dots; KL of zero and less lies on a line marked 0."""
    points, description = picture.points, [_text(point) for point in picture.points]
    drawing = Drawing(width, f"KL by effective bits: {'; '.join(description)}")
    frame = _frame(picture, width)
    frame.draw(drawing)
    front = [(frame.x.at(bits), frame.y.at(kl)) for bits, kl in picture.front]
    measured = [(frame.x.at(bits), frame.y.at(kl)) for bits, kl in picture.measured]
    if front:
        drawing.trace([corner for before, place in zip([front[0], *front], front, strict=False)
                       for corner in ((place[0], before[1]), place)], "s0", "predicted exact front")  # fmt: skip
    for x, y in measured:
        drawing.circle(x, y, 2, "dot s6")
    places = [(frame.x.at(point.effective_bits), frame.y.at(_shown(point.kl.mean))) for point in points]
    for point, (x, _) in zip(points, places, strict=True):
        low, high = frame.y.at(_shown(point.kl.low)), frame.y.at(_shown(point.kl.high))
        drawing.line(x, low, x, high, "interval", _text(point))
    for kind, symbol in _SYMBOLS.items():
        for point, place in zip(points, places, strict=True):
            if point.kind == kind:
                draw_symbol(drawing, symbol, *place, _text(point))
    names: dict[tuple[str, float], PointName] = {}
    for point, place in sorted(zip(points, places, strict=True), key=lambda pair: pair[0].kind in _BASELINES):
        is_baseline = point.kind in _BASELINES
        name = point.name.removesuffix(WITH_TRANSFORMS) if is_baseline else point.name
        look = "" if is_baseline else "strong"
        # A baseline with and without transforms takes the same bytes and is named once.
        names.setdefault((name, point.effective_bits), PointName(name, *place, look, _text(point)))
    write_names(drawing, frame, list(names.values())[:MAX_LABELS], places, [*measured, *front])
    titles = {**_BASELINES, **picture.titles}
    entries = [(symbol, titles[kind]) for kind, symbol in _SYMBOLS.items() if any(p.kind == kind for p in points)]
    lines: list[tuple[Symbol, str]] = [("line s0", "predicted exact front")] if front else []
    dots: list[tuple[Symbol, str]] = [("dot s6", "measured, select split")] if measured else []
    draw_legend(drawing, [*entries, *lines, *dots])
    return drawing


def _frame(picture: KlPicture, width: float) -> Frame:
    points = picture.points
    ends = [_shown(kl) for point in points for kl in (point.kl.low, point.kl.mean, point.kl.high)]
    kls = [*ends, *(kl for _, kl in (*picture.front, *picture.measured))]
    bits = [*(point.effective_bits for point in points), *(x for x, _ in (*picture.front, *picture.measured))]
    positive = [kl for kl in kls if is_positive(kl)] or [1e-4]
    has_zero = min(kls) <= 0
    low = min(positive) / (10 if has_zero else 1.8)
    return Frame(
        LinearAxis(min(bits) - 0.4, max(bits) + 0.4, _LEFT, width - 4),
        LogAxis(low, max(positive) * 1.8, _TOP + _HEIGHT, _TOP),
        "effective bits per element",
        "KL, nats per token, log scale",
        has_zero=has_zero,
    )


def _shown(kl: float) -> float:
    """A KL as a logarithmic scale has it, which need not bend for the least ones."""
    return 0.0 if abs(kl) <= LEAST_KL else kl


def _text(point: KlPoint) -> str:
    return f"{point.name} at {point.effective_bits:.2f} bits has {interval(point.kl)}"


def _plain(name: str) -> str:
    text = ascii_text(name)
    return text if len(text) <= MAX_NAME else text[: MAX_NAME - 3] + "..."
