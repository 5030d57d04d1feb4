"""A plan as a page with one chart, which needs nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtuner.pipeline.planning.plan_text import (
    advice_sentences,
    assumptions,
    memory_facts,
    plan_title,
    scheme_table,
    search_sentences,
)
from kvtuner.report.formatting import count
from kvtuner.report.html_page import render

if TYPE_CHECKING:
    from kvtuner.pipeline.planning.capacity_plan import CapacityPlan
    from kvtuner.pipeline.planning.scheme_capacity import SchemeCapacity

# Pixels on a screen of 390.
_WIDTH: Final = 358
_NUMBERS_WIDTH: Final = 56
_LETTER_WIDTH: Final = 6.8
_TOP: Final = 20
_BAR_HEIGHT: Final = 17
_STEP: Final = 23
_LONGEST_NAME: Final = 20


@dataclass(frozen=True, slots=True)
class RequestBar:
    """A bar of the chart, with the sentence that a pointer on it shows."""

    name: str
    kind: str
    number: str
    text: str
    width: float
    y: int


@dataclass(frozen=True, slots=True)
class RequestChart:
    """The chart of requests by scheme, in pixels; the line of requests asked for is None where nobody asked."""

    title: str
    bars: tuple[RequestBar, ...]
    left: float
    height: int
    wanted: str
    wanted_x: float | None
    width: int = _WIDTH
    bar_height: int = _BAR_HEIGHT


def capacity_page(plan: CapacityPlan) -> str:
    """The page of a plan."""
    return render(
        "plan.html",
        title=f"Plan for {plan_title(plan)}",
        heading=f"What fits: {plan_title(plan)}",
        facts=memory_facts(plan),
        chart=request_chart(plan),
        schemes=scheme_table(plan),
        advice=advice_sentences(plan),
        command=plan.search_command,
        search=search_sentences(plan),
        assumptions=assumptions(plan),
    )


def request_chart(plan: CapacityPlan) -> RequestChart:
    """The bars of all schemes, as long as their requests."""
    wanted = plan.options.concurrency
    most = max(1, wanted or 0, *(row.requests for row in plan.schemes))
    names = [_bar_name(row) for row in plan.schemes]
    left = round(max(map(len, names)) * _LETTER_WIDTH + 8, 1)
    scale = (_WIDTH - left - _NUMBERS_WIDTH) / most
    bars = tuple(
        RequestBar(
            name=name,
            kind="exact" if row.kind in ("bf16", "fp8") else row.kind,
            number=count(row.requests),
            text=f"{name}: {count(row.requests)} requests, {count(row.tokens)} tokens",
            width=round(row.requests * scale, 1),
            y=_TOP + place * _STEP,
        )
        for place, (name, row) in enumerate(zip(names, plan.schemes, strict=True))
    )
    return RequestChart(
        title=f"Requests of {count(plan.shape.context_length)} tokens that fit at once, by cache scheme and budget",
        bars=bars,
        left=left,
        height=_TOP + len(bars) * _STEP,
        wanted=count(wanted),
        wanted_x=None if wanted is None else round(left + wanted * scale, 1),
    )


def _bar_name(row: SchemeCapacity) -> str:
    name = f"<= {row.name}" if row.kind == "budget" else row.name
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."
