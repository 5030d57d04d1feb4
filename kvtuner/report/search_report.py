"""The report of a search: a table for the terminal, JSON, and a page with pictures. Measures nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from kvtuner.precision import tokens_per_gib
from kvtuner.report.formatting import Table, ascii_text, fixed, interval, number, percent
from kvtuner.report.search_data import SCORE_TITLES
from kvtuner.run_folder import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvtuner.evaluation.statistics import Interval
    from kvtuner.report.search_data import OffsetQuality, QualityRow, ReportData, SensitivityRow

TERMINAL_COLUMNS: Final = 100
_SUMMARY: Final = (
    *("model", "read_plan", "score", "interval_level", "quality", "additivity", "pair_additivity"),
    *("rank_correlations", "gain", "uniform_winner"),
)


def write_report(data: ReportData, folder: Path) -> Path:
    """Write the page and, beside it, its pictures as PNG files; returns the path of the page, which needs no other.

    Raises:
        RunFolderError: The disk is full or the folder cannot be written.
    """
    from kvtuner.report.plots.search_plots import PICTURES

    pictures = {name: draw(data) for name, draw in PICTURES.items()}
    for name, png in pictures.items():
        write_atomically(folder / f"{name}.png", png)
    page = folder / "report.html"
    write_atomically(page, search_page(data, pictures).encode(errors="replace"))
    return page


def search_page(data: ReportData, pictures: Mapping[str, bytes]) -> str:
    """The page, with PNG bytes by the names of `kvtuner.report.plots.search_plots.PICTURES`."""
    from kvtuner.report.html_page import render

    return render(
        "search.html",
        title=f"KV cache of {data.model} at {data.budget.asked}",
        data=data,
        score_titles=SCORE_TITLES,
        level=f"{100 * data.interval_level:g}%",
        remarks=_remarks(data),
        pictures=pictures,
        transform_gains=_transform_gains(data.sensitivity),
    )


def terminal_table(data: ReportData) -> str:
    """The budget as asked and reached, and quality beside every baseline, in ASCII and at most 100 columns."""
    lines = _outcome_lines(data)
    for quality in data.quality:
        lines += ["", *_quality_lines(quality, data.interval_level)]
    if data.quality:
        lines += ["", "* inside the budget; +t best transforms; vs winner: KL by the paired interval"]
    return "\n".join(ascii_text(line)[:TERMINAL_COLUMNS].rstrip() for line in lines)


def summary_json(data: ReportData) -> dict[str, Any]:
    """The figures of the terminal table as plain JSON values, for ``--json``."""
    full = data.to_json()
    budget = {
        **full["budget"],
        "tokens_per_gib": tokens_per_gib(data.budget.bytes_per_token),
        "bf16_tokens_per_gib": tokens_per_gib(data.budget.bf16_bytes_per_token),
        "tokens_against_bf16": round(data.budget.ratio, 4),
    }
    summary = {name: full[name] for name in _SUMMARY}
    return {**summary, "budget": budget, "layers": [row.pair for row in data.layers], "forwards": dict(data.forwards)}


def _outcome_lines(data: ReportData) -> list[str]:
    budget = data.budget
    stored, bf16 = budget.bytes_per_token, budget.bf16_bytes_per_token
    rows = [
        ("model", data.model),
        ("asked", f"{budget.asked}, read plan {data.read_plan}"),
        ("reached", f"mean_bits {budget.mean_bits:.3f}, effective_bits {budget.effective_bits:.3f}"),
        ("bytes per token", f"{stored:,} (bf16 {bf16:,}){budget.rank}"),
        ("tokens per GiB", f"{tokens_per_gib(stored):,} (bf16 {tokens_per_gib(bf16):,}): {budget.ratio:.2f}x"),
        *_remarks(data),
    ]
    return [f"{name:<17}{value}" for name, value in rows]


def _remarks(data: ReportData) -> list[tuple[str, str]]:
    """The findings of the search besides its configuration, by name; only those that there are."""
    rows = []
    if data.uniform_winner is not None:
        rows.append(("winner", f"uniform {data.uniform_winner}: better than the searched one on the report split"))
    if data.gain is not None:
        rows.append(("refinement", f"{number(data.gain)} nats per token below the exact solution, select split"))
    if (pairs := data.pair_additivity) is not None:
        spread = f"{percent(pairs.median)} in the median, {percent(pairs.maximum)} at most"
        rows.append(("K/V pairs", f"e_o differs from the sum of its sides by {spread}"))
    return rows


def _quality_lines(quality: OffsetQuality, level: float) -> list[str]:
    reference = fixed(quality.reference_perplexity, 3)
    title = f"quality at {quality.offsets} positions ({quality.positions}), unquantized perplexity {reference}"
    kl = f"KL nats/token [{100 * level:g}%]"
    headers = ("", "bits", "stored", kl, "vs winner", "p99", "top-1", "perplexity")
    return [title, *Table(headers, [_terminal_cells(row) for row in quality.rows()], left=(0, 3, 4)).lines()]


def _terminal_cells(row: QualityRow) -> tuple[str, ...]:
    return (
        ("* " if row.fits_budget else "  ") + row.name + (" +t" if row.transforms else ""),
        fixed(row.mean_bits),
        fixed(row.effective_bits),
        interval(row.kl),
        _comparison(row.difference),
        number(row.kl_p99),
        percent(row.top1),
        fixed(row.perplexity),
    )


def _comparison(difference: Interval | None) -> str:
    if difference is None:
        return ""
    if not difference.excludes_zero:
        return "unclear"
    return "worse" if difference.mean > 0 else "better"


def _transform_gains(rows: Sequence[SensitivityRow]) -> list[tuple[str, ...]]:
    """The gain of each side and width by the first score that some layer has both with and without transforms."""
    gains: list[tuple[str, ...]] = []
    for side, bits in sorted({(row.side, row.bits) for row in rows}):
        cells = [row for row in rows if (row.side, row.bits) == (side, bits)]
        for score, title in SCORE_TITLES.items():
            pairs = [(row.plain.get(score) or 0.0, row.best.get(score) or 0.0) for row in cells]
            logs = [math.log(plain / best) for plain, best in pairs if plain > 0 and best > 0]
            if logs:
                ratio = math.exp(sum(logs) / len(logs))
                gains.append((side.upper(), str(bits), title, f"{ratio:.2f}x", str(len(logs))))
                break
    return gains
