"""An evaluation as text for a terminal and as part of a page. Measures nothing."""

from __future__ import annotations

import math
import textwrap
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvtuner.exported_configs.evaluation_verdict import answer_differences, evaluation_verdict
from kvtuner.exported_configs.identity.mismatch import is_same_configuration
from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME, SIGNIFICANT
from kvtuner.report.formatting import count, fixed, interval, model_name, number, percent
from kvtuner.report.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.exported_configs.profile.evaluation_record import (
        Cell,
        CellResult,
        Evaluation,
        PairedDifference,
        ResultProvenance,
    )
    from kvtuner.exported_configs.profile.profile import Profile

SHARES: Final = ("accuracy", "top1_agreement")
FLAGS: Final = {
    "floor": "- the unquantized model is right too rarely for a loss to show",
    "ceiling": "+ the unquantized model hardly fails: this shows large losses only",
    "unread": "~ a server hardly found these prompts in its cache, or does not say: it may have read them as they were"
    " before they were stored, and only what follows the first token of an answer shows a loss",
}
CONFIGURATIONS: Final = {
    True: "",
    False: ", not the configuration that was searched",
    None: ", which cannot be compared with the configuration that was searched",
}
MAX_EXPONENT: Final = 700


def evaluation_lines(evaluation: Evaluation, profile: Profile, width: int | None = None) -> list[str]:
    """A table for each level, every scheme beside the others, and which differences of the profile are clear.

    Lines are as wide as a terminal if its width is given.
    """
    provenance, backend = evaluation.provenance, evaluation.backend
    facts = [
        ("evaluation", f"of {_model(evaluation, profile)}"),
        ("host", f"{backend.kind} {backend.version or ''}".rstrip() + f", {_reads(evaluation)}"),
        ("text", f"of {_data(evaluation)}"),
        ("made by", provenance.command),
        ("on", f"{provenance.machine}; {versions_text(provenance)}"),
    ]
    lines = Table.of_facts(facts).lines(width)
    for level in dict.fromkeys(cell.level for cell in evaluation.cells):
        cells = [cell for cell in evaluation.cells if cell.level == level]
        lines += ["", _units(level, cells), *_level_table(evaluation, cells).lines(width)]
        remarks = [text for flag, text in FLAGS.items() if any(cell.flag == flag for cell in cells)]
        remarks += _skipped(cells)
        for text in remarks:
            lines += textwrap.wrap(text, width, break_on_hyphens=False) if width else [text]
        if failures := _failures(cells):
            effect = "are left out of every scheme" if level == "likelihood" else "count as wrong"
            lines.append(f"{failures} answers never came, and {effect}")
    found = evaluation_verdict(evaluation)
    facts = [("verdict", " ".join(found.findings)), ("advice", found.advice)]
    return [*lines, "", *_clear_differences(evaluation.cells, width), "", *Table.of_facts(facts).lines(width)]


def evaluation_page(evaluation: Evaluation, profile: Profile, name: str) -> str:
    """The page of one evaluation of the profile of that name."""
    from kvtuner.report.html_page import render

    part, model = evaluation_part(evaluation, profile), model_name(evaluation.model)
    return render("evaluation.html", title=f"Answers of {model} with {name}", part=part, model=model, name=name)


def sample_lines(prompt: str, answers: Mapping[str, str | None]) -> list[str]:
    """One prompt and what every scheme answers, in Markdown."""
    lines = ["## After", "", *_quoted(prompt), ""]
    for name, text in answers.items():
        lines += [f"**{name}**", "", *(_quoted(text) if text is not None else ["no answer"]), ""]
    return lines


def evaluation_part(evaluation: Evaluation, profile: Profile) -> dict[str, Any]:
    """An evaluation for ``evaluation_body`` of ``templates/parts.html``: verdict, picture, tables, how to read them."""
    from kvtuner.report.plots.answer_forest import answer_forest
    from kvtuner.report.plots.drawing import drawn

    answers = answer_differences(evaluation)
    cells, provenance = evaluation.cells, evaluation.provenance
    remarks = [f"{flag}: {text[2:]}" for flag, text in FLAGS.items() if any(cell.flag == flag for cell in cells)]
    remarks += _skipped(cells)
    if total := sum(len(cell.differences) for cell in cells):
        remarks.append(
            "The last column holds differences of the profile from another scheme, paired, with p below"
            f" {SIGNIFICANT}; of {total}, {SIGNIFICANT * total:.0f} would look so by chance."
        )
    failures = _failures(cells)
    facts = [
        ("model", _model(evaluation, profile)),
        ("text", _data(evaluation)),
        *([("answers that never came", count(failures))] if failures else []),
        ("made by", provenance.command),
        ("on", provenance.machine),
        ("with", versions_text(provenance)),
    ]
    return {
        "title": f"By {evaluation.backend.kind}, {_reads(evaluation)}",
        "verdict": evaluation_verdict(evaluation),
        "forest": drawn(partial(answer_forest, answers)) if answers else None,
        "forest_has_fp8": any(answer.fp8 is not None for answer in answers),
        "cells": _page_table(evaluation),
        "remarks": remarks,
        "facts": Table.of_facts(facts),
    }


def flagged_title(cell: Cell) -> str:
    """The title of a cell with its flag."""
    return f"{cell.title} ({cell.flag})" if cell.flag else cell.title


