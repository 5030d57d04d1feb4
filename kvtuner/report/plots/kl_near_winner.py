"""KL by stored bytes around the winner's: a row for each configuration, so that none hides another."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtuner.exported_configs.scheme_names import FP8
from kvtuner.exported_configs.verdict import TRANSFORMED, harmless_kl
from kvtuner.report.formatting import count, interval, number
from kvtuner.report.plots.drawing import CHARACTER, Drawing, LogAxis, shortened
from kvtuner.report.search_text import comparison

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtuner.report.plots.drawing import Anchor
    from kvtuner.report.search_data import OffsetQuality, QualityRow

FARTHEST: Final = 30.0
"""The factor by which a KL may differ from the winner's before it lies off the picture."""
_LEAST_SPAN: Final = 10.0
_ROW: Final = 19.0
_HEADING: Final = 20.0
_SHORT_TRANSFORMED: Final = " +t"


class _Columns(NamedTuple):
    """The places of the columns: the right edge of bytes, the ends of the axis, and the comparison's left edge."""

    bytes_end: float
    start: float
    end: float
    comparison: float

    @classmethod
    def of(cls, width: float, names: Iterable[str]) -> _Columns:
        """Columns for names of configurations, which take a third of the width at most."""
        name_width = min(width / 3, max(map(len, names), default=0) * CHARACTER + 12)
        bytes_end = name_width + 6 * CHARACTER
        comparison_start = width - 8 * CHARACTER
        return cls(bytes_end, bytes_end + 12, comparison_start - 10, comparison_start)


def kl_near_winner(quality: OffsetQuality, width: float) -> Drawing:
    """Rows by stored bytes, of what takes more than the budget and of what does not, with KL on a logarithmic axis.

    A KL off the axis is written at the end beyond which it lies.
    """
    rows = _ordered(quality)
    names = {id(row): _name(row, is_short=width < 480) for row in rows}
    columns = _Columns.of(width, names.values())
    drawing = Drawing(width, _description(rows))
    axis = _axis(quality, columns)
    groups = [(title, [row for row in rows if row.fits_budget == fits]) for title, fits in _GROUPS]
    groups = [(title, members) for title, members in groups if members]
    bottom = len(rows) * _ROW + len(groups) * _HEADING
    _draw_scale(drawing, quality, axis, bottom)
    for title, members in groups:
        drawing.write(0, drawing.height + _HEADING / 2 + 1, title, "strong")
        if drawing.height == 0:
            drawing.write(width, _HEADING / 2 + 1, "vs profile", "soft", anchor="end")
        drawing.height += _HEADING
        repeated = {id(row) for before, row in pairwise(members) if before.bytes_per_token == row.bytes_per_token}
        for row in members:
            is_winner = row is quality.winner
            beside = "winner" if is_winner else comparison(row.difference, quality.num_sequences)
            _draw_row(drawing, row, (names[id(row)], beside), axis, columns, is_winner=is_winner)
            if id(row) not in repeated or is_winner:
                middle = drawing.height + _ROW / 2
                drawing.write(columns.bytes_end, middle, count(row.bytes_per_token), "soft", anchor="end")
            drawing.height += _ROW
    for place, text in axis.ticks():
        drawing.write(place, bottom + 10, text, "soft", anchor="middle")
    drawing.write(columns.bytes_end, bottom + 26, "bytes", "soft", anchor="end")
    drawing.write((columns.start + columns.end) / 2, bottom + 26, "KL, nats per token", "soft", anchor="middle")
    drawing.height = bottom + 34
    return drawing


_GROUPS: Final = (("beyond the budget", False), ("inside the budget", True))


def _ordered(quality: OffsetQuality) -> list[QualityRow]:
    """Rows with a KL, by stored bytes from most to least; of equal bytes, the best first; a uniform that won once."""
    rivals = [row for row in quality.baselines if row.label != quality.winner.label]
    measured = [row for row in (quality.winner, *rivals) if row.kl and math.isfinite(row.kl.mean)]
    return sorted(measured, key=lambda row: (-row.bytes_per_token, row.kl.mean if row.kl else 0.0, row.label))


def _name(row: QualityRow, *, is_short: bool) -> str:
    return row.label.replace(TRANSFORMED, _SHORT_TRANSFORMED) if is_short else row.label


