"""The bits chosen for each layer, over the score of storing that layer alone at the least width. Measures nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kvtuner.precision import SIDES, Side
from kvtuner.report.formatting import is_positive, number
from kvtuner.report.plots.drawing import CHARACTER, Drawing, LogAxis, tick_name
from kvtuner.report.search_data import SCORE_TITLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.precision import Side
    from kvtuner.report.layer_strip import LayerRow
    from kvtuner.report.search_data import ReportData, SensitivityRow

    Scores = dict[tuple[int, Side], dict[int, SensitivityRow]]

_GUTTER: Final = 46.0
_LEAST_GAP: Final = 4.0
_MOST_CELL: Final = 56.0
_CELL_HEIGHT: Final = 20.0
_BARS: Final = 66.0
_NUMBERS: Final = 18.0  # the line of layer numbers
_MOST_DECADES: Final = 4
_NOUNS: Final = dict(zip(SIDES, ("keys", "values"), strict=True))


def bits_over_sensitivity(data: ReportData, width: float) -> Drawing:
    """Cells with the width of keys and values, a column for each layer, above bars of what its least width costs.

    Many layers are split over several bands.
    """
    strip = ", ".join(f"layer {row.layer} {row.pair}" for row in data.layers)
    drawing = Drawing(width, f"Bits of keys and values: {strip}{worst_layers(data)}")
    if not data.layers:
        return drawing
    digits = len(str(max(row.layer for row in data.layers)))
    most = int((width - _GUTTER) // (max(digits, 2) * CHARACTER + _LEAST_GAP))
    columns = math.ceil(len(data.layers) / math.ceil(len(data.layers) / most))
    scores = _scores(data)
    bars = _bar_axis(data, scores)
    cell = min(_MOST_CELL, (width - _GUTTER) / columns)
    for first in range(0, len(data.layers), columns):
        band = data.layers[first : first + columns]
        _draw_band(drawing, band, cell)
        if bars is not None:
            _draw_bars(drawing, data, band, (scores, bars), cell)
        for column, row in enumerate(band):
            drawing.write(_GUTTER + (column + 0.5) * cell, drawing.height + 8, str(row.layer), "soft", anchor="middle")
        drawing.write(_GUTTER - 8, drawing.height + 8, "layer", "soft", anchor="end")
        drawing.height += _NUMBERS + 10 * (first + columns < len(data.layers))
    return drawing


def least_width(data: ReportData) -> int | None:
    """The least width that some layer was measured at, which the bars show; None where no score can be a bar."""
    bits = min((row.bits for row in data.sensitivity), default=None)
    scores = (row.best.get(data.score) for row in data.sensitivity if row.bits == bits)
    return bits if any(map(is_positive, scores)) else None


def has_gaps(data: ReportData) -> bool:
    """Whether some layer has a dashed line in place of a bar, as it was not measured at the least width."""
    bits, scores = least_width(data), _scores(data)
    if bits is None:
        return False
    rows = (scores.get((layer.layer, side), {}).get(bits) for layer in data.layers for side in _sides(data))
    values = (None if row is None else row.best.get(data.score) for row in rows)
    return not all(value is not None and math.isfinite(value) for value in values)


def worst_layers(data: ReportData) -> str:
    """The layers that cost most at the least width, as a sentence; empty where none costs anything."""
    bits = least_width(data)
    scores = [(row.best.get(data.score), row) for row in data.sensitivity if row.bits == bits]
    ranked = sorted(((score, row) for score, row in scores if score is not None), key=lambda pair: -pair[0])
    worst = ", ".join(f"layer {row.layer} {_NOUNS[row.side]} {number(score)}" for score, row in ranked[:3])
    return f". {SCORE_TITLES[data.score]} at {bits} bits is worst for {worst}" if worst else ""


def _sides(data: ReportData) -> list[Side]:
    """The sides that were measured; a latent stands as keys."""
    return [side for side in SIDES if any(row.side == side for row in data.sensitivity)]


def _scores(data: ReportData) -> Scores:
    scores: Scores = {}
    for row in data.sensitivity:
        scores.setdefault((row.layer, row.side), {})[row.bits] = row
    return scores


def _bar_axis(data: ReportData, scores: Scores) -> LogAxis | None:
    """The scale of the bars, upwards from 0; None where no score can be shown."""
    bits = least_width(data)
    values = [rows[bits].best.get(data.score) for rows in scores.values() if bits in rows]
    positive = [value for value in values if value is not None and is_positive(value)]
    if not positive:
        return None
    low = max(min(positive), max(positive) * 10.0**-_MOST_DECADES)
    # A bar of the least score can be seen too, and a power of ten lies on every scale.
    return LogAxis(min(low / 2, max(positive) / 10), max(positive) * 1.1, 0.0, _BARS)


def _draw_band(drawing: Drawing, band: Sequence[LayerRow], cell: float) -> None:
    for index, side in enumerate(SIDES):
        top = drawing.height + index * (_CELL_HEIGHT + 1)
        drawing.write(_GUTTER - 8, top + _CELL_HEIGHT / 2, _NOUNS[side], anchor="end")
        for column, row in enumerate(band):
            bits, left = (row.k_bits, row.v_bits)[index], _GUTTER + column * cell
            title = f"layer {row.layer}: {row.text}"
            drawing.rect(left + 0.5, top, cell - 1, _CELL_HEIGHT, f"cell p{bits}", title)
            drawing.write(left + cell / 2, top + _CELL_HEIGHT / 2, str(bits), f"i{bits}", anchor="middle", title=title)
    drawing.height += 2 * _CELL_HEIGHT + 7


def _draw_bars(
    drawing: Drawing, data: ReportData, band: Sequence[LayerRow], measured: tuple[Scores, LogAxis], cell: float
) -> None:
    scores, axis = measured
    bottom, right, bits = drawing.height + _BARS, _GUTTER + len(band) * cell, least_width(data)
    for place, text in _decades(axis):
        drawing.line(_GUTTER, bottom - place, right, bottom - place, "grid")
        drawing.write(_GUTTER - 8, bottom - place, text, "soft", anchor="end")
    bar = min((cell - 4) / 2, 12.0)
    for column, row in enumerate(band):
        middle = _GUTTER + (column + 0.5) * cell
        for side, left in zip(_sides(data), (middle - bar - 0.5, middle + 0.5), strict=False):
            rows = scores.get((row.layer, side), {})
            value = rows[bits].best.get(data.score) if bits in rows else None
            title = f"layer {row.layer}, {_NOUNS[side]} alone: {_score_text(data, rows)}"
            if value is not None and math.isfinite(value):
                height = max(axis.at(value), 1.5)
                drawing.rect(left, bottom - height, bar, height, f"bar {_NOUNS[side]}", title)
            else:
                drawing.line(left, bottom - 1, left + bar, bottom - 1, "unmeasured", title)
    drawing.line(_GUTTER, bottom, right, bottom, "axis")
    drawing.height = bottom + 3


def _decades(axis: LogAxis) -> list[tuple[float, str]]:
    """The powers of ten on the scale."""
    powers = range(math.ceil(math.log10(axis.low)), math.floor(math.log10(axis.high)) + 1)
    return [(axis.at(10.0**power), tick_name(10.0**power)) for power in powers]


def _score_text(data: ReportData, rows: dict[int, SensitivityRow]) -> str:
    if not rows:
        return "not measured"
    texts = (f"{number(rows[bits].best.get(data.score))} at {bits} bits" for bits in sorted(rows))
    return f"{', '.join(texts)} ({SCORE_TITLES[data.score]})"
