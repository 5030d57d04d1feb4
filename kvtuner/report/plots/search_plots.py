"""The pictures of a search by name: bits, sensitivity, the K x V table, the history. Knows nothing of pages."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import matplotlib
import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch

from kvtuner.precision import ALL_BITS
from kvtuner.report.formatting import number
from kvtuner.report.plots import style
from kvtuner.report.plots.pareto_front import search_picture
from kvtuner.report.search_data import SAMPLED, SCORE_TITLES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from kvtuner.report.layer_strip import LayerRow
    from kvtuner.report.search_data import ReportData, TrialPoint

_LAYERS_PER_BAND: Final = 40
_MIN_STRIP_WIDTH: Final = 4.4
_ENTRY_WIDTH: Final = 1.1
"""The width of an entry of the legend, inches."""
_BITS_COLOURS: Final[dict[str, Any]] = {
    "cmap": ListedColormap([*style.BITS_COLOURS.values()]),
    "norm": BoundaryNorm([*style.BITS_COLOURS, math.inf], len(style.BITS_COLOURS)),
}
# A cell that was not measured is transparent, so that the hatching behind it shows; ink on it is dark.
_SCORE_COLOURS: Final = matplotlib.colormaps["magma_r"].with_extremes(bad=(1, 1, 1, 0))


@style.picture
def sensitivity_heatmap(figure: Figure, data: ReportData) -> None:
    """The allocating score by layer and side, one panel per width, each with its best transform."""
    if not data.sensitivity:
        return style.say_nothing_measured(figure)
    grids = _score_grids(data)
    norm = style.log_norm(grids)
    widths = _measured_widths(data)
    panels = figure.subplots(len(widths), sharex=True, squeeze=False)[:, 0]
    for axes, bits, grid in zip(panels, widths, grids, strict=True):
        cells = _draw_scores(axes, grid, norm)
        axes.set_yticks([0, 1], ["K", "V"])
        style.integer_axis(axes.xaxis, max_ticks=16)
        axes.set_title(f"{bits} bits", loc="left", fontsize=11)
    panels[-1].set_xlabel("layer")
    _draw_colour_bar(figure, cells, SCORE_TITLES[data.score], ax=list(panels), aspect=28, pad=0.02)


@style.picture
def chosen_bits(figure: Figure, data: ReportData) -> None:
    """The winner's bits by layer and side; many layers are split over several bands."""
    if not data.layers:
        return style.say_nothing_measured(figure)
    bands = _bands(data.layers)
    columns = len(bands[0])
    used = {bits for row in data.layers for bits in (row.k_bits, row.v_bits)}
    handles = [Patch(facecolor=style.BITS_COLOURS[bits], label=f"{bits} bits") for bits in ALL_BITS if bits in used]
    least_width = max(_MIN_STRIP_WIDTH, _ENTRY_WIDTH * len(handles))
    figure.set_size_inches(np.clip(0.4 + 0.5 * columns, least_width, style.WIDTH), 0.75 + 0.95 * len(bands))
    panels = figure.subplots(len(bands), squeeze=False)[:, 0]
    for axes, band in zip(panels, bands, strict=True):
        _draw_band(axes, band, columns)
    panels[-1].set_xlabel("layer")
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))


@style.picture
def uniform_kl_table(figure: Figure, data: ReportData) -> None:
    """The KL of every uniform pair, keys down, values across."""
    figure.set_size_inches(6.0, 4.4)
    if not data.uniform_kl:
        return style.say_nothing_measured(figure)
    widths = sorted({bits for cell in data.uniform_kl for bits in (cell.k_bits, cell.v_bits)})
    grid = np.full((len(widths), len(widths)), np.nan)
    for cell in data.uniform_kl:
        if cell.kl is not None and math.isfinite(cell.kl):
            grid[widths.index(cell.k_bits), widths.index(cell.v_bits)] = cell.kl
    labels = [str(bits) for bits in widths]
    axes = figure.add_subplot(xlabel="bits of values", ylabel="bits of keys")
    cells = _draw_scores(axes, grid, style.log_norm(grid))
    _write_in_cells(axes, cells, grid, number, fontsize=12)
    axes.set_xticks(range(len(widths)), labels)
    axes.set_yticks(range(len(widths)), labels)
    _draw_colour_bar(figure, cells, "KL, nats per token", ax=axes, pad=0.03)


