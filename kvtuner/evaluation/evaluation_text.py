"""An evaluation as text for a terminal. Measures nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvtuner.evaluation.formatting import fixed, interval, number, percent
from kvtuner.evaluation.statistics import Interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.evaluation import Cell, Difference, Evaluation, Result

TITLES = {
    "kl_nats_per_token": "KL nats/token",
    "top1_agreement": "top-1 as bf16",
    "nll_nats_per_token": "perplexity",
    "accuracy": "accuracy",
}
SIGNIFICANT = 0.05


def evaluation_lines(evaluation: Evaluation) -> list[str]:
    """A table for each level: every way beside the others."""
    made = evaluation.making
    data = evaluation.data
    seen = "not seen by the search" if data.is_unseen else "perhaps seen by the search"
    lines = [
        f"evaluation  {evaluation.host.kind}, read plan {evaluation.host.read_plan}; text of {data.corpus}, {seen}",
        f"made by     {made.command}",
        f"on          {made.machine}; kvtuner {made.kvtuner_version}, torch {made.torch},"
        f" transformers {made.transformers}",
    ]
    names = [subject.name for subject in evaluation.subjects]
    sizes = {subject.name: f"{subject.bytes_per_token:,}" for subject in evaluation.subjects}
    for level in dict.fromkeys(cell.level for cell in evaluation.cells):
        cells = [cell for cell in evaluation.cells if cell.level == level]
        head = ["", *names]
        rows = [["bytes per token", *(sizes[name] for name in names)]]
        for cell in cells:
            found = {result.subject: result for result in cell.results}
            rows.append([_place(cell), *(_value(cell, found.get(name)) for name in names)])
        what = f"{level}: {TITLES['accuracy']}" if cells[0].measure == "accuracy" else level
        lines += ["", what, *_aligned([head, *rows]), *_comparisons(cells, names[1])]
        if any(cell.flag for cell in cells):
            lines.append("! the unquantized model is at the floor or the ceiling: this tells little of its cache")
    return lines


def _place(cell: Cell) -> str:
    parts = [TITLES[cell.measure]] if cell.level == "likelihood" else [cell.task or ""]
    if cell.num_tokens is not None and cell.level != "likelihood":
        parts.append(f"{cell.num_tokens:,} tokens")
    if cell.position or cell.level in ("likelihood", "arithmetic"):
        parts.append(f"at {cell.position:,}")
    return ("! " if cell.flag else "  ") + " ".join(filter(None, parts))


def _value(cell: Cell, result: Result | None) -> str:
    if result is None:
        return "-"
    if cell.measure in ("accuracy", "top1_agreement"):
        return f"{percent(result.mean)} [{100 * result.low:.0f}, {100 * result.high:.0f}]"
    if cell.measure == "kl_nats_per_token":
        return interval(Interval(result.mean, result.low, result.high))
    return fixed(math.exp(result.mean), 3)


def _comparisons(cells: Sequence[Cell], subject: str) -> list[str]:
    """What of the profile's differences is clear."""
    lines = []
    for cell in cells:
        result = next((each for each in cell.results if each.subject == subject), None)
        for difference in result.differences if result else ():
            if _is_clear(difference):
                share = cell.measure in ("accuracy", "top1_agreement")
                values = [
                    f"{100 * value:+.1f}" if share else ("+" if value > 0 else "") + number(value)
                    for value in (difference.mean, difference.low, difference.high)
                ]
                unit = " points" if share else ""
                p_value = "" if difference.p_value is None else f", McNemar p {number(difference.p_value, 2)}"
                against = f"{subject} - {difference.other}, {_place(cell).strip('! ')}".replace("perplexity", "its log")
                lines.append(f"  {against}: {values[0]} [{values[1]}, {values[2]}]{unit}{p_value}")
    return ["clear differences, paired:", *lines] if lines else ["no clear difference of the profile from another way"]


def _is_clear(difference: Difference) -> bool:
    """By its interval, and by McNemar's test where there is one."""
    excludes_zero = Interval(difference.mean, difference.low, difference.high).excludes_zero
    return excludes_zero and (difference.p_value is None or difference.p_value < SIGNIFICANT)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
