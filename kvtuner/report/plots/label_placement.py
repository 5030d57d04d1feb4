"""Places text beside points so that nothing hides anything. Knows nothing of what the text says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib.patheffects import withStroke

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox
    from numpy.typing import NDArray

    Boxes = NDArray[np.float64]  # left, bottom, right, top of each, pixels

_DISTANCES: Final = (9.0, 16.0, 26.0, 38.0, 54.0)
_DIRECTIONS: Final = tuple((math.cos(angle), math.sin(angle)) for angle in (k * math.pi / 6 for k in range(12)))
_MARKER_RADIUS: Final = 6.0
_DOT_RADIUS: Final = 1.5
_LABEL_PADDING: Final = 2.0
_OUTLINE: Final = withStroke(linewidth=2.5, foreground="white")
_TEXT: Final = {"ha": "center", "va": "center", "fontsize": 10, "path_effects": [_OUTLINE], "zorder": 10}
_LINE: Final = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.7, "shrinkA": 8, "shrinkB": 5}
_LEADER: Final = {"arrowprops": _LINE, "zorder": 2}


@dataclass(frozen=True, slots=True)
class Label:
    """Text and the point that it names, in data coordinates."""

    text: str
    x: float
    y: float
    bold: bool = False


def place_labels(
    axes: Axes,
    labels: Sequence[Label],
    markers: Sequence[tuple[float, float]],
    background: Sequence[tuple[float, float]] = (),
) -> list[Annotation]:
    """Write labels, the most important first, at the nearest free place around their points; far ones get a thin line.

    The limits and scales of the axes must be final. If no place is free, the one that hides least is taken: labels
    must not cover markers, and the small points of the background only where there is no other room.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    pixels, inside = figure.dpi / 72, np.array([axes.get_window_extent().extents])
    taken = np.concatenate(
        [_squares(axes, markers, _MARKER_RADIUS * pixels), _squares(axes, background, _DOT_RADIUS * pixels)]
    )
    placed = []
    for label in labels:
        look = {**_TEXT, "fontweight": "bold" if label.bold else "normal"}
        annotation = _annotate(axes, label.text, label, (0, 0), look)
        box = annotation.get_window_extent()
        places = [(offset, box.translated(offset[0] * pixels, offset[1] * pixels)) for offset in _offsets(box, pixels)]
        areas = [_hidden_area(place, taken, inside) for _, place in places]
        offset, box = places[int(np.argmin(areas))]
        annotation.set_position(offset)
        if math.hypot(*offset) >= 2 * _DISTANCES[1] + 8:
            _annotate(axes, "", label, offset, _LEADER)
        taken = np.concatenate([taken, [box.padded(_LABEL_PADDING * pixels).extents]])
        placed.append(annotation)
    return placed


def _offsets(box: Bbox, pixels: float) -> list[tuple[float, float]]:
    """Places around a point, from near to far, in points."""
    half_width, half_height = box.width / 2 / pixels, box.height / 2 / pixels
    return [
        (right * (distance + half_width), up * (distance + half_height))
        for distance in _DISTANCES
        for right, up in _DIRECTIONS
    ]


def _hidden_area(box: Bbox, taken: Boxes, inside: Boxes) -> float:
    """Pixels that a box would hide; those outside of the axes count four times."""
    return _overlap(box, taken) + 4 * (box.width * box.height - _overlap(box, inside))


def _overlap(box: Bbox, others: Boxes) -> float:
    """Pixels that a box shares with others, each counted."""
    left, bottom, right, top = others.T
    widths = np.minimum(box.x1, right) - np.maximum(box.x0, left)
    heights = np.minimum(box.y1, top) - np.maximum(box.y0, bottom)
    return float((np.maximum(widths, 0) * np.maximum(heights, 0)).sum())


def _squares(axes: Axes, points: Sequence[tuple[float, float]], radius: float) -> Boxes:
    centres = axes.transData.transform(np.array(points, dtype=float).reshape(-1, 2))
    return np.concatenate([centres - radius, centres + radius], axis=1)


def _annotate(axes: Axes, text: str, label: Label, offset: tuple[float, float], look: dict[str, Any]) -> Annotation:
    annotation = axes.annotate(text, (label.x, label.y), xytext=offset, textcoords="offset points", **look)
    annotation.set_in_layout(False)
    return annotation
