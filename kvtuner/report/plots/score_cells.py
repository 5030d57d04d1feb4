"""Drawings of figures as coloured cells: the layers' sensitivity, and the KL of uniform pairs. Measures nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtuner.precision import SIDES
from kvtuner.report.formatting import is_positive, number
from kvtuner.report.plots.bits_over_sensitivity import worst_layers
from kvtuner.report.plots.drawing import CHARACTER, Drawing
from kvtuner.report.search_data import SCORE_TITLES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtuner.report.search_data import ReportData

NUM_SHADES: Final = 8
"""The colours of cells in the style sheet, ``h0`` and on; the last is the worst."""
_MOST_DECADES: Final = 6
_GUTTER: Final = 34.0
_ROW: Final = 20.0
_TITLE: Final = 20.0
_LEGEND: Final = 44.0


@dataclass(frozen=True, slots=True)
class Shades:
    """Colours over a logarithmic scale; what is zero or less has the first."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Shades:
        """Colours over the positive values, at most six decades of them."""
        positive = [value for value in values if is_positive(value)] or [1.0]
        low = max(min(positive), max(positive) * 10.0**-_MOST_DECADES)
        return cls(low, max(max(positive), low * 1.001))

    def at(self, value: float) -> int:
        """The number of the colour of a value."""
        if value <= self.low:
            return 0
        share = math.log(min(value, self.high) / self.low) / math.log(self.high / self.low)
        return min(int(share * NUM_SHADES), NUM_SHADES - 1)

    def draw(self, drawing: Drawing, title: str) -> None:
        """Draw the colours below all else, with the figures at both ends and in the middle."""
        top, cell = drawing.height + 8, min(24.0, (drawing.width - _GUTTER) / NUM_SHADES)
        for shade in range(NUM_SHADES):
            drawing.rect(_GUTTER + shade * cell, top, cell, 10, f"cell h{shade}")
        ends = ((0, self.low), (NUM_SHADES / 2, math.sqrt(self.low * self.high)), (NUM_SHADES, self.high))
        for place, value in ends:
            drawing.write(_GUTTER + place * cell, top + 19, number(value, 2), "soft", anchor="middle")
        drawing.write(_GUTTER, top + 35, title, "soft")
        drawing.height = top + _LEGEND


def sensitivity_cells(data: ReportData, width: float) -> Drawing:
    """A panel for each width: a row of keys and one of values, a column for each layer, each by its best transform."""
    widths, layers = _measured_widths(data), 1 + max((row.layer for row in data.sensitivity), default=0)
    scores = {(row.bits, row.side, row.layer): row.best.get(data.score) for row in data.sensitivity}
    shades = Shades.of(score for score in scores.values() if score is not None)
    cell = min(44.0, (width - _GUTTER - 4) / layers)
    drawing = Drawing(width, _sensitivity_text(data))
    for bits in widths:
        drawing.write(_GUTTER, drawing.height + _TITLE / 2, f"{bits} bits", "strong")
        drawing.height += _TITLE
        for side in (side for side in SIDES if any(row.side == side for row in data.sensitivity)):
            drawing.write(_GUTTER - 8, drawing.height + _ROW / 2, side.upper(), anchor="end")
            for layer in range(layers):
                score, title = scores.get((bits, side, layer)), f"layer {layer}, {side.upper()} at {bits} bits: "
                is_measured = score is not None and math.isfinite(score)
                look = f"cell h{shades.at(score or 0.0)}" if is_measured else "cell absent"
                title += number(score) if is_measured else "not measured"
                drawing.rect(_GUTTER + layer * cell, drawing.height, cell, _ROW, look, title)
            drawing.height += _ROW
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if step * cell >= 3.5 * CHARACTER)
    for layer in range(0, layers, step):
        drawing.write(_GUTTER + (layer + 0.5) * cell, drawing.height + 10, str(layer), "soft", anchor="middle")
    drawing.height += 20
    shades.draw(drawing, f"{SCORE_TITLES[data.score]}; layers from left to right")
    return drawing


def uniform_cells(data: ReportData, width: float) -> Drawing:
    """The KL of every uniform pair, keys down, values across."""
    widths = sorted({bits for cell in data.uniform_kl for bits in (cell.k_bits, cell.v_bits)})
    found = {(cell.k_bits, cell.v_bits): cell.kl for cell in data.uniform_kl}
    shades = Shades.of(kl for kl in found.values() if kl is not None)
    size = min(84.0, (width - _GUTTER - 4) / len(widths))
    texts = (f"K{k}V{v} {number(kl)}" for (k, v), kl in found.items())
    drawing = Drawing(width, f"KL of uniform pairs: {', '.join(texts)}", 2 * _TITLE)
    drawing.write(_GUTTER, 8, "bits of values", "soft")
    drawing.write(0, 28, "keys", "soft")
    for column, v_bits in enumerate(widths):
        drawing.write(_GUTTER + (column + 0.5) * size, 28, str(v_bits), anchor="middle")
    for k_bits in widths:
        middle = drawing.height + 16
        drawing.write(_GUTTER - 10, middle, str(k_bits), anchor="end")
        for column, v_bits in enumerate(widths):
            kl, left, title = found.get((k_bits, v_bits)), _GUTTER + column * size, f"K{k_bits}V{v_bits}"
            is_measured = kl is not None and math.isfinite(kl)
            shade = shades.at(kl or 0.0)
            drawing.rect(left, drawing.height, size, 32, f"cell {f'h{shade}' if is_measured else 'absent'}", title)
            look = f"hi{shade}" if is_measured else ""
            drawing.write(left + size / 2, middle, number(kl), look, anchor="middle", title=title)
        drawing.height += 32
    shades.draw(drawing, "KL, nats per token")
    return drawing


def _sensitivity_text(data: ReportData) -> str:
    *narrow, widest = _measured_widths(data) or [0]
    widths = f"{', '.join(map(str, narrow))} and {widest}" if narrow else str(widest)
    return f"{SCORE_TITLES[data.score]} by layer, at {widths} bits{worst_layers(data)}"


def _measured_widths(data: ReportData) -> list[int]:
    return sorted({row.bits for row in data.sensitivity})
