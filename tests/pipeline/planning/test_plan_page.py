"""The page has one chart whose bars are the table's requests, inside its frame, and runs nothing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from page_reader import check_harmless

from kvtuner.pipeline.planning.capacity_plan import CapacityPlan, make_plan
from kvtuner.pipeline.planning.plan_options import PlanOptions
from kvtuner.pipeline.planning.plan_page import capacity_page, request_chart

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


def test_the_chart_has_a_bar_for_every_scheme_as_long_as_its_requests(plan: CapacityPlan) -> None:
    page = check_harmless(capacity_page(plan))
    bars = [attributes for name, attributes in page.tags if name == "rect"]
    chart = request_chart(plan)
    assert len(bars) == len(plan.schemes)
    longest = max((row.requests, float(bar["width"])) for row, bar in zip(plan.schemes, bars, strict=True))
    for row, bar in zip(plan.schemes, bars, strict=True):
        if longest[0]:
            assert float(bar["width"]) == pytest.approx(longest[1] * row.requests / longest[0], abs=0.11)
        assert float(bar["x"]) + float(bar["width"]) <= chart.width - 50, "the number has no room"
    assert [name for name, _ in page.tags].count("svg") == 1
    (svg,) = [attributes for name, attributes in page.tags if name == "svg"]
    titles = {attributes.get("id") for name, attributes in page.tags if name == "title"}
    assert svg["role"] == "img" and svg["aria-labelledby"] in titles
    assert svg["viewbox"] == f"0 0 {chart.width} {chart.height}"
    assert chart.height >= max(float(bar["y"]) + float(bar["height"]) for bar in bars)


def test_a_line_stands_where_the_requests_asked_for_are(plan: CapacityPlan) -> None:
    page = check_harmless(capacity_page(plan))
    lines = [float(attributes["x1"]) for name, attributes in page.tags if name == "line"]
    wanted = plan.options.concurrency
    assert len(lines) == (wanted is not None)
    for bar, row in zip(request_chart(plan).bars, plan.schemes, strict=True):
        if wanted is not None:
            assert (request_chart(plan).left + bar.width >= lines[0] - 0.1) == (row.requests >= wanted)


def test_the_page_says_what_the_text_says(plan: CapacityPlan) -> None:
    page = check_harmless(capacity_page(plan))
    assert plan.search_command is None or plan.search_command in page.text
    for row in plan.schemes:
        assert f"{row.tokens:,}" in page.cells and f"{row.bytes_per_token:,}" in page.cells


def test_colours_follow_the_theme(plan: CapacityPlan) -> None:
    text = capacity_page(plan)
    assert re.search(r"\.chart text \{[^}]*fill: var\(--ink\)", text)
    assert "prefers-color-scheme: dark) { .chart" in text
