"""A drawing of a search's trials: warm starts, sampled ones, those outside the budget, the best so far."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from kvtuner.report.formatting import is_positive, number
from kvtuner.report.plots.drawing import Drawing, LinearAxis, LogAxis
from kvtuner.report.plots.frame import Frame, draw_legend, draw_symbol
from kvtuner.report.search_data import SAMPLED

if TYPE_CHECKING:
    from kvtuner.report.plots.frame import Symbol
    from kvtuner.report.search_data import ReportData, TrialPoint

_TOP: Final = 28.0
_HEIGHT: Final = 240.0
_LEFT: Final = 46.0
_FEW_TRIALS: Final = 12
_LEGEND: Final[dict[Symbol, str]] = {
    "line own": "best so far",
    "diamond s2": "warm start",
    "dot s0": "sampled",
    "cross": "outside the budget, not measured",
}


def trial_history(data: ReportData, width: float) -> Drawing:
    """Measured KL by trial; KL of zero and less lies on a line marked 0, and crosses stand at the lower edge."""
    numbers = [trial.number for trial in data.trials]
    measured = [(trial, trial.value) for trial in data.trials if trial.value is not None and math.isfinite(trial.value)]
    inside = [(trial, value) for trial, value in measured if trial.feasible]
    frame = _frame(numbers, [value for _, value in inside], width)
    best = min((value for _, value in inside), default=None)
    text = f"Measured KL by trial: {len(numbers)} trials, {len(inside)} measured, best {number(best)}"
    drawing = Drawing(width, text)
    frame.draw(drawing)
    shown: set[Symbol] = set()
    for trial in data.trials:
        if not trial.feasible:
            shown.add("cross")
            draw_symbol(drawing, "cross", frame.x.at(trial.number), frame.y.start - 6, f"trial {trial.number}")
    if inside:
        lowest = accumulate((value for _, value in inside), min)
        places = [(frame.x.at(trial.number), frame.y.at(kl)) for (trial, _), kl in zip(inside, lowest, strict=True)]
        corners = [corner for before, place in zip([places[0], *places], places, strict=False)
                   for corner in ((place[0], before[1]), place)]  # fmt: skip
        drawing.trace(corners, "own", "best so far")
        shown.add("line own")
    for trial, value in inside:
        symbol = _symbol(trial)
        shown.add(symbol)
        title = f"trial {trial.number}, {trial.source}: {number(value)}"
        draw_symbol(drawing, symbol, frame.x.at(trial.number), frame.y.at(value), title)
    draw_legend(drawing, [(symbol, name) for symbol, name in _LEGEND.items() if symbol in shown])
    return drawing


def _symbol(trial: TrialPoint) -> Symbol:
    return "dot s0" if trial.source == SAMPLED else "diamond s2"


def _frame(numbers: list[int], values: list[float], width: float) -> Frame:
    positive = [value for value in values if is_positive(value)] or [1e-3]
    has_zero = any(value <= 0 for value in values)
    low, high = min(positive) / (10 if has_zero else 1.2), max(positive) * 1.2
    low /= (high / low) ** 0.08  # room for the crosses
    few = tuple(numbers) if len(numbers) <= _FEW_TRIALS else ()
    return Frame(
        LinearAxis(min(numbers) - 0.5, max(numbers) + 0.5, _LEFT, width - 4),
        LogAxis(low, high, _TOP + _HEIGHT, _TOP),
        "trial",
        "KL, nats per token, log scale",
        few,
        has_zero,
    )
