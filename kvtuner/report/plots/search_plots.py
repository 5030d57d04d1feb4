"""The pictures of a search by name: bits, sensitivity, the K x V table, the history. Knows nothing of pages."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, to_rgba
from matplotlib.patches import Patch, Rectangle

from kvtuner.precision import ALL_BITS, PACKED_BITS
from kvtuner.report.formatting import number
from kvtuner.report.plots import style
from kvtuner.report.plots.kl_by_bits import search_picture
from kvtuner.report.search_data import SAMPLED, SCORE_TITLES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from kvtuner.report.layer_strip import LayerRow
    from kvtuner.report.search_data import ReportData, TrialPoint

_LAYERS_PER_BAND: Final = 40
_MIN_STRIP_WIDTH: Final = 4.4


def sensitivity_heatmap(data: ReportData) -> bytes:
    """PNG of the allocating score by layer and side, one panel per width, each with its best transform."""
    return style.render_png(lambda figure: _draw_sensitivity(figure, data), height=4.6)


def chosen_bits(data: ReportData) -> bytes:
    """PNG of the winner's bits by layer and side; many layers are split over several bands."""
    bands = _bands(data.layers)
    width = min(style.WIDTH, max(_MIN_STRIP_WIDTH, 0.4 + 0.5 * len(bands[0]))) if bands else style.WIDTH
    return style.render_png(
        lambda figure: _draw_bits(figure, bands), width=width, height=0.75 + 0.95 * max(1, len(bands))
    )


def uniform_kl_table(data: ReportData) -> bytes:
    """PNG of the KL of every uniform pair, keys down, values across."""
    return style.render_png(lambda figure: _draw_uniform(figure, data), width=6.0, height=4.4)


def optimization_history(data: ReportData) -> bytes:
    """PNG of measured KL by trial: warm starts, sampled, best so far; infeasible ones at the lower edge."""
    return style.render_png(lambda figure: _draw_history(figure, data.trials), height=4.6)


PICTURES: Final[Mapping[str, Callable[[ReportData], bytes]]] = MappingProxyType(
    {
        "chosen-bits": chosen_bits,
        "pareto-front": search_picture,
        "sensitivity": sensitivity_heatmap,
        "uniform-kl": uniform_kl_table,
        "history": optimization_history,
    }
)


def _draw_sensitivity(figure: Figure, data: ReportData) -> None:
    if not data.sensitivity:
        return style.say_nothing_measured(figure.add_subplot())
    grids = _score_grids(data)
    norm = style.log_norm(grids)
    panels = figure.subplots(len(PACKED_BITS), 1, sharex=True)
    for axes, bits, grid in zip(panels, PACKED_BITS, grids, strict=True):
        _draw_score_cells(axes, grid, norm)
        axes.set_yticks([0, 1], ["K", "V"])
        style.integer_axis(axes.xaxis, max_ticks=16)
        axes.set_title(f"{bits} bits", loc="left", fontsize=11)
    panels[-1].set_xlabel("layer")
    _draw_colour_bar(figure, norm, SCORE_TITLES[data.score], ax=list(panels), aspect=28, pad=0.02)


def _score_grids(data: ReportData) -> NDArray[np.float64]:
    """The allocating score, [num_widths, keys and values, num_layers]; NaN where not measured."""
    grids = np.full((len(PACKED_BITS), 2, 1 + max(row.layer for row in data.sensitivity)), np.nan)
    for row in data.sensitivity:
        if (value := row.best.get(data.score)) is not None:
            grids[PACKED_BITS.index(row.bits), "kv".index(row.side), row.layer] = value
    return grids


def _draw_colour_bar(figure: Figure, norm: LogNorm, label: str, **place: Any) -> None:
    bar = figure.colorbar(ScalarMappable(norm, style.SCORE_COLOURS), **place)
    bar.set_label(label)
    style.plain_log_ticks(bar.ax.yaxis)
    bar.ax.minorticks_off()


def _draw_score_cells(axes: Axes, grid: NDArray[np.float64], norm: LogNorm) -> NDArray[np.float64]:
    """Coloured cells, whose RGBA it returns; hatching shows through where a cell was not measured."""
    rows, columns = grid.shape
    axes.add_patch(
        Rectangle(
            (-0.5, -0.5),
            columns,
            rows,
            facecolor=style.NOT_MEASURED_FILL,
            edgecolor="#BBBBBB",
            hatch="////",
            lw=0,
            zorder=-1,
        )
    )
    colours: NDArray[np.float64] = matplotlib.colormaps[style.SCORE_COLOURS](
        norm(np.maximum(np.nan_to_num(grid), norm.vmin or 0.0))
    )
    colours[np.isnan(grid)] = (*to_rgba(style.NOT_MEASURED_FILL)[:3], 0.0)
    axes.imshow(colours, aspect="auto", interpolation="nearest")
    axes.hlines(np.arange(1, rows) - 0.5, -0.5, columns - 0.5, color="white", lw=1.5)
    if columns <= _LAYERS_PER_BAND:
        axes.vlines(np.arange(1, columns) - 0.5, -0.5, rows - 0.5, color="white", lw=1)
    _bare(axes)
    return colours


