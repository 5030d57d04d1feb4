"""A picture of how the time of a step grows with its tokens, by the plots of reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtuner.report.formatting import count, number
from kvtuner.report.html_page import picture_file
from kvtuner.report.plots.drawing import CHARACTER, NUM_SERIES, Drawing, LogAxis
from kvtuner.report.plots.frame import Frame, PointName, write_beside

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Line = Sequence[tuple[int, float]]

WIDTH: Final = 760.0
HEIGHT: Final = 420.0
TOP: Final = 28.0
LEFT: Final = 46.0
OWN: Final = "avx512 K4V4"
"""The line in the colour of a report's own scheme."""


def growth_picture(
    lines: Mapping[str, Line],
    title: str,
    sizes_title: str = "tokens of a request, log scale",
    times_title: str = "processor ms of a step, log scale",
    unit: str = "ms",
) -> str:
    """The file of a picture: times by tokens, requests or another size, both logarithmic, a line for each way.

    `lines` has the sizes, ascending, with their times in the unit, by default milliseconds of processor time.
    """
    room = max(map(len, lines)) * CHARACTER + 24
    sizes = sorted({size for line in lines.values() for size, _ in line})
    times = [time for line in lines.values() for _, time in line]
    x = LogAxis(sizes[0], max(sizes[-1], 2 * sizes[0]), LEFT, WIDTH - room)
    y = LogAxis(min(times) / 1.3, max(times) * 1.3, TOP + HEIGHT, TOP)
    described = "; ".join(f"{name} {', '.join(f'{number(time)} {unit} at {count(size)}' for size, time in line)}"
                          for name, line in lines.items())  # fmt: skip
    drawing = Drawing(WIDTH, f"{title}: {described}")
    frame = Frame(x, y, sizes_title, times_title, tuple(sizes))
    frame.draw(drawing)
    ends = []
    for index, (name, line) in enumerate(lines.items()):
        look = "own" if name == OWN else f"s{index % NUM_SERIES}"
        points = [(x.at(size), y.at(time)) for size, time in line]
        drawing.trace(points, look, name)
        for (size, time), (left, top) in zip(line, points, strict=True):
            drawing.circle(left, top, 3.5, f"dot {look}", f"{name}: {number(time)} {unit} at {count(size)}")
        ends.append(PointName(name, *points[-1], "strong" if name == OWN else "", name))
    write_beside(drawing, frame, ends, WIDTH - room + 14)
    return picture_file([drawing], [title])
