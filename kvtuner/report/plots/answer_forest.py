"""A forest plot of answers gained and lost beside the unquantized model, with fp8's. Measures nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kvtuner.report.plots.drawing import CHARACTER, Drawing, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.evaluation_verdict import AnswerDifference

_ROW: Final = 26.0
_TOP: Final = 4.0
_VALUES: Final = 20 * CHARACTER


def answer_forest(rows: Sequence[AnswerDifference], width: float) -> Drawing:
    """A row for each task, with its difference in points, its interval and fp8's difference, around zero."""
    drawing = Drawing(width, f"Points beside bf16: {'; '.join(row.text for row in rows)}")
    values = _VALUES if width > 480 else 0.0
    start = min(0.42 * width, max(len(row.title) for row in rows) * CHARACTER + 10)
    end = width - values - 16
    reach = _reach(rows)
    bottom = _TOP + len(rows) * _ROW

    def place(points: float) -> float:
        return start + (min(max(points, -reach), reach) + reach) / (2 * reach) * (end - start)

    for points in (-reach, -reach / 2, 0.0, reach / 2, reach):
        drawing.line(place(points), _TOP, place(points), bottom, "axis" if points == 0 else "grid")
        drawing.write(place(points), bottom + 10, f"{points:+g}" if points else "0", "soft", anchor="middle")
    for index, row in enumerate(rows):
        middle, title = _TOP + (index + 0.5) * _ROW, row.text
        look = "lost" if row.is_loss else "soft" if row.flag else ""
        drawing.write(0, middle, shortened(row.title, start), look, title=title)
        drawing.line(place(row.low), middle - 4, place(row.high), middle - 4, f"interval {look}", title)
        if row.fp8 is not None:
            drawing.circle(
                place(row.fp8), middle + 7, 4, "symbol empty", title
            )  # below, so that neither covers the other
        drawing.rect(place(row.mean) - 4, middle - 8, 8, 8, f"symbol {'winner' if row.is_loss else 'full'}", title)
        if values:
            text = f"{row.mean:+.1f} [{row.low:+.1f}, {row.high:+.1f}]"
            drawing.write(width, middle, text, look or "soft", anchor="end", title=title)
    drawing.write((start + end) / 2, bottom + 26, "points beside bf16", "soft", anchor="middle")
    drawing.height = bottom + 34
    return drawing


def _reach(rows: Sequence[AnswerDifference]) -> float:
    """The points, of two digits at most, that hold every interval on either side of zero."""
    most = max(max(abs(row.low), abs(row.high), abs(row.fp8 or 0.0), 1.0) for row in rows)
    unit = 10.0 ** math.floor(math.log10(most))
    return next(step * unit for step in (1, 2, 4, 6, 8, 10) if step * unit >= most)
