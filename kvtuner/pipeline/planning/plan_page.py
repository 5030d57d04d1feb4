"""A plan as a page with one chart, which needs nothing else."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from kvtuner.exported_configs.scheme_names import FP8, REFERENCE
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
from kvtuner.report.plots.drawing import CHARACTER, Drawing, drawn, shortened

if TYPE_CHECKING:
    from kvtuner.pipeline.planning.capacity_plan import CapacityPlan
    from kvtuner.report.plots.drawing import Anchor

_TOP: Final = 22.0
_ROW: Final = 23.0
_LONGEST_NAME: Final = 20
# Room of the figure behind a bar.
_FIGURES: Final = 56.0
_LOOKS: Final = {REFERENCE: "other", FP8: "other", "uniform": "s6", "budget": "s0"}


def capacity_page(plan: CapacityPlan) -> str:
    """The page of a plan."""
    return render(
        "plan.html",
        title=f"Plan for {plan_title(plan)}",
        heading=f"What fits: {plan_title(plan)}",
        facts=memory_facts(plan),
        requests=f"Requests of {count(plan.shape.context_length)} tokens that fit at once, by cache scheme and budget",
        chart=drawn(partial(request_chart, plan)),
        schemes=scheme_table(plan),
        advice=advice_sentences(plan),
        command=plan.search_command,
        search=search_sentences(plan),
        assumptions=assumptions(plan),
    )


def request_chart(plan: CapacityPlan, width: float) -> Drawing:
    """The bars of all schemes, as long as their requests, with a line where those asked for are."""
    wanted = plan.options.concurrency
    most = max(1, wanted or 0, *(row.requests for row in plan.schemes))
    names = [shortened(row.title, _LONGEST_NAME * CHARACTER) for row in plan.schemes]
    left = max(map(len, names)) * CHARACTER + 8
    scale = (width - left - _FIGURES) / most
    texts = [f"{row.title}: {count(row.requests)} requests, {count(row.tokens)} tokens" for row in plan.schemes]
    drawing = Drawing(width, f"Requests that fit: {'; '.join(texts)}", _TOP + _ROW * len(names))
    tops = [_TOP + _ROW * place for place in range(len(names))]
    for row, top, title in zip(plan.schemes, tops, texts, strict=True):
        drawing.rect(left, top, row.requests * scale, _ROW - 6, f"bar {_LOOKS[row.kind]}", title)
    if wanted is not None:
        place = left + wanted * scale
        drawing.line(place, _TOP - 6, place, drawing.height, "interval")
        anchor: Anchor = "middle" if left < place < width - _FIGURES else "end"
        drawing.write(place, 8, f"{count(wanted)} asked for", "soft", anchor=anchor)
    for name, row, top, title in zip(names, plan.schemes, tops, texts, strict=True):
        drawing.write(0, top + (_ROW - 6) / 2, name, title=title)
        # Over the line, which it interrupts where they meet.
        figure, look = count(row.requests), "over" if wanted is not None else ""
        drawing.write(left + row.requests * scale + 5, top + (_ROW - 6) / 2, figure, look, title=title)
    return drawing
