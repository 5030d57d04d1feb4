"""Pictures made of cells: sensitivity by layer, the bits chosen, the K x V table. Knows nothing of pages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, to_rgba
from matplotlib.patches import Patch, Rectangle

from kvtuner.precision import ALL_BITS, PACKED_BITS
from kvtuner.report.formatting import NOT_MEASURED, number
from kvtuner.report.plots.plot_style import (
    BITS_COLOURS,
    NOT_MEASURED_FILL,
    SCORE_COLOURS,
    WIDTH,
    ink_on,
    integer_axis,
    log_norm,
    plain_log_ticks,
    render,
    say_nothing_measured,
)
from kvtuner.report.search_data import SCORE_TITLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from kvtuner.report.layer_strip import LayerRow
    from kvtuner.report.search_data import ReportData, SensitivityRow, UniformKl

_LAYERS_PER_BAND: Final = 40
_MIN_STRIP_WIDTH: Final = 4.4


def sensitivity_heatmap(data: ReportData) -> bytes:
    """PNG of the allocating score by layer and side, one panel per width, each with its best transform."""
    return render(lambda figure: _draw_sensitivity(figure, data.sensitivity, data.score), height=4.6)


def chosen_bits(data: ReportData) -> bytes:
    """PNG of the winner's bits by layer and side; many layers are split over several bands."""
    bands = _bands(data.layers)
    width = min(WIDTH, max(_MIN_STRIP_WIDTH, 0.4 + 0.5 * len(bands[0]))) if bands else WIDTH
    return render(lambda figure: _draw_bits(figure, bands), width=width, height=0.75 + 0.95 * max(1, len(bands)))


def uniform_kl_table(data: ReportData) -> bytes:
    """PNG of the KL of every uniform pair, keys down, values across."""
    return render(lambda figure: _draw_uniform(figure, data.uniform_kl), width=6.0, height=4.4)


def _draw_sensitivity(figure: Figure, rows: Sequence[SensitivityRow], score: str) -> None:
    if not rows:
        return say_nothing_measured(figure.add_subplot())
    num_layers = 1 + max(row.layer for row in rows)
    grids = {bits: _score_grid(rows, bits, score, num_layers) for bits in PACKED_BITS}
    norm = log_norm(np.concatenate([grid.ravel() for grid in grids.values()]))
    panels = figure.subplots(len(PACKED_BITS), 1, sharex=True)
    for axes, (bits, grid) in zip(panels, grids.items(), strict=True):
        _draw_score_cells(axes, grid, norm)
        axes.set_yticks([0, 1], ["K", "V"])
        integer_axis(axes.xaxis, max_ticks=16)
        axes.set_title(f"{bits} bits", loc="left", fontsize=11)
    panels[-1].set_xlabel("layer")
    bar = figure.colorbar(ScalarMappable(norm, SCORE_COLOURS), ax=list(panels), aspect=28, pad=0.02)
    bar.set_label(SCORE_TITLES[score])
    plain_log_ticks(bar.ax.yaxis)
    bar.ax.minorticks_off()


def _score_grid(rows: Sequence[SensitivityRow], bits: int, score: str, num_layers: int) -> NDArray[np.float64]:
    grid = np.full((2, num_layers), np.nan)
    for row in rows:
        value = row.best.get(score)
        if row.bits == bits and value is not None:
            grid["kv".index(row.side), row.layer] = value
    return grid


def _draw_score_cells(axes: Axes, grid: NDArray[np.float64], norm: LogNorm) -> None:
    _fill_background(axes, grid.shape)
    colours = matplotlib.colormaps[SCORE_COLOURS](norm(np.maximum(np.nan_to_num(grid), norm.vmin or 0.0)))
    colours[np.isnan(grid), 3] = 0.0
    axes.imshow(colours, aspect="auto", interpolation="nearest")
    rows, columns = grid.shape
    axes.hlines(np.arange(1, rows) - 0.5, -0.5, columns - 0.5, color="white", lw=1.5)
    if columns <= _LAYERS_PER_BAND:
        axes.vlines(np.arange(1, columns) - 0.5, -0.5, rows - 0.5, color="white", lw=1)
    _bare(axes)


def _fill_background(axes: Axes, shape: tuple[int, ...]) -> None:
    """Hatching shows through where a cell was not measured."""
    axes.add_patch(
        Rectangle(
            (-0.5, -0.5),
            shape[1],
            shape[0],
            facecolor=NOT_MEASURED_FILL,
            edgecolor="#BBBBBB",
            hatch="////",
            lw=0,
            zorder=-1,
        )
    )


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
        return say_nothing_measured(figure.add_subplot())
    panels = figure.subplots(len(bands), 1, squeeze=False)[:, 0]
    for axes, band in zip(panels, bands, strict=True):
        _draw_band(axes, band, len(bands[0]))
    panels[-1].set_xlabel("layer")
    used = {bits for band in bands for row in band for bits in (row.k_bits, row.v_bits)}
    figure.legend(
        handles=[Patch(facecolor=BITS_COLOURS[bits], label=f"{bits} bits") for bits in ALL_BITS if bits in used],
        loc="outside upper center",
        ncols=4,
    )


def _draw_band(axes: Axes, band: Sequence[LayerRow], columns: int) -> None:
    font_size = 11 if columns <= 24 else 8
    for x, row in enumerate(band):
        for y, bits in enumerate((row.k_bits, row.v_bits)):
            colour = to_rgba(BITS_COLOURS[bits])
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", lw=1))
            axes.text(x, y, str(bits), ha="center", va="center", color=ink_on(colour), fontsize=font_size)
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(1.5, -0.5)
    axes.set_yticks([0, 1], ["K", "V"])
    step = 1 if columns <= 24 else 5
    shown = [x for x, row in enumerate(band) if row.layer % step == 0]
    axes.set_xticks(shown, [str(band[x].layer) for x in shown])
    _bare(axes)


def _draw_uniform(figure: Figure, cells: Sequence[UniformKl]) -> None:
    axes = figure.add_subplot()
    if not cells:
        return say_nothing_measured(axes)
    known = {(cell.k_bits, cell.v_bits): cell.kl for cell in cells}
    grid = np.array([[_as_float(known.get((k, v))) for v in ALL_BITS] for k in ALL_BITS])
    norm = log_norm(grid)
    _draw_score_cells(axes, grid, norm)
    colours = matplotlib.colormaps[SCORE_COLOURS]
    for (y, x), value in np.ndenumerate(grid):
        text = NOT_MEASURED if np.isnan(value) else number(float(value))
        behind = to_rgba(NOT_MEASURED_FILL) if np.isnan(value) else colours(norm(max(value, norm.vmin or 0.0)))
        axes.text(x, y, text, ha="center", va="center", fontsize=12, color=ink_on(behind))
    axes.set_xticks(range(len(ALL_BITS)), [str(bits) for bits in ALL_BITS])
    axes.set_yticks(range(len(ALL_BITS)), [str(bits) for bits in ALL_BITS])
    axes.set_xlabel("bits of values")
    axes.set_ylabel("bits of keys")
    bar = figure.colorbar(ScalarMappable(norm, SCORE_COLOURS), ax=axes, pad=0.03)
    bar.set_label("KL, nats per token")
    plain_log_ticks(bar.ax.yaxis)
    bar.ax.minorticks_off()


def _as_float(value: float | None) -> float:
    return math.nan if value is None or not math.isfinite(value) else value