def _axis(quality: OffsetQuality, columns: _Columns) -> LogAxis:
    """A scale that holds the winner with its interval and what decides, as far as those are not far off."""
    deciding = [row.kl for row in quality.deciding_rows() if row.kl and row.kl.mean > 0]
    winner = quality.winner.kl
    if winner and not math.isfinite(winner.mean):
        winner = None
    centre = winner.mean if winner and winner.mean > 0 else min((kl.mean for kl in deciding), default=1e-3)
    ends = [kl.mean for kl in deciding] + ([winner.low, winner.high] if winner else [])
    near = [min(max(value, centre / FARTHEST), centre * FARTHEST) for value in ends if math.isfinite(value)]
    low, high = min(near, default=centre) / 1.5, max(near, default=centre) * 1.5
    widening = math.sqrt(max(1.0, _LEAST_SPAN / (high / low)))
    return LogAxis(low / widening, high * widening, columns.start, columns.end)


def _draw_scale(drawing: Drawing, quality: OffsetQuality, axis: LogAxis, bottom: float) -> None:
    limit = harmless_kl(next((row.kl.mean for row in quality.baselines if row.name == FP8 and row.kl), None))
    drawing.rect(axis.start, _HEADING, axis.at(limit) - axis.start, bottom - _HEADING, "harmless")
    for place, _ in axis.ticks():
        drawing.line(place, _HEADING, place, bottom, "grid")
    if quality.winner.kl and math.isfinite(quality.winner.kl.mean):
        place = axis.at(quality.winner.kl.mean)
        drawing.line(place, _HEADING, place, bottom, "guide")
    drawing.line(axis.start, bottom, axis.end, bottom, "axis")


def _draw_row(
    drawing: Drawing, row: QualityRow, texts: tuple[str, str], axis: LogAxis, columns: _Columns, *, is_winner: bool
) -> None:
    """Draw a row; its texts are its name, and what it is beside the winner."""
    assert row.kl is not None
    name, beside = texts
    middle = drawing.height + _ROW / 2
    if is_winner:
        drawing.rect(0, drawing.height, columns.start, _ROW, "marked")
    title = f"{row.label}: {count(row.bytes_per_token)} bytes per token, KL {interval(row.kl)}"
    if row.difference is not None:
        title += f"; minus winner's {interval(row.difference)}, {beside}"
    room = columns.bytes_end - 6 * CHARACTER
    drawing.write(0, middle, shortened(name, room), "strong" if is_winner else "", title=title)
    drawing.write(columns.comparison, middle, beside, "soft")
    if axis.holds(row.kl.mean):
        drawing.line(axis.at(row.kl.low), middle, axis.at(row.kl.high), middle, "interval", title)
        _draw_symbol(drawing, row, axis.at(row.kl.mean), middle, title, is_winner=is_winner)
        return
    is_low = row.kl.mean < axis.low
    edge, inwards = (axis.start, 1) if is_low else (axis.end, -1)
    anchor: Anchor = "start" if is_low else "end"
    drawing.polygon(
        [(edge, middle), (edge + 6 * inwards, middle - 4), (edge + 6 * inwards, middle + 4)], "beyond", title
    )
    drawing.write(edge + 10 * inwards, middle, number(row.kl.mean), "soft", anchor=anchor, title=title)


def _draw_symbol(drawing: Drawing, row: QualityRow, x: float, y: float, title: str, *, is_winner: bool) -> None:
    """A diamond for the winner; of uniforms a full square with transforms, an empty one without; else a circle."""
    if is_winner:
        drawing.polygon([(x, y - 7), (x + 7, y), (x, y + 7), (x - 7, y)], "symbol winner", title)
    elif row.is_uniform:
        drawing.rect(x - 4.5, y - 4.5, 9, 9, "symbol full" if row.transforms else "symbol empty", title)
    else:
        drawing.circle(x, y, 5, "symbol empty", title)


def _description(rows: list[QualityRow]) -> str:
    texts = (f"{row.label} at {count(row.bytes_per_token)} bytes per token has {interval(row.kl)}" for row in rows)
    return f"KL by stored bytes: {'; '.join(texts)}"