@style.picture
def optimization_history(figure: Figure, data: ReportData) -> None:
    """Measured KL by trial: warm starts, sampled, best so far; infeasible ones at the lower edge."""
    if not data.trials:
        return style.say_nothing_measured(figure)
    axes = figure.add_subplot(xlabel="trial")
    measured = [(trial, trial.value) for trial in data.trials if trial.value is not None and math.isfinite(trial.value)]
    floor = style.log_floor(value for _, value in measured)
    _draw_trials(axes, [(trial, max(value, floor)) for trial, value in measured if trial.feasible])
    if outside := [trial.number for trial in data.trials if not trial.feasible]:
        lower_edge: dict[str, Any] = {"transform": axes.get_xaxis_transform()}
        label = "outside the budget, not measured"
        axes.plot(outside, [0.02] * len(outside), "x", ms=5, color=style.GREY, label=label, **lower_edge)
    if measured:
        style.log_kl_axis(axes)
        low, high = axes.get_ylim()
        axes.set_ylim(low / (high / low) ** 0.08, high)  # room for the crosses
        if min(value for _, value in measured) <= 0:
            style.mark_zero(axes, floor)
    else:
        axes.set_yticks([])
    numbers = [trial.number for trial in data.trials]
    axes.set_xlim(min(numbers) - 0.5 - 0.01 * len(numbers), max(numbers) + 0.5 + 0.01 * len(numbers))
    style.integer_axis(axes.xaxis)
    figure.legend(loc="outside lower center", ncols=2)


PICTURES: Final[Mapping[str, Callable[[ReportData], bytes]]] = MappingProxyType(
    {
        "chosen-bits": chosen_bits,
        "pareto-front": search_picture,
        "sensitivity": sensitivity_heatmap,
        "uniform-kl": uniform_kl_table,
        "history": optimization_history,
    }
)


def _measured_widths(data: ReportData) -> list[int]:
    return sorted({row.bits for row in data.sensitivity})


def _score_grids(data: ReportData) -> NDArray[np.float64]:
    """The allocating score, [num_widths, keys and values, num_layers]; NaN where not measured."""
    widths = _measured_widths(data)
    grids = np.full((len(widths), 2, 1 + max(row.layer for row in data.sensitivity)), np.nan)
    for row in data.sensitivity:
        if (value := row.best.get(data.score)) is not None:
            grids[widths.index(row.bits), "kv".index(row.side), row.layer] = value
    return grids


def _bands(layers: Sequence[LayerRow]) -> list[Sequence[LayerRow]]:
    """Layers in as few bands of equal length as keep their numbers readable."""
    size = math.ceil(len(layers) / math.ceil(len(layers) / _LAYERS_PER_BAND))
    return [layers[start : start + size] for start in range(0, len(layers), size)]


def _draw_band(axes: Axes, band: Sequence[LayerRow], columns: int) -> None:
    font_size, step = (11, 1) if columns <= 24 else (8, 5)
    grid = np.array([(row.k_bits, row.v_bits) for row in band], dtype=float).T
    cells = _draw_cells(axes, grid, **_BITS_COLOURS)
    _write_in_cells(axes, cells, grid, "{:g}".format, fontsize=font_size)
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_yticks([0, 1], ["K", "V"])
    shown = [x for x, row in enumerate(band) if row.layer % step == 0]
    axes.set_xticks(shown, [str(band[x].layer) for x in shown])


def _draw_scores(axes: Axes, grid: NDArray[np.float64], norm: LogNorm) -> QuadMesh:
    """Cells coloured by their scores; hatching shows through where a cell was not measured."""
    axes.patch.set(facecolor="#E4E4E4", edgecolor="#BBBBBB", hatch="////", linewidth=0)
    return _draw_cells(axes, grid, cmap=_SCORE_COLOURS, norm=norm)


def _draw_cells(axes: Axes, grid: NDArray[np.float64], **colours: Any) -> QuadMesh:
    """Coloured cells, the first row on top, each around its whole numbers."""
    rows, columns = grid.shape
    edges = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
    width = 1 if columns <= _LAYERS_PER_BAND else 0  # many thin cells would be hidden by lines between them
    cells = axes.pcolormesh(*edges, np.ma.masked_invalid(grid), edgecolors="white", linewidth=width, **colours)
    axes.hlines(edges[1][1:-1], edges[0][0], edges[0][-1], color="white", lw=1.5)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return cells


def _write_in_cells(
    axes: Axes, cells: QuadMesh, grid: NDArray[np.float64], text: Callable[[float], str], *, fontsize: int
) -> None:
    colours = cells.to_rgba(np.ma.masked_invalid(grid))
    for (y, x), value in np.ndenumerate(grid):
        ink = style.ink_on(colours[y, x])
        axes.text(x, y, text(float(value)), ha="center", va="center", fontsize=fontsize, color=ink)


def _draw_colour_bar(figure: Figure, cells: QuadMesh, label: str, **place: Any) -> None:
    bar = figure.colorbar(cells, label=label, **place)
    style.plain_log_ticks(bar.ax.yaxis)
    bar.ax.minorticks_off()


def _draw_trials(axes: Axes, trials: Sequence[tuple[TrialPoint, float]]) -> None:
    if trials:
        best = np.minimum.accumulate([value for _, value in trials])
        numbers = [trial.number for trial, _ in trials]
        axes.plot(numbers, best, drawstyle="steps-post", color=style.VERMILION, lw=1.6, label="best so far")
    for warm, marker, colour, label in ((True, "D", style.ORANGE, "warm start"), (False, "o", style.BLUE, "sampled")):
        if points := [(trial.number, value) for trial, value in trials if (trial.source != SAMPLED) == warm]:
            axes.plot(*zip(*points, strict=True), marker, ms=5, mew=0, color=colour, alpha=0.9, label=label)
