"""Drawings as plain marks with their places, which ``templates/drawing.html`` writes as SVG. Knows nothing of results.

Colours are the style sheet's, by class, so that a drawing follows a page into dark mode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from kvtuner.report.formatting import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Anchor = Literal["start", "middle", "end"]
TEXT_SIZE: Final = 12.0
"""The height of text in pixels; a drawing is shown no smaller than it is laid out."""
CHARACTER: Final = 6.9
"""The width of a character of that text in most fonts, pixels; a figure of the widest ones."""
NUM_SERIES: Final = 8
"""The colours of lines in the style sheet, ``s0`` and on; the profile's own is ``own``."""
ELLIPSIS: Final = "..."
_NARROW_TICK: Final = 46.0  # pixels that a tick's text takes with its gap


class Widths(NamedTuple):
    """The widths, in pixels, that a drawing is laid out for: beside another one, and on a telephone."""

    wide: float = 580.0
    narrow: float = 358.0


@dataclass(frozen=True, slots=True)
class Mark:
    """One SVG element.

    Attributes:
        tag: The name of the element.
        look: The classes of the style sheet.
        place: The attributes that place it, by their SVG names.
        text: The text that it shows.
        title: The text that a pointer over it shows.
    """

    tag: Literal["rect", "line", "path", "circle", "text"]
    look: str
    place: Mapping[str, str]
    text: str = ""
    title: str = ""


@dataclass(slots=True)
class Drawing:
    """Marks on a canvas, in pixels from its upper left corner; later marks lie on earlier ones."""

    width: float
    description: str
    height: float = 0.0
    marks: list[Mark] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, look: str, title: str = "") -> None:
        """A rectangle by its upper left corner."""
        self._add("rect", look, {"x": x, "y": y, "width": max(width, 0.0), "height": max(height, 0.0)}, title=title)

    def line(self, x1: float, y1: float, x2: float, y2: float, look: str, title: str = "") -> None:
        """A line between two points."""
        self._add("line", look, {"x1": x1, "y1": y1, "x2": x2, "y2": y2}, title=title)

    def circle(self, x: float, y: float, radius: float, look: str, title: str = "") -> None:
        """A circle around a point."""
        self._add("circle", look, {"cx": x, "cy": y, "r": radius}, title=title)

    def polygon(self, points: list[tuple[float, float]], look: str, title: str = "") -> None:
        """A closed path through points."""
        path = "M" + "L".join(f"{_pixels(x)} {_pixels(y)}" for x, y in points) + "Z"
        self.marks.append(Mark("path", look, {"d": path}, title=title))

    def trace(self, points: list[tuple[float, float]], look: str, title: str = "") -> None:
        """A line through points, which fills nothing."""
        path = "M" + "L".join(f"{_pixels(x)} {_pixels(y)}" for x, y in points)
        self.marks.append(Mark("path", f"trace {look}", {"d": path}, title=title))

    def write(
        self, x: float, y: float, text: str, look: str = "", *, anchor: Anchor = "start", title: str = ""
    ) -> None:
        """Text whose middle line lies at y."""
        place = {"x": _pixels(x), "y": _pixels(y + 0.35 * TEXT_SIZE), "text-anchor": anchor}
        self.marks.append(Mark("text", look, place, text, title))

    def _add(self, tag: Literal["rect", "line", "circle"], look: str, place: dict[str, float], title: str) -> None:
        self.marks.append(Mark(tag, look, {name: _pixels(value) for name, value in place.items()}, title=title))


@dataclass(frozen=True, slots=True)
class Drawn:
    """One drawing, laid out for wide and for narrow screens."""

    wide: Drawing
    narrow: Drawing


def drawn(layout: Callable[[float], Drawing]) -> Drawn:
    """A drawing at both of `Widths`."""
    return Drawn(*map(layout, Widths()))


@dataclass(frozen=True, slots=True)
class LogAxis:
    """A logarithmic scale from a value at one place to another value at another, in pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The place of a value; those outside the scale, zero and less among them, lie at its end."""
        if value <= self.low:
            return self.start
        share = math.log(min(value, self.high) / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def holds(self, value: float) -> bool:
        """Whether a value lies on the scale."""
        return self.low <= value <= self.high

    def ticks(self) -> Iterator[tuple[float, str]]:
        """The places and texts of round values, as dense as their texts allow."""
        room = abs(self.end - self.start) / _NARROW_TICK
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for leading in ((1, 2, 5), (1, 3), (1,)):
            values = [digit * 10.0**decade for decade in decades for digit in leading]
            values = [value for value in values if self.holds(value)]
            if len(values) <= room:
                break
        step = max(1, math.ceil(len(values) / max(room, 1)))
        for value in values[::step]:
            yield self.at(value), tick_name(value)


@dataclass(frozen=True, slots=True)
class LinearAxis:
    """A scale of even steps from a value at one place to another value at another, in pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The place of a value; those outside the scale lie at its end."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """The places and texts of round values, as dense as their texts allow."""
        least = (self.high - self.low) / max(1.0, abs(self.end - self.start) / _NARROW_TICK)
        unit = 10.0 ** math.floor(math.log10(least))
        step = next(leading * unit for leading in (1, 2, 5, 10) if leading * unit >= least)
        for index in range(math.ceil(self.low / step), math.floor(self.high / step) + 1):
            yield self.at(index * step), f"{index * step:,.10g}"


def tick_name(value: float) -> str:
    """A round value in few characters: ``0.02``, ``1e-5``."""
    return f"{value:g}" if value >= 1e-3 else number(value, 1)


def shortened(text: str, width: float) -> str:
    """Text that fits into that many pixels, with an ellipsis where it was longer."""
    room = max(int(width / CHARACTER), len(ELLIPSIS) + 1)
    return text if len(text) <= room else text[: room - len(ELLIPSIS)] + ELLIPSIS


def _pixels(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
