"""An evaluation as text for a person. Measures nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kvtuner.evaluation.statistics import Interval
from kvtuner.exported_configs.identity.mismatch import is_same_configuration
from kvtuner.exported_configs.profile.evaluation_record import PROFILE
from kvtuner.report.formatting import fixed, interval, number, percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.exported_configs.profile.evaluation_record import Cell, Evaluation, PairedDifference, Result
    from kvtuner.exported_configs.profile.profile import Profile

TITLES: Final = {
    "kl_nats_per_token": "KL nats/token",
    "truncated_kl_nats_per_token": "truncated KL nats/token",
    "top1_agreement": "top-1 as bf16",
    "nll_nats_per_token": "perplexity",
    "accuracy": "accuracy",
    "score": "score",
    "bleu": "BLEU",
    "chrf": "chrF",
    "ter": "TER",
}
SHARES: Final = ("accuracy", "top1_agreement")
SIGNIFICANT: Final = 0.05
FLAGS: Final = {
    "floor": "- the unquantized model fails: this cannot show a loss",
    "ceiling": "+ the unquantized model hardly fails: this shows large losses only",
    "unread": "~ a server hardly found these prompts in its cache, or does not say: it may have read them as they were"
    " before they were stored, and only what follows the first token of an answer shows a loss",
}
MARKS: Final = {"floor": "-", "ceiling": "+", "unread": "~", None: " "}
CONFIGURATIONS: Final = {
    True: "",
    False: ", not the configuration that was searched",
    None: ", which cannot be compared with the configuration that was searched",
}
MOST_EXPONENT: Final = 700


def evaluation_lines(evaluation: Evaluation, profile: Profile) -> list[str]:
    """A table for each level, every way beside the others, and what of the profile's differences is clear."""
    names = [subject.name for subject in evaluation.subjects]
    sizes = {subject.name: f"{subject.bytes_per_token:,}" for subject in evaluation.subjects}
    lines = _about(evaluation, profile)
    for level in dict.fromkeys(cell.level for cell in evaluation.cells):
        cells = [cell for cell in evaluation.cells if cell.level == level]
        rows = [["", *names], ["bytes per token", *(sizes[name] for name in names)]]
        for cell in cells:
            found = {result.subject: result for result in cell.results}
            rows.append([f"{_mark(cell)} {_place(cell)}", *(value_text(cell, found.get(name)) for name in names)])
        units = {"likelihood": "sequences", "task": "questions"}.get(level, "contexts")
        most = max(cell.units for cell in cells)
        lines += ["", f"{level}, {most} {units} each at most" if level == "task" else f"{level}, {most} {units} each"]
        lines += aligned(rows)
        lines += [words for flag, words in FLAGS.items() if any(cell.flag == flag for cell in cells)]
        if failures := sum(result.failures for cell in cells for result in cell.results):
            count = "are left out of every way" if level == "likelihood" else "count as wrong"
            lines.append(f"{failures} answers never came, and {count}")
    return [*lines, "", *_comparisons(evaluation.cells)]


def sample_lines(prompt: str, said: Mapping[str, str | None]) -> list[str]:
    """One prompt and what every way says after it, in Markdown."""
    lines = ["## After", "", *_quoted(prompt), ""]
    for name, text in said.items():
        lines += [f"**{name}**", "", *(_quoted(text) if text is not None else ["no answer"]), ""]
    return lines


def _quoted(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()] or ["    "]


def _about(evaluation: Evaluation, profile: Profile) -> list[str]:
    model, host, data, made = evaluation.model, evaluation.host, evaluation.data, evaluation.making
    name = f"{model.id}@{model.revision}" if model.revision else model.id
    other = CONFIGURATIONS[is_same_configuration(model, profile.model)]
    where = f"read plan {host.read_plan}" if host.read_plan else f"reads {host.reads or 'what it does not say'}"
    hits = "" if host.hit_share is None else f", {percent(host.hit_share)} of prompts found in its cache"
    seen = "which calibration and selection did not see" if data.is_unseen else "which the search may have seen"
    return [
        f"evaluation  of {name} in {model.dtype}{other}",
        f"host        {host.kind} {host.version or ''}".rstrip() + f", {where}{hits}",
        f"text        of {data.corpus}, {seen}",
        f"made by     {made.command}",
        f"on          {made.machine}; kvtuner {made.kvtuner_version}, torch {made.torch}, transformers"
        f" {made.transformers}",
    ]


def _mark(cell: Cell) -> str:
    return MARKS[cell.flag]


def _place(cell: Cell) -> str:
    parts = [TITLES[cell.measure]] if cell.level == "likelihood" else [cell.task or ""]
    if cell.num_tokens is not None and cell.level != "likelihood":
        parts.append(f"{cell.num_tokens:,} tokens")
    if cell.level in ("arithmetic", "likelihood") and (cell.num_tokens is None or cell.level == "likelihood"):
        parts.append(f"at {cell.position:,}")
    return " ".join(filter(None, parts))


def value_text(cell: Cell, result: Result | None) -> str:
    """A result with its interval, as its measure is read; ``-`` without one."""
    if result is None:
        return "-"
    if cell.measure in SHARES:
        return f"{percent(result.mean)} [{100 * result.low:.1f}, {100 * result.high:.1f}]"
    if cell.measure != "nll_nats_per_token":
        return interval(Interval(result.mean, result.low, result.high))
    mean, low, high = (fixed(math.exp(min(x, MOST_EXPONENT))) for x in (result.mean, result.low, result.high))
    return f"{mean} [{low}, {high}]"


def _comparisons(cells: Sequence[Cell]) -> list[str]:
    """Differences that are clear, of how many, so that nobody takes one of twenty for a finding."""
    all_of_them = [(cell, difference) for cell in cells for difference in cell.differences]
    clear = [(cell, difference) for cell, difference in all_of_them if difference.p_value < SIGNIFICANT]
    chance = f"by chance {SIGNIFICANT * len(all_of_them):.0f} of {len(all_of_them)} would look so"
    if not clear:
        return [f"no clear difference of the profile from another way; {chance}"] if all_of_them else []
    rows = [
        [f"  {PROFILE} - {difference.other}", f"{cell.level} {_place(cell)}", *_difference(cell, difference)]
        for cell, difference in clear
    ]
    return [f"clear differences, paired ({chance})", *aligned(rows, words=2)]


def _difference(cell: Cell, difference: PairedDifference) -> list[str]:
    values = (difference.mean, difference.low, difference.high)
    if cell.measure in SHARES:
        mean, low, high = (f"{100 * value:+.1f}" for value in values)
        unit = " points"
    else:
        mean, low, high = (("+" if value > 0 else "") + number(value) for value in values)
        unit = " in its log" if cell.measure == "nll_nats_per_token" else ""
    mcnemar = "" if difference.mcnemar is None else f"McNemar {number(difference.mcnemar, 2)}"
    return [f"{mean} [{low}, {high}]{unit}", f"p {number(difference.p_value, 2)}", mcnemar]


def aligned(rows: Sequence[Sequence[str]], *, words: int = 1) -> list[str]:
    """Columns of even width, the first `words` of them to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
