"""The picture of measured KL against bits: profiles and their baselines. Knows nothing of pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from kvtuner.evaluation.statistics import Interval
from kvtuner.report.formatting import interval
from kvtuner.report.html_page import Picture
from kvtuner.report.plots.label_placement import Label, place_labels
from kvtuner.report.plots.plot_style import (
    BLUE,
    INK,
    ORANGE,
    VERMILION,
    draw_intervals,
    limit_axes,
    log_floor,
    log_kl_axis,
    mark_zero,
    render,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from kvtuner.exported_configs.profile.profile import Profile

    Kind = Literal["first", "second", "transforms", "plain"]

WITH_TRANSFORMS: Final = " + transforms"
MAX_BITS: Final = 64.0
MAX_KL: Final = 1e4
LEAST_KL: Final = 1e-12
MAX_NAME: Final = 24
MAX_LABELS: Final = 40
_MARGIN_BITS: Final = 0.5
_WIDTH: Final = 5.2  # inches: its letters can still be read where a narrow screen shrinks it
_LOOKS: Final[dict[str, dict[str, Any]]] = {
    "plain": {"marker": "s", "mfc": "white", "mec": VERMILION, "mew": 1.4, "ms": 10},
    "transforms": {"marker": "s", "mfc": VERMILION, "mec": VERMILION, "ms": 7},
    "second": {"marker": "D", "mfc": BLUE, "mec": INK, "ms": 11},
    "first": {"marker": "*", "mfc": ORANGE, "mec": INK, "ms": 17},
}
_TITLES: Final = {"plain": "uniform or fp8, no transforms", "transforms": "uniform, best transforms"}


@dataclass(frozen=True, slots=True)
class QualityPoint:
    """One configuration in the picture.

    Attributes:
        name: The name of the configuration.
        effective_bits: The stored bits per element.
        kl: The KL with its interval, nats per token.
        kind: The kind that decides how the point is drawn.
    """

    name: str
    effective_bits: float
    kl: Interval
    kind: Kind

    @property
    def is_profile(self) -> bool:
        """Whether this is a profile, and no baseline."""
        return self.kind in ("first", "second")

    @property
    def can_be_drawn(self) -> bool:
        """Whether these are figures of a cache: a profile may come from anybody."""
        kl = self.kl
        return 0 < self.effective_bits <= MAX_BITS and -MAX_KL <= kl.low <= kl.mean <= kl.high <= MAX_KL

    def text(self) -> str:
        """A sentence for those who do not see the picture."""
        return f"{self.name} at {self.effective_bits:.2f} bits has {interval(self.kl)}"


def quality_points(profile: Profile, name: str, kind: Kind = "first") -> list[QualityPoint]:
    """A profile and its baselines as far as they can be drawn; nothing where nothing was measured."""
    if (quality := profile.quality) is None:
        return []
    kl = quality.measured_kl
    own = Interval(kl.mean, kl.low, kl.high)
    points = [QualityPoint(_plain(name), float(profile.effective_bits), own, kind)]
    for each in quality.baselines:
        kls = Interval(each.kl_mean, each.kl_low, each.kl_high)
        with_transforms: Kind = "transforms" if each.name.endswith(WITH_TRANSFORMS) else "plain"
        points.append(QualityPoint(_plain(each.name), each.effective_bits, kls, with_transforms))
    return [point for point in points if point.can_be_drawn]


def quality_picture(points: Sequence[QualityPoint], titles: dict[str, str]) -> Picture:
    """The picture of KL against effective bits.

    Args:
        points: The points to draw, at least one.
        titles: The names of the kinds ``first`` and ``second`` in the legend.
    """
    png = render(lambda figure: _draw(figure, points, {**_TITLES, **titles}), width=_WIDTH, height=4.4)
    return Picture(png, "KL by effective bits: " + "; ".join(point.text() for point in points))


def _draw(figure: Figure, points: Sequence[QualityPoint], titles: dict[str, str]) -> None:
    axes = figure.add_subplot()
    kls = [Interval(*(_visible(kl) for kl in (point.kl.mean, point.kl.low, point.kl.high))) for point in points]
    values = [value for kl in kls for value in (kl.low, kl.mean, kl.high)]
    floor = log_floor(values)
    log_kl_axis(axes)
    axes.set_xlabel("effective bits per element")
    for kind, look in _LOOKS.items():
        chosen = [(point.effective_bits, kl) for point, kl in zip(points, kls, strict=True) if point.kind == kind]
        if chosen:
            draw_intervals(axes, chosen, floor, label=titles[kind], **look)
    bits = [point.effective_bits for point in points]
    ends = [(x, max(value, floor)) for x, kl in zip(bits, kls, strict=True) for value in (kl.low, kl.high)]
    limit_axes(axes, ends, _MARGIN_BITS)
    if min(values) <= 0:
        mark_zero(axes, floor)
    figure.legend(loc="outside lower center", ncols=2)
    marks = [(x, max(kl.mean, floor)) for x, kl in zip(bits, kls, strict=True)]
    place_labels(axes, _labels(points, marks), marks)


def _labels(points: Sequence[QualityPoint], marks: Sequence[tuple[float, float]]) -> list[Label]:
    """Profiles' first; a baseline with and without transforms takes the same bytes and is named once."""
    labels: dict[tuple[str, float], Label] = {}
    for point, (x, y) in sorted(zip(points, marks, strict=True), key=lambda pair: not pair[0].is_profile):
        name = point.name if point.is_profile else point.name.removesuffix(WITH_TRANSFORMS)
        labels.setdefault((name, x), Label(name, x, y, bold=point.is_profile))
    return list(labels.values())[:MAX_LABELS]


def _visible(kl: float) -> float:
    """A KL that a logarithmic scale need not bend for."""
    return kl if abs(kl) > LEAST_KL else 0.0


def _plain(name: str) -> str:
    """A short name in letters that every font has."""
    text = "".join(c if c.isascii() and c.isprintable() else "?" for c in name)
    return text if len(text) <= MAX_NAME else text[: MAX_NAME - 3] + "..."
