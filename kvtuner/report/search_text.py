"""The result of a search as text for a terminal: bits, size, what decides, and the verdict. Measures nothing."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from kvtuner.exported_configs.verdict import LEAST_UNITS
from kvtuner.report.formatting import ascii_text, count, fixed, interval, number, percent, window_facts
from kvtuner.report.layer_strip import legend, strip_lines, tracks
from kvtuner.report.search_data import SCORE_TITLES, rank_text
from kvtuner.report.table import Table

if TYPE_CHECKING:
    from kvtuner.evaluation.statistics import Interval
    from kvtuner.exported_configs.verdict import Verdict
    from kvtuner.report.layer_strip import Terminal
    from kvtuner.report.search_data import OffsetQuality, QualityRow, ReportData
    from kvtuner.tuner.refinement_gain import RefinementGain

MAX_WIDTH: Final = 120
"""The columns that lines of text fill at most."""

READERS: Final = {
    "decode": "tokens after the prompt read quantized keys and values",
    "hit": "a chunk reads the prefix before it quantized, and itself exactly",
    "cache": "every token reads quantized keys and values",
}
"""The tokens that read quantized keys and values, by read plan."""


def search_text(data: ReportData, terminal: Terminal, *, verbose: bool = False) -> str:
    """The result of a search, in ASCII and as wide as the terminal.

    Without `verbose` the quality is that of the winner and its rivals over all positions; with it there are all
    baselines, at small and at large positions too, and what the search found on its way.
    """
    width = min(terminal.width, MAX_WIDTH)
    parts = [[*strip_lines(tracks(data.layers), terminal), *legend((data.layers,), terminal)]]
    facts = size_facts(data) + stored_facts(data) + (search_facts(data) if verbose else [])
    parts.append(facts_lines(facts, width))
    for quality in data.quality if verbose else data.quality[:1]:
        parts.append(_quality_lines(quality, data, width, verbose=verbose))
    if data.verdict is not None:
        parts.append(verdict_lines(data.verdict, width))
    return "\n\n".join("\n".join(lines) for lines in parts)


def verdict_lines(verdict: Verdict, width: int) -> list[str]:
    """The verdict in lines of a terminal."""
    return facts_lines([("verdict", " ".join(verdict.findings)), ("advice", verdict.advice)], width)


def facts_lines(facts: list[tuple[str, str]], width: int) -> list[str]:
    """Names and what they stand for, wrapped."""
    return Table.of_facts([(name, ascii_text(text)) for name, text in facts]).lines(width)


def size_facts(data: ReportData) -> list[tuple[str, str]]:
    """The budget as asked and reached."""
    budget, rank = data.budget, rank_text(data.budget.tp_size, data.budget.pp_size)
    stored, bf16 = budget.bytes_per_token, budget.bf16_bytes_per_token
    return [
        ("model", data.model),
        ("asked", budget.asked),
        ("read plan", f"{data.read_plan}: {READERS[data.read_plan]}"),
        ("reached", f"mean_bits {budget.mean_bits:.3f}, effective_bits {budget.effective_bits:.3f}"),
        ("bytes per token", f"{stored:,} (bf16 {bf16:,}){rank}"),
        ("tokens per GiB", f"{budget.tokens:,} (bf16 {budget.bf16_tokens:,}): {budget.ratio:.2f}x"),
    ]


def stored_facts(data: ReportData) -> list[tuple[str, str]]:
    """What indexes and the exact window cost, and how its length was found; only what there is."""
    budget = data.budget
    index = f"{count(budget.index_bytes)} bytes more of each token in fp8"
    rows = [("keys of indexes", index)] if budget.index_bytes else []
    rows += [("window length", data.window_length)] if data.window_length else []
    return rows + window_facts(budget.window, budget.effective_bits, budget.window_bytes)


def search_facts(data: ReportData) -> list[tuple[str, str]]:
    """The findings of the search by name; only what there is."""
    rows = [("scale and minimum", data.scale_words)] if data.scale_words else []
    rows.append(("allocated by", SCORE_TITLES[data.score]))
    if data.uniform_winner is not None:
        rows.append(("winner", f"uniform {data.uniform_winner}: better than the searched one on the report split"))
    if data.refinement is not None:
        rows.append(("refinement", refinement_text(data.refinement)))
    if (pairs := data.pair_additivity) is not None:
        spread = f"{percent(pairs.median)} in the median, {percent(pairs.maximum)} at most"
        rows.append(("K/V pairs", f"e_o differs from the sum of its sides by {spread}"))
    return rows


def refinement_text(gain: RefinementGain) -> str:
    """What refinement gained in one line, and which configuration is kept."""
    if gain.mean <= 0:
        return "no trial was below the exact solution on the select split; the exact solution is kept"
    if gain.is_clear:
        return f"{number(gain.mean)} nats per token below the exact solution on the select split"
    error = gain.standard_error
    doubt = "one sequence has no spread" if error is None else f"one standard error is {number(error)}"
    lower = f"the best trial is {number(gain.mean)} nats per token lower on the select split"
    return f"the exact solution is kept: {lower}, and {doubt}"


def _quality_lines(quality: OffsetQuality, data: ReportData, width: int, *, verbose: bool) -> list[str]:
    reference = fixed(quality.reference_perplexity, 3)
    beginning = "quality at" if quality.num_sequences is None else "quality of"
    title = f"{beginning} {quality.measured_at}, unquantized perplexity {reference}"
    rows = quality.rows() if verbose else quality.deciding_rows()
    note = (
        "* inside the budget; +t with the best transforms; vs profile: worse where the row's KL is surely above the"
        " first row's on the same text"
    )
    level = f"{100 * data.interval_level:g}%"
    table = _quality_table(rows, quality.num_sequences, level, width)
    return [*textwrap.wrap(title, width), *table.lines(), *textwrap.wrap(note, width)]


def _quality_table(rows: list[QualityRow], num_sequences: int | None, level: str, width: int) -> Table:
    """The columns that fit; those that decide least are left out first."""
    columns = {
        "": [
            ("* " if row.fits_budget else "  ") + row.name + " +t" * (row.transforms and row.is_uniform) for row in rows
        ],
        "bits": [fixed(row.mean_bits) for row in rows],
        "stored": [fixed(row.effective_bits) for row in rows],
        f"KL nats/token [{level}]": [interval(row.kl) for row in rows],
        "vs profile": [comparison(row.difference, num_sequences) for row in rows],
        "p99": [number(row.kl_p99) for row in rows],
        "top-1": [percent(row.top1) for row in rows],
        "perplexity": [fixed(row.perplexity) for row in rows],
    }
    for least in ("p99", "perplexity", "bits", "top-1"):
        if sum(2 + max(map(len, [name, *cells])) for name, cells in columns.items()) - 2 <= width:
            break
        del columns[least]
    cells = [[ascii_text(cell) for cell in row] for row in zip(*columns.values(), strict=True)]
    names = list(columns)
    return Table(names, cells, left=(0, names.index(f"KL nats/token [{level}]"), names.index("vs profile")))


def comparison(difference: Interval | None, num_sequences: int | None) -> str:
    """What a paired difference over so many sequences says of a row beside the winner; None is not known."""
    if difference is None:
        return ""
    if difference.low == difference.high == 0:
        return "the same"
    is_little = num_sequences is not None and num_sequences < LEAST_UNITS
    if is_little or not difference.excludes_zero:
        return "unclear"
    return "worse" if difference.mean > 0 else "better"
