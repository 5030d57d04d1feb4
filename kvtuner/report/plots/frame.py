"""The frame of a drawing with two axes, symbols with their legend, and names that hide nothing. Knows no results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from kvtuner.report.formatting import count
from kvtuner.report.plots.drawing import CHARACTER, TEXT_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvtuner.report.plots.drawing import Drawing, LinearAxis, LogAxis

    Pixel = tuple[float, float]

Symbol = Literal[
    "ring own", "ring s0", "full", "empty", "dot s0", "dot s6", "diamond s2", "cross", "line s0", "line own"
]
"""A symbol, with its colour in the style sheet where it has one."""
_TICK_ROOM: Final = 34.0  # pixels below a frame that ticks and title take
_LINE: Final = TEXT_SIZE + 1


class PointName(NamedTuple):
    """A name and the point that it stands for, in pixels."""

    text: str
    x: float
    y: float
    look: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """A scale from left to right and one from the bottom to the top, each with its title."""

    x: LinearAxis | LogAxis
    y: LinearAxis | LogAxis
    x_title: str
    y_title: str
    x_values: tuple[int, ...] = ()
    """The values that the scale from left to right names as far as there is room; round ones where there are none."""
    has_zero: bool = False
    """Whether the bottom of a logarithmic scale stands for zero and less."""

    def draw(self, drawing: Drawing) -> None:
        """Draw grid, ticks and titles, the vertical title above; the drawing's height ends below them."""
        left, right, bottom, top = self.x.start, self.x.end, self.y.start, self.y.end
        ticks = [tick for tick in self.y.ticks() if not self.has_zero or tick[0] < bottom - _LINE]
        for place, text in [*ticks, (bottom, "0")] if self.has_zero else ticks:
            drawing.line(left, place, right, place, "grid")
            drawing.write(left - 6, place, text, "soft", anchor="end")
        for place, text in self._x_ticks():
            drawing.line(place, top, place, bottom, "grid")
            drawing.write(place, bottom + 10, text, "soft", anchor="middle")
        drawing.line(left, bottom, right, bottom, "axis")
        drawing.write(0, top - 14, self.y_title, "soft")
        drawing.write((left + right) / 2, bottom + 26, self.x_title, "soft", anchor="middle")
        drawing.height = bottom + _TICK_ROOM

    def _x_ticks(self) -> Iterator[tuple[float, str]]:
        if not self.x_values:
            yield from self.x.ticks()
        free = -math.inf
        for value in self.x_values:
            place, half = self.x.at(value), len(count(value)) * CHARACTER / 2
            if place - half >= free:
                yield place, count(value)
                free = place + half + CHARACTER


def write_names(
    drawing: Drawing, frame: Frame, names: Sequence[PointName], points: Sequence[Pixel], dots: Sequence[Pixel] = ()
) -> None:
    """Write names, the most important first, each where it hides neither another one nor a point, and no dot if it may.

    A name that fits nowhere is left to the text that a pointer over its point shows.
    """
    taken = [_Box(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    avoided = [_Box(x - 2, y - 2, x + 2, y + 2) for x, y in dots]
    for name in names:
        free = [box for box in _places(name) if box.is_inside(frame) and not any(map(box.overlaps, taken))]
        box = next((box for box in free if not any(map(box.overlaps, avoided))), free[0] if free else None)
        if box is not None:
            drawing.write(box.left, (box.top + box.bottom) / 2, name.text, name.look, title=name.title)
            taken.append(box)


def write_beside(drawing: Drawing, frame: Frame, names: Sequence[PointName], x: float) -> None:
    """Write names in a column from x on, as near to their points' heights as they may be without touching."""
    ordered, places = sorted(names, key=lambda name: name.y), list[float]()
    for name in ordered:
        places.append(max(name.y, places[-1] + _LINE if places else frame.y.end))
    lowest = frame.y.start
    for index in reversed(range(len(places))):  # names that were pushed below the frame push those above them up
        places[index] = min(places[index], lowest)
        lowest = places[index] - _LINE
    for name, place in zip(ordered, places, strict=True):
        drawing.line(name.x + 5, name.y, x - 3, place, "leader")
        drawing.write(x, place, name.text, name.look, title=name.title)


def draw_symbol(drawing: Drawing, symbol: Symbol, x: float, y: float, title: str = "") -> None:
    """Draw a symbol around a point; a ring leaves free what it stands around."""
    kind, _, colour = symbol.partition(" ")
    diamond = [(x, y - 8), (x + 8, y), (x, y + 8), (x - 8, y)]
    if kind == "ring":
        drawing.polygon(diamond, symbol, title)
    elif kind == "diamond":
        drawing.polygon([((x + a) / 2, (y + b) / 2) for a, b in diamond], f"dot {colour}", title)
    elif kind in ("full", "empty"):
        drawing.rect(x - 3.5, y - 3.5, 7, 7, f"symbol {kind}", title)
    elif kind == "cross":
        drawing.line(x - 3, y - 3, x + 3, y + 3, "axis", title)
        drawing.line(x - 3, y + 3, x + 3, y - 3, "axis", title)
    elif kind == "line":
        drawing.trace([(x - 6, y), (x + 6, y)], colour, title)
    else:
        drawing.circle(x, y, 3, f"dot {colour}", title)


def draw_legend(drawing: Drawing, entries: Iterable[tuple[Symbol, str]]) -> None:
    """Write what symbols stand for below a drawing, in as many lines as its width asks for."""
    x, y = 8.0, drawing.height + 10
    for symbol, text in entries:
        room = 18 + len(text) * CHARACTER
        if x > 8 and x + room > drawing.width:
            x, y = 8.0, y + 18
        draw_symbol(drawing, symbol, x, y)
        drawing.write(x + 14, y, text)
        x += room + 16
    drawing.height = y + 10


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: _Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def is_inside(self, frame: Frame) -> bool:
        in_x = frame.x.start <= self.left and self.right <= frame.x.end
        return in_x and frame.y.end <= self.top and self.bottom <= frame.y.start


def _places(name: PointName) -> list[_Box]:
    """The boxes around a point that its name may have, the best first."""
    width, half = len(name.text) * CHARACTER, TEXT_SIZE / 2
    centres = []
    for far in (0.0, 8.0, 18.0, 30.0):
        side, above = 11 + width / 2 + far, 13.0 + far
        centres += [(side, 0.0), (-side, 0.0), (0.0, -above), (0.0, above)]
        centres += [(x, y) for y in (-above, above) for x in (side, -side)]
    return [
        _Box(name.x + dx - width / 2, name.y + dy - half, name.x + dx + width / 2, name.y + dy + half)
        for dx, dy in centres
    ]