def _bare(axes: Axes) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _bands(layers: Sequence[LayerRow]) -> list[Sequence[LayerRow]]:
    """Layers in as few bands of equal length as keep their numbers readable."""
    count = max(1, math.ceil(len(layers) / _LAYERS_PER_BAND))
    size = math.ceil(len(layers) / count)
    return [layers[start : start + size] for start in range(0, len(layers), max(1, size))]


def _draw_bits(figure: Figure, bands: Sequence[Sequence[LayerRow]]) -> None:
    if not bands:
        return style.say_nothing_measured(figure.add_subplot())
    panels = figure.subplots(len(bands), 1, squeeze=False)[:, 0]
    for axes, band in zip(panels, bands, strict=True):
        _draw_band(axes, band, len(bands[0]))
    panels[-1].set_xlabel("layer")
    used = {bits for band in bands for row in band for bits in (row.k_bits, row.v_bits)}
    figure.legend(
        handles=[Patch(facecolor=style.BITS_COLOURS[bits], label=f"{bits} bits") for bits in ALL_BITS if bits in used],
        loc="outside upper center",
        ncols=4,
    )


def _draw_band(axes: Axes, band: Sequence[LayerRow], columns: int) -> None:
    font_size, step = (11, 1) if columns <= 24 else (8, 5)
    for x, row in enumerate(band):
        for y, bits in enumerate((row.k_bits, row.v_bits)):
            colour = to_rgba(style.BITS_COLOURS[bits])
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", lw=1))
            axes.text(x, y, str(bits), ha="center", va="center", color=style.ink_on(colour), fontsize=font_size)
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(1.5, -0.5)
    axes.set_yticks([0, 1], ["K", "V"])
    shown = [x for x, row in enumerate(band) if row.layer % step == 0]
    axes.set_xticks(shown, [str(band[x].layer) for x in shown])
    _bare(axes)


def _draw_uniform(figure: Figure, data: ReportData) -> None:
    axes = figure.add_subplot()
    if not data.uniform_kl:
        return style.say_nothing_measured(axes)
    grid = np.full((len(ALL_BITS), len(ALL_BITS)), np.nan)
    for cell in data.uniform_kl:
        if cell.kl is not None and math.isfinite(cell.kl):
            grid[ALL_BITS.index(cell.k_bits), ALL_BITS.index(cell.v_bits)] = cell.kl
    norm = style.log_norm(grid)
    colours = _draw_score_cells(axes, grid, norm)
    for (y, x), value in np.ndenumerate(grid):
        ink = style.ink_on(tuple(colours[y, x]))
        axes.text(x, y, number(float(value)), ha="center", va="center", fontsize=12, color=ink)
    labels = [str(bits) for bits in ALL_BITS]
    axes.set_xticks(range(len(ALL_BITS)), labels)
    axes.set_yticks(range(len(ALL_BITS)), labels)
    axes.set_xlabel("bits of values")
    axes.set_ylabel("bits of keys")
    _draw_colour_bar(figure, norm, "KL, nats per token", ax=axes, pad=0.03)


def _draw_history(figure: Figure, trials: Sequence[TrialPoint]) -> None:
    axes = figure.add_subplot()
    if not trials:
        return style.say_nothing_measured(axes)
    measured = [(trial, trial.value) for trial in trials if trial.value is not None and math.isfinite(trial.value)]
    floor = style.log_floor(value for _, value in measured)
    _draw_trials(axes, [(trial, max(value, floor)) for trial, value in measured if trial.feasible])
    if outside := [trial.number for trial in trials if not trial.feasible]:
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
    axes.set_xlabel("trial")
    numbers = [trial.number for trial in trials]
    axes.set_xlim(min(numbers) - 0.5 - 0.01 * len(numbers), max(numbers) + 0.5 + 0.01 * len(numbers))
    style.integer_axis(axes.xaxis)
    figure.legend(loc="outside lower center", ncols=2)


def _draw_trials(axes: Axes, trials: Sequence[tuple[TrialPoint, float]]) -> None:
    if trials:
        best = np.minimum.accumulate([value for _, value in trials])
        numbers = [trial.number for trial, _ in trials]
        axes.plot(numbers, best, drawstyle="steps-post", color=style.VERMILION, lw=1.6, label="best so far")
    for warm, marker, colour, label in ((True, "D", style.ORANGE, "warm start"), (False, "o", style.BLUE, "sampled")):
        if points := [(trial.number, value) for trial, value in trials if (trial.source != SAMPLED) == warm]:
            axes.plot(*zip(*points, strict=True), marker, ms=5, mew=0, color=colour, alpha=0.9, label=label)
