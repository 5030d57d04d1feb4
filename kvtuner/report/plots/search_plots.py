"""The pictures of a search by name, and the history of its trials. Knows nothing of pages."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtuner.report.plots import style
from kvtuner.report.plots.grid_plots import chosen_bits, sensitivity_heatmap, uniform_kl_table
from kvtuner.report.plots.kl_by_bits import search_picture
from kvtuner.report.search_data import SAMPLED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvtuner.report.search_data import ReportData, TrialPoint


def optimization_history(data: ReportData) -> bytes:
    """PNG of measured KL by trial: warm starts, sampled, best so far; infeasible ones at the lower edge."""
    return style.render(lambda figure: _draw_history(figure, data.trials), height=4.6)


PICTURES: Final[Mapping[str, Callable[[ReportData], bytes]]] = MappingProxyType(
    {
        "chosen-bits": chosen_bits,
        "pareto-front": search_picture,
        "sensitivity": sensitivity_heatmap,
        "uniform-kl": uniform_kl_table,
        "history": optimization_history,
    }
)


def _draw_history(figure: Figure, trials: Sequence[TrialPoint]) -> None:
    axes = figure.add_subplot()
    if not trials:
        return style.say_nothing_measured(axes)
    measured = [(trial, trial.value) for trial in trials if trial.value is not None and math.isfinite(trial.value)]
    floor = style.log_floor(value for _, value in measured)
    _draw_trials(axes, [(trial, max(value, floor)) for trial, value in measured if trial.feasible])
    _draw_outside(axes, [trial.number for trial in trials if not trial.feasible])
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


def _draw_outside(axes: Axes, numbers: Sequence[int]) -> None:
    if numbers:
        lower_edge: dict[str, Any] = {"transform": axes.get_xaxis_transform()}
        label = "outside the budget, not measured"
        axes.plot(numbers, [0.02] * len(numbers), "x", ms=5, color=style.GREY, label=label, **lower_edge)
