"""An evaluation as part of a page: what was asked, a table, what is clear. Measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtuner.exported_configs.identity.mismatch import is_same_configuration
from kvtuner.report.evaluation_report import CONFIGURATIONS, FLAGS, SIGNIFICANT, TITLES, value_text
from kvtuner.report.formatting import number, percent
from kvtuner.report.markup import Markup, element, join
from kvtuner.report.page import table

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.evaluation_record import Cell, Evaluation
    from kvtuner.exported_configs.profile.profile import Profile


def evaluation_markup(evaluation: Evaluation, profile: Profile) -> Markup:
    """Every way beside the others, and where the profile's difference from one is clear."""
    names = [subject.name for subject in evaluation.subjects]
    sizes = [f"{subject.bytes_per_token:,}" for subject in evaluation.subjects]
    rows = [("bytes per token", "", *sizes, "")]
    for cell in evaluation.cells:
        found = {result.subject: result for result in cell.results}
        values = (value_text(cell, found.get(name)) for name in names)
        rows.append((_place(cell), f"{cell.units:,}", *values, _clear(cell)))
    flags = [
        f"{flag}: {words[2:]}" for flag, words in FLAGS.items() if any(cell.flag == flag for cell in evaluation.cells)
    ]
    count = sum(len(cell.differences) for cell in evaluation.cells)
    chance = (
        f"The last column holds differences of the profile from another way, paired, with p below {SIGNIFICANT}; of"
        f" {count}, {SIGNIFICANT * count:.0f} would look so by chance."
    )
    return join(
        element("h3", f"By {evaluation.host.kind}, {_host(evaluation)}"),
        table(("", "units", *names, "clear differences"), rows),
        *(element("p", words, class_="soft") for words in flags),
        element("p", chance, class_="soft") if count else join(),
        table(("", ""), _making(evaluation, profile), wrap=True),
    )


def _host(evaluation: Evaluation) -> str:
    host = evaluation.host
    reading = f"read plan {host.read_plan}" if host.read_plan else f"reads {host.reads or 'what it does not say'}"
    hits = "" if host.hit_share is None else f", {percent(host.hit_share)} of prompts found in its cache"
    return f"{reading}{hits}"


def _place(cell: Cell) -> str:
    name = TITLES[cell.measure] if cell.level == "likelihood" else " ".join(filter(None, (cell.level, cell.task)))
    length = f", {cell.num_tokens:,} tokens" if cell.num_tokens else ""
    flag = f" ({cell.flag})" if cell.flag else ""
    return f"{name}{length} at {cell.position:,}{flag}"


def _clear(cell: Cell) -> str:
    return "; ".join(
        f"{each.other}: {number(each.mean)} [{number(each.low)}, {number(each.high)}], p {number(each.p_value, 2)}"
        for each in cell.differences
        if each.p_value < SIGNIFICANT
    )


def _making(evaluation: Evaluation, profile: Profile) -> list[tuple[str, str]]:
    model, made, data = evaluation.model, evaluation.making, evaluation.data
    other = CONFIGURATIONS[is_same_configuration(model, profile.model)]
    seen = "which calibration and selection did not see" if data.is_unseen else "which the search may have seen"
    failures = sum(result.failures for cell in evaluation.cells for result in cell.results)
    return [
        ("model", f"{model.id}{f'@{model.revision}' if model.revision else ''} in {model.dtype}{other}"),
        ("text", f"{data.corpus}, {seen}"),
        *([("answers that never came", f"{failures:,}")] if failures else []),
        ("made by", made.command),
        ("on", made.machine),
        ("with", f"kvtuner {made.kvtuner_version}, torch {made.torch}, transformers {made.transformers}"),
    ]