def cell_values(cell: Cell, names: Sequence[str]) -> list[str]:
    """The results of the named schemes, with intervals; ``-`` where a scheme has none, and what was skipped says so."""
    results = {result.scheme: result for result in cell.results}
    return ["skipped" if name in cell.skipped else _value_text(cell, results.get(name)) for name in names]


def versions_text(provenance: ResultProvenance) -> str:
    """The versions of the packages that measured."""
    return f"kvtuner {provenance.kvtuner_version}, torch {provenance.torch}, transformers {provenance.transformers}"


def _model(evaluation: Evaluation, profile: Profile) -> str:
    model = evaluation.model
    return f"{model_name(model)} in {model.dtype}{CONFIGURATIONS[is_same_configuration(model, profile.model)]}"


def _reads(evaluation: Evaluation) -> str:
    backend = evaluation.backend
    reads = f"reads {backend.reads or 'what it does not say'}"
    hits = "" if backend.hit_share is None else f", {percent(backend.hit_share)} of prompts found in its cache"
    return (f"read plan {backend.read_plan}" if backend.read_plan else reads) + hits


def _data(evaluation: Evaluation) -> str:
    data = evaluation.data
    seen = "which calibration and selection did not see" if data.is_unseen else "which the search may have seen"
    return f"{data.corpus}, {seen}"


def _failures(cells: Sequence[Cell]) -> int:
    return sum(result.failures for cell in cells for result in cell.results)


def _skipped(cells: Sequence[Cell]) -> list[str]:
    """The question sets that some schemes were not asked, by the schemes' names."""
    sets: dict[tuple[str, ...], list[str]] = {}
    for cell in cells:
        if cell.skipped:
            sets.setdefault(cell.skipped, []).append(cell.title)
    return [
        f"skipped for {', '.join(names)}: {'; '.join(titles)}; --all-questions asks them too"
        for names, titles in sets.items()
    ]


def _clear(cell: Cell) -> list[PairedDifference]:
    return [difference for difference in cell.differences if difference.p_value < SIGNIFICANT]


def _quoted(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()] or ["    "]


def _units(level: str, cells: Sequence[Cell]) -> str:
    units = {"likelihood": "sequences", "task": "questions"}.get(level, "contexts")
    return f"{level}, {max(cell.units for cell in cells)} {units} each" + " at most" * (level == "task")


def _page_table(evaluation: Evaluation) -> Table:
    names = [scheme.name for scheme in evaluation.schemes]
    sizes = [count(scheme.bytes_per_token) for scheme in evaluation.schemes]
    rows = [["bytes per token", "", *sizes, ""]]
    for cell in evaluation.cells:
        clear = [f"{other.other}: {interval(other)}, p {number(other.p_value, 2)}" for other in _clear(cell)]
        rows.append([flagged_title(cell), count(cell.units), *cell_values(cell, names), "; ".join(clear)])
    return Table(("", "units", *names, "clear differences: the profile's figure minus another's"), rows)


def _level_table(evaluation: Evaluation, cells: Sequence[Cell]) -> Table:
    names = [scheme.name for scheme in evaluation.schemes]
    sizes = [f"{scheme.bytes_per_token:,}" for scheme in evaluation.schemes]
    rows = [[f"{FLAGS.get(cell.flag or '', ' ')[0]} {cell.title}", *cell_values(cell, names)] for cell in cells]
    return Table(["", *names], [["bytes per token", *sizes], *rows])


def _value_text(cell: Cell, result: CellResult | None) -> str:
    if result is None:
        return "-"
    if cell.measure in SHARES:
        return f"{percent(result.mean)} [{100 * result.low:.1f}, {100 * result.high:.1f}]"
    if cell.measure != "nll_nats_per_token":
        return interval(result)
    # exp of more overflows a float.
    mean, low, high = (fixed(math.exp(min(x, MAX_EXPONENT))) for x in (result.mean, result.low, result.high))
    return f"{mean} [{low}, {high}]"


def _clear_differences(cells: Sequence[Cell], width: int | None) -> list[str]:
    """Differences that are clear, of how many, so that nobody takes one of twenty for a result."""
    total = sum(len(cell.differences) for cell in cells)
    chance = f"by chance {SIGNIFICANT * total:.0f} of {total} would look so"
    clear = [(cell, difference) for cell in cells for difference in _clear(cell)]
    if not clear:
        return [f"no clear difference of the profile from another scheme; {chance}"] if total else []
    rows = [(f"  {PROFILE_SCHEME} - {other.other}", cell.title, *_difference(cell, other)) for cell, other in clear]
    title = [f"clear differences, paired ({chance});", "negative: the profile's figure is lower"]
    return [*title, *Table([""] * 5, rows, left=(0, 1)).lines(width)]


def _difference(cell: Cell, difference: PairedDifference) -> tuple[str, str, str]:
    values = (difference.mean, difference.low, difference.high)
    if cell.measure in SHARES:
        mean, low, high = (f"{100 * value:+.1f}" for value in values)
        unit = " points"
    else:
        mean, low, high = (("+" if value > 0 else "") + number(value) for value in values)
        unit = " in its log" if cell.measure == "nll_nats_per_token" else ""
    mcnemar = "" if difference.mcnemar is None else f"McNemar {number(difference.mcnemar, 2)}"
    return f"{mean} [{low}, {high}]{unit}", f"p {number(difference.p_value, 2)}", mcnemar
