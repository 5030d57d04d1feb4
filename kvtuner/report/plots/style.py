"""One look for all pictures; PNG bytes that depend on neither the time nor matplotlib's settings."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, NamedTuple, ParamSpec

import matplotlib.style
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from textalloc import allocate

from kvtuner.report.formatting import is_positive, number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from numpy.typing import ArrayLike, NDArray

P = ParamSpec("P")

# Okabe and Ito's palette: told apart with any kind of colour vision.
BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
ORANGE: Final = "#E69F00"
VERMILION: Final = "#D55E00"
GREEN: Final = "#009E73"
PURPLE: Final = "#CC79A7"
GREY: Final = "#8A8A8A"
INK: Final = "#222222"
# Darker is wider, so the order also survives a grey print.
BITS_COLOURS: Final = {2: "#F6D98F", 3: "#BCD59B", 4: "#7CC3B0", 8: "#2B7BA8", 16: "#1C2B5A"}

WIDTH: Final = 7.6
_MAX_DECADES: Final = 6
_STYLE: Final[dict[Any, object]] = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "figure.dpi": 160,
    "figure.figsize": (WIDTH, 4.6),
    "figure.constrained_layout.use": True,
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
_LABELS: Final[dict[str, Any]] = {
    "margin": 0.012,
    "min_distance": 0.02,
    "textcolor": INK,
    "linecolor": "#999999",
    "linewidth": 0.7,
    "zorder": 10,
    "in_layout": False,
    "path_effects": [withStroke(linewidth=2.5, foreground="white")],
}


def picture(draw: Callable[Concatenate[Figure, P], None]) -> Callable[P, bytes]:
    """Turn a function that draws on a new figure into one that returns the figure's PNG."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> bytes:
        buffer = io.BytesIO()
        with matplotlib.style.context(_STYLE, after_reset=True):
            figure = Figure()
            draw(figure, *args, **kwargs)
            figure.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()

    return drawn


def log_floor(values: Iterable[float]) -> float:
    """The place of zero and less on a logarithmic scale: a decade under the least positive value."""
    return min((value for value in values if is_positive(value)), default=1e-5) / 10


def log_norm(values: NDArray[np.float64]) -> LogNorm:
    """Colours over the positive values, at most six decades; zero and below take the lowest colour."""
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return LogNorm(1e-6, 1.0, clip=True)
    low = max(positive.min(), positive.max() * 10.0**-_MAX_DECADES)
    return LogNorm(low, positive.max() if positive.max() > low else low * 10, clip=True)


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
    axes.yaxis.set_major_formatter(lambda value, _: _tick_text(value) if value > 2 * floor else "")


def plain_log_ticks(axis: Axis) -> None:
    """Ticks such as 0.01 and 1e-5 on a logarithmic axis; subdivided where it spans less than two decades."""
    low, high = sorted(axis.get_view_interval())
    subdivisions = (1.0, 2.0, 5.0) if low > 0 and high / low < 100 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subdivisions, numticks=9))
    axis.set_major_formatter(lambda value, _: _tick_text(value))
    axis.set_minor_formatter(NullFormatter())


def _tick_text(value: float) -> str:
    return f"{value:g}" if value >= 1e-3 else number(value, 1)


def integer_axis(axis: Axis, *, max_ticks: int = 10) -> None:
    """Ticks at whole numbers only."""
    axis.set_major_locator(MaxNLocator(max_ticks, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axis.set_major_formatter("{x:.0f}")


class Label(NamedTuple):
    """Text and the point that it names, in data coordinates."""

    text: str
    x: float
    y: float
    bold: bool = False


def place_labels(axes: Axes, labels: Sequence[Label], obstacles: Sequence[tuple[float, float]]) -> None:
    """Write labels, the most important first, beside their points, where they hide neither others nor the obstacles.

    The limits and scales of the axes must be final.
    """
    if not labels:
        return
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())  # lines from labels to their points change them no more
    texts, xs, ys, _ = map(list, zip(*labels, strict=True))
    obstacle_xs, obstacle_ys = np.transpose(obstacles)
    weights = ["bold" if label.bold else "normal" for label in labels]
    with redirect_stdout(io.StringIO()):  # textalloc prints that it found no free place
        allocate(axes, xs, ys, texts, x_scatter=obstacle_xs, y_scatter=obstacle_ys, fontweight=weights, **_LABELS)


def say_nothing_measured(figure: Figure) -> None:
    """An empty picture that says so."""
    figure.text(0.5, 0.5, "not measured in this run", ha="center", va="center", color=GREY)


def ink_on(colour: ArrayLike) -> str:
    """Black or white, whichever reads better on an RGB or RGBA colour."""
    luminance = np.dot((0.2126, 0.7152, 0.0722), np.asarray(colour)[:3] ** 2.2)
    return "white" if luminance < 0.18 else INK
