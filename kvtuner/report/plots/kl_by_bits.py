"""The picture of measured KL against bits: of profiles with their baselines, and of a search."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from kvtuner.evaluation.statistics import Interval
from kvtuner.report.formatting import ascii_text, interval
from kvtuner.report.plots import style

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.report.search_data import ReportData

    Kind = Literal["first", "second", "transforms", "plain"]
    Place = tuple[float, float]  # effective bits, KL

WITH_TRANSFORMS: Final = " + transforms"
MAX_BITS: Final = 64.0
MAX_KL: Final = 1e4
LEAST_KL: Final = 1e-12
MAX_NAME: Final = 24
MAX_LABELS: Final = 40
PROFILE_WIDTH: Final = 5.2  # inches: its letters can still be read where a narrow screen shrinks it
_LOOKS: Final[dict[str, dict[str, Any]]] = {
    "plain": {"marker": "s", "mfc": "white", "mec": style.VERMILION, "mew": 1.4, "ms": 10},
    "transforms": {"marker": "s", "mfc": style.VERMILION, "mec": style.VERMILION, "mew": 1.4, "ms": 7},
    "second": {"marker": "D", "mfc": style.BLUE, "mec": style.INK, "ms": 11},
    "first": {"marker": "*", "mfc": style.ORANGE, "mec": style.INK, "mew": 1.4, "ms": 16},
}
_BASELINES: Final = {"plain": "uniform, no transforms", "transforms": "uniform, best transforms"}


@dataclass(frozen=True, slots=True)
class KlPoint:
    """One configuration in the picture; its kind decides how it is drawn."""

    name: str
    effective_bits: float
    kl: Interval
    kind: Kind


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


def profile_picture(points: Sequence[KlPoint], titles: Mapping[str, str]) -> tuple[bytes, str]:
    """PNG of at least one point and its description; titles name the kinds ``first`` and ``second`` in the legend."""
    texts = [f"{point.name} at {point.effective_bits:.2f} bits has {interval(point.kl)}" for point in points]
    return _profile_png(points, titles), f"KL by effective bits: {'; '.join(texts)}"


@style.picture
def _profile_png(figure: Figure, points: Sequence[KlPoint], titles: Mapping[str, str]) -> None:
    figure.set_size_inches(PROFILE_WIDTH, 4.4)
    labels = {"plain": "uniform or fp8, no transforms", **titles}
    _draw_points(figure, points, labels, xlabel="effective bits per element", margin_bits=0.5)


@style.picture
def search_picture(figure: Figure, data: ReportData) -> None:
    """The predicted front, the measured configurations, the baselines and the winner."""
    figure.set_size_inches(style.WIDTH, 5.4)
    points = _search_points(data)
    measured = [(p.effective_bits, p.kl) for p in data.measured if p.kl is not None and math.isfinite(p.kl)]
    # The front ends at 16 bits, far beyond all that was measured.
    end = max((*(bits for bits, _ in measured), *(p.effective_bits for p in points)), default=math.inf) + 0.3
    front = [(p.effective_bits, p.predicted_kl) for p in data.front if p.predicted_kl > 0 and p.effective_bits <= end]
    if not (points or measured or front):
        return style.say_nothing_measured(figure)
    titles, xlabel = {"first": "searched (winner)"}, "effective bits per element (codes, scales and padding)"
    _draw_points(figure, points, titles, xlabel=xlabel, margin_bits=0.3, measured=measured, front=sorted(front))


def _search_points(data: ReportData) -> list[KlPoint]:
    """The winner and its baselines at the first kind of offsets, as far as they were measured."""
    if not data.quality:
        return []
    winner, baselines = data.quality[0].winner, data.quality[0].baselines
    points = [KlPoint("winner", winner.effective_bits, winner.kl, "first")] if winner.kl else []
    for row in baselines:
        if row.kl:
            points.append(KlPoint(row.name, row.effective_bits, row.kl, "transforms" if row.transforms else "plain"))
    return points


def _draw_points(
    figure: Figure,
    points: Sequence[KlPoint],
    titles: Mapping[str, str],
    *,
    xlabel: str,
    margin_bits: float,
    measured: Sequence[Place] = (),
    front: Sequence[Place] = (),
) -> None:
    """Points with their intervals and names, over a front and dots; on a logarithmic axis, zero and less is a line."""
    axes = figure.add_subplot(xlabel=xlabel)
    bits = np.array([point.effective_bits for point in points])
    ends = np.array([(point.kl.low, point.kl.mean, point.kl.high) for point in points]).reshape(-1, 3)
    ends[np.abs(ends) <= LEAST_KL] = 0  # a logarithmic scale need not bend for the least KL
    places = [*zip(bits.repeat(3), ends.flat, strict=True), *measured, *front]
    all_bits, all_kls = zip(*places, strict=True)
    floor = style.log_floor(all_kls)
    style.log_kl_axis(axes)
    measured = [(x, max(kl, floor)) for x, kl in measured]
    if front:
        line: dict[str, Any] = {"drawstyle": "steps-post", "color": style.BLUE, "lw": 1.6, "zorder": 1}
        axes.plot(*zip(*front, strict=True), label="predicted exact front", **line)
    if measured:
        dots: dict[str, Any] = {"ms": 4, "color": style.SKY, "alpha": 0.7, "mew": 0}
        axes.plot(*zip(*measured, strict=True), "o", label="measured, select split", **dots)
    lows, means, highs = np.maximum(ends, floor).T
    for kind, look in _LOOKS.items():
        if (chosen := np.array([point.kind == kind for point in points], dtype=bool)).any():
            axes.vlines(bits[chosen], lows[chosen], highs[chosen], color=style.INK, lw=1.2, zorder=4)
            label = titles.get(kind) or _BASELINES[kind]
            axes.plot(bits[chosen], means[chosen], ls="", zorder=5, label=label, **look)
    axes.set_xlim(min(all_bits) - margin_bits, max(all_bits) + margin_bits)
    axes.set_ylim(max(min(all_kls), floor) / 1.8, max(*all_kls, floor) * 1.8)
    style.plain_log_ticks(axes.yaxis)
    if min(all_kls) <= 0:
        style.mark_zero(axes, floor)
    figure.legend(loc="outside lower center", ncols=2)
    marks = list(zip(bits.tolist(), means.tolist(), strict=True))
    style.place_labels(axes, _labels(points, marks), [*marks, *measured, *front])


def _labels(points: Sequence[KlPoint], marks: Sequence[Place]) -> list[style.Label]:
    """Profiles' first; a baseline with and without transforms takes the same bytes and is named once."""
    labels: dict[tuple[str, float], style.Label] = {}
    for point, (x, y) in sorted(zip(points, marks, strict=True), key=lambda pair: pair[0].kind in _BASELINES):
        is_baseline = point.kind in _BASELINES
        name = point.name.removesuffix(WITH_TRANSFORMS) if is_baseline else point.name
        labels.setdefault((name, x), style.Label(name, x, y, bold=not is_baseline))
    return list(labels.values())[:MAX_LABELS]


def _plain(name: str) -> str:
    text = ascii_text(name)
    return text if len(text) <= MAX_NAME else text[: MAX_NAME - 3] + "..."
