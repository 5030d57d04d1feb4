from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvtuner.report.plots.drawing import Drawing, Widths
from kvtuner.report.plots.trial_history import trial_history
from kvtuner.report.search_data import SAMPLED, TrialPoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.report.search_data import ReportData

    MakeReport = Callable[..., ReportData]


def titled(drawing: Drawing, prefix: str) -> list[str]:
    return [mark.title for mark in drawing.marks if mark.look.startswith(prefix) and mark.title.startswith("trial")]


@pytest.mark.parametrize("width", Widths())
def test_trials_are_told_apart_and_the_best_so_far_never_rises(make_report: MakeReport, width: float) -> None:
    trials = (
        TrialPoint(0, 0.02, True, "exact"),
        TrialPoint(1, None, False, SAMPLED),
        TrialPoint(2, 0.03, True, SAMPLED),
        TrialPoint(3, 0.01, True, SAMPLED),
    )
    drawing = trial_history(replace(make_report(1), trials=trials), width)
    assert titled(drawing, "dot s2") == ["trial 0, exact: 0.0200"]
    assert titled(drawing, "dot s0") == [f"trial 2, {SAMPLED}: 0.0300", f"trial 3, {SAMPLED}: 0.0100"]
    assert titled(drawing, "axis") == ["trial 1"] * 2, "a cross is two strokes"
    (best,) = (mark for mark in drawing.marks if mark.look == "trace own" and mark.title)
    heights = [float(place.split()[1]) for place in best.place["d"].removeprefix("M").split("L")]
    assert heights == sorted(heights) and heights[0] < heights[-1], "pixels count from the top"
    assert {"0", "1", "2", "3"} <= {mark.text for mark in drawing.marks}


def test_trials_that_all_broke_the_budget_are_crosses_alone(make_report: MakeReport) -> None:
    drawing = trial_history(replace(make_report(1), trials=(TrialPoint(0, None, False, SAMPLED),)), Widths().wide)
    assert titled(drawing, "axis") and not titled(drawing, "dot")
    assert "best so far" not in {mark.text for mark in drawing.marks}
