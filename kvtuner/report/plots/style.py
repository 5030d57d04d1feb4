"""One look for all pictures; PNG bytes that depend on neither the time nor matplotlib's settings."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any, Final

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from kvtuner.report.formatting import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from numpy.typing import NDArray

# Okabe and Ito's palette: told apart with any kind of colour vision.
BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
ORANGE: Final = "#E69F00"
VERMILION: Final = "#D55E00"
GREEN: Final = "#009E73"
PURPLE: Final = "#CC79A7"
GREY: Final = "#8A8A8A"
INK: Final = "#222222"
NOT_MEASURED_FILL: Final = "#E4E4E4"
# Darker is wider, so the order also survives a grey print.
BITS_COLOURS: Final = {2: "#F6D98F", 4: "#7CC3B0", 8: "#2B7BA8", 16: "#1C2B5A"}
SCORE_COLOURS: Final = "magma_r"

WIDTH: Final = 7.6
_DPI: Final = 160
_MAX_DECADES: Final = 6
_STYLE: Final[dict[Any, object]] = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.axisbelow": True,
    "axes.labelcolor": INK,
    "text.color": INK,
    "text.parse_math": False,  # a name with dollar signs is a name
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#E2E2E2",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "hatch.linewidth": 0.6,
}


def render_png(draw: Callable[[Figure], None], *, width: float = WIDTH, height: float) -> bytes:
    """PNG bytes of what `draw` puts on a new figure of a width and a height in inches."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained", facecolor="white")
        draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def is_positive(value: float | None) -> bool:
    """Whether a logarithmic scale can show it."""
    return value is not None and math.isfinite(value) and value > 0


def log_floor(values: Iterable[float]) -> float:
    """The place of zero and less on a logarithmic scale: a decade under the least positive value."""
    return min((value for value in values if is_positive(value)), default=1e-5) / 10


def log_norm(values: NDArray[np.float64]) -> LogNorm:
    """Colours over the positive values, at most six decades; zero and below take the lowest colour."""
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return LogNorm(1e-6, 1.0, clip=True)
    high = float(positive.max())
    low = max(float(positive.min()), high * 10.0**-_MAX_DECADES)
    return LogNorm(low, high if high > low else low * 10, clip=True)


def log_kl_axis(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers at its ticks."""
    axes.set_yscale("log")
    plain_log_ticks(axes.yaxis)
    axes.set_ylabel("KL, nats per token (log scale)")
    axes.grid(axis="y", which="major")


def mark_zero(axes: Axes, floor: float) -> None:
    """Call the floor zero, which it stands for, and leave out the ticks that it would contradict."""
    axes.axhline(floor, color=GREY, lw=0.8, ls=(0, (2, 3)), zorder=0)
    axes.text(-0.01, floor, "0", ha="right", va="center", transform=axes.get_yaxis_transform())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick_text(value) if value > 2 * floor else ""))


def plain_log_ticks(axis: Axis) -> None:
    """Ticks such as 0.01 and 1e-5 on a logarithmic axis; subdivided where it spans less than two decades."""
    low, high = sorted(axis.get_view_interval())
    subdivisions = (1.0, 2.0, 5.0) if low > 0 and high / low < 100 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subdivisions, numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _tick_text(value)))
    axis.set_minor_formatter(NullFormatter())


def _tick_text(value: float) -> str:
    return f"{value:g}" if value >= 1e-3 else number(value, 1)


def integer_axis(axis: Axis, *, max_ticks: int = 10) -> None:
    """Ticks at whole numbers only."""
    axis.set_major_locator(MaxNLocator(max_ticks, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))


def say_nothing_measured(axes: Axes) -> None:
    """An empty panel that says so."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, "not measured in this run", ha="center", va="center", transform=axes.transAxes, color=GREY)


def ink_on(colour: tuple[float, float, float, float]) -> str:
    """Black or white, whichever reads better on an RGBA colour."""
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]
    return "white" if luminance < 0.18 else INK
