from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from matplotlib.figure import Figure

from kvtuner.report.plots.style import INK, Label, place_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def log_axes() -> Axes:
    axes = Figure(figsize=(7.6, 5.4), dpi=100).add_subplot()
    axes.set(xlim=(2, 9), ylim=(1e-5, 10), yscale="log")
    return axes


def scattered(count: int, seed: int) -> list[tuple[float, float]]:
    rng = np.random.default_rng(seed)
    return [(float(x), float(10**y)) for x, y in zip(rng.uniform(2, 9, count), rng.uniform(-5, 1, count), strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_labels_hide_neither_each_other_nor_a_marker_and_stay_inside(seed: int) -> None:
    axes, points = log_axes(), scattered(14, seed)
    place_labels(axes, [Label(f"K{i}V{i}", *point) for i, point in enumerate(points)], points)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    centres = axes.transData.transform(points)
    assert not any(box.contains(x, y) for box in boxes for x, y in centres)
    frame = axes.get_window_extent().padded(0.5)
    assert all(frame.contains(*corner) for box in boxes for corner in box.corners())


def test_labels_of_one_and_the_same_point_are_spread_around_it() -> None:
    axes = log_axes()
    place_labels(axes, [Label(f"label {i}", 5.0, 0.01) for i in range(8)], [(5.0, 0.01)])
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_a_lonely_label_lies_next_to_its_point() -> None:
    axes = log_axes()
    place_labels(axes, [Label("K4V4", 5.0, 0.01)], [(5.0, 0.01)])
    x, y = axes.transData.transform((5.0, 0.01))
    (text,) = axes.texts
    box = text.get_window_extent()
    assert text.get_color() == INK
    assert 0 < max(box.x0 - x, x - box.x1, box.y0 - y, y - box.y1) < 20


def test_a_label_avoids_the_small_points_where_there_is_room() -> None:
    axes = log_axes()
    cloud = [(5.0 + dx, 0.01) for dx in np.linspace(0.05, 1.5, 60)]
    place_labels(axes, [Label("K4V4", 5.0, 0.01)], [(5.0, 0.01), *cloud])
    (box,) = [text.get_window_extent() for text in axes.texts]
    assert not any(box.contains(x, y) for x, y in axes.transData.transform(cloud))


def test_nothing_to_label_is_nothing_drawn() -> None:
    axes = log_axes()
    place_labels(axes, [], [])
    assert list(axes.texts) == []


def test_a_label_that_fits_nowhere_is_written_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    axes = log_axes()
    place_labels(axes, [Label("W" * 80, 5.0, 0.01)], [(5.0, 0.01)])
    assert [text.get_text() for text in axes.texts] == ["W" * 80]
    assert capsys.readouterr() == ("", "")
