"""The picture of a search's KL against bits, as a PNG file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtuner.report.plots import style
from kvtuner.report.plots.kl_by_bits import LEAST_KL, MAX_LABELS, WITH_TRANSFORMS, search_points

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from kvtuner.report.plots.kl_by_bits import KlPicture, KlPoint, Place
    from kvtuner.report.search_data import ReportData

# The winner's star is empty and comes last, so that what it stands around can be seen.
_LOOKS: Final[dict[str, dict[str, Any]]] = {
    "plain": {"marker": "s", "mfc": "white", "mec": style.VERMILION, "mew": 1.4, "ms": 10},
    "transforms": {"marker": "s", "mfc": style.VERMILION, "mec": style.VERMILION, "mew": 1.4, "ms": 7},
    "first": {"marker": "*", "mfc": "none", "mec": style.INK, "mew": 1.4, "ms": 22},
}
_TITLES: Final = {
    "plain": "uniform, no transforms",
    "transforms": "uniform, best transforms",
    "first": "searched (winner)",
}


@style.picture
def search_picture(figure: Figure, data: ReportData) -> None:
    """The predicted front, the measured configurations, the baselines and the winner."""
    figure.set_size_inches(style.WIDTH, 5.4)
    if (picture := search_points(data)) is None:
        return style.say_nothing_measured(figure)
    _draw_points(figure, picture)


def _draw_points(figure: Figure, picture: KlPicture) -> None:
    """Points with their intervals and names, over a front and dots; on a logarithmic axis, zero and less is a line."""
    points, measured, front = picture.points, picture.measured, picture.front
    axes = figure.add_subplot(xlabel="effective bits per element (codes, scales and padding)")
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
            axes.plot(bits[chosen], means[chosen], ls="", zorder=5, label=_TITLES[kind], **look)
    axes.set_xlim(min(all_bits) - 0.3, max(all_bits) + 0.3)
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
    for point, (x, y) in sorted(zip(points, marks, strict=True), key=lambda pair: pair[0].kind != "first"):
        is_baseline = point.kind != "first"
        name = point.name.removesuffix(WITH_TRANSFORMS) if is_baseline else point.name
        labels.setdefault((name, x), style.Label(name, x, y, bold=not is_baseline))
    return list(labels.values())[:MAX_LABELS]
