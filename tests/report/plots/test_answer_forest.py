from __future__ import annotations

import pytest

from kvtuner.exported_configs.evaluation_verdict import AnswerDifference
from kvtuner.report.plots.answer_forest import answer_forest
from kvtuner.report.plots.drawing import Widths


@pytest.mark.parametrize("width", Widths())
def test_a_loss_lies_left_of_zero_and_stands_out_with_fp8_beside(width: float) -> None:
    lost = AnswerDifference("gsm8k", -5.0, -8.0, -2.0, -1.0, p_value=0.01, flag=None)
    kept = AnswerDifference("recall 128 tokens", 0.0, -19.0, 19.0, None, p_value=1.0, flag="ceiling")
    drawing = answer_forest([lost, kept], width)
    (zero,) = (float(mark.place["x1"]) for mark in drawing.marks if mark.look == "axis")
    whisker, equal = (mark for mark in drawing.marks if mark.look.startswith("interval"))
    assert float(whisker.place["x1"]) < float(whisker.place["x2"]) < zero
    assert float(equal.place["x1"]) < zero < float(equal.place["x2"])
    (fp8,) = (mark for mark in drawing.marks if mark.tag == "circle")
    assert float(whisker.place["x2"]) < float(fp8.place["cx"]) < zero
    squares = [float(mark.place["y"]) + 8 for mark in drawing.marks if mark.tag == "rect"]
    assert float(fp8.place["cy"]) - 4 > squares[0], "fp8 of equal answers would hide the profile"
    looks = {mark.text: mark.look for mark in drawing.marks if mark.tag == "text"}
    assert looks["gsm8k"] == "lost"
    assert max(float(mark.place["x"]) for mark in drawing.marks if mark.tag == "text") <= width
