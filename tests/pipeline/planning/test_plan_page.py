"""The page has one chart whose bars are the table's requests, inside its frame, and runs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from page_reader import check_harmless

from kvtuner.pipeline.planning.capacity_plan import CapacityPlan, make_plan
from kvtuner.pipeline.planning.plan_options import PlanOptions
from kvtuner.pipeline.planning.plan_page import capacity_page, request_chart
from kvtuner.report.plots.drawing import Widths

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


CASES: list[dict[str, Any]] = [
    {"gpu": "H100", "tp_size": 2, "concurrency": 64},
    {"gpu": "H100"},
    {"gpu": "L4", "concurrency": 5_000},
    {"gpu": "B200", "tp_size": 8, "context_length": 512, "budget": ("12345678.25MiB@123456x32768", "2.5bit")},
]


@pytest.fixture(params=CASES, ids=str)
def plan(request: pytest.FixtureRequest, hub_model: Callable[..., Path]) -> CapacityPlan:
    name = "qwen" if request.param["gpu"] == "L4" else "llama"
    return make_plan(PlanOptions(model=str(hub_model(name)), **{"context_length": 32_768, **request.param}))


@pytest.mark.parametrize("width", Widths())
def test_the_chart_has_a_bar_for_every_scheme_as_long_as_its_requests(plan: CapacityPlan, width: float) -> None:
    drawing = request_chart(plan, width)
    bars = [mark.place for mark in drawing.marks if mark.tag == "rect"]
    assert len(bars) == len(plan.schemes)
    longest = max((row.requests, float(bar["width"])) for row, bar in zip(plan.schemes, bars, strict=True))
    for row, bar in zip(plan.schemes, bars, strict=True):
        if longest[0]:
            assert float(bar["width"]) == pytest.approx(longest[1] * row.requests / longest[0], abs=0.11)
        assert float(bar["x"]) + float(bar["width"]) <= width - 50, "the number has no room"
        assert f"{row.title}: {row.requests:,} requests" in drawing.description
    assert drawing.height >= max(float(bar["y"]) + float(bar["height"]) for bar in bars)


@pytest.mark.parametrize("width", Widths())
def test_a_line_stands_where_the_requests_asked_for_are(plan: CapacityPlan, width: float) -> None:
    drawing = request_chart(plan, width)
    lines = [float(mark.place["x1"]) for mark in drawing.marks if mark.tag == "line"]
    wanted = plan.options.concurrency
    assert len(lines) == (wanted is not None)
    for mark, row in zip((mark for mark in drawing.marks if mark.tag == "rect"), plan.schemes, strict=True):
        if wanted is not None:
            end = float(mark.place["x"]) + float(mark.place["width"])
            assert (end >= lines[0] - 0.2) == (row.requests >= wanted)


def test_the_page_says_what_the_text_says(plan: CapacityPlan) -> None:
    page = check_harmless(capacity_page(plan))
    assert plan.search_command is None or plan.search_command in page.text
    for row in plan.schemes:
        assert f"{row.tokens:,}" in page.cells and f"{row.bytes_per_token:,}" in page.cells


def test_the_page_has_the_chart_for_wide_and_narrow_screens(plan: CapacityPlan) -> None:
    page = check_harmless(capacity_page(plan))
    drawings = [attributes["class"] for name, attributes in page.tags if name == "svg"]
    assert drawings == ["drawing wide", "drawing narrow"]
