"""Writes what a search found: HTML with pictures, a table for the terminal, JSON. Measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtuner.report.findings import findings
from kvtuner.report.formatting import fixed, interval, number, percent
from kvtuner.run_folder import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvtuner.evaluation.statistics import Interval
    from kvtuner.report.search_data import OffsetQuality, QualityRow, ReportData

TERMINAL_COLUMNS: Final = 100


def write_report(data: ReportData, folder: Path) -> Path:
    """Write the page and, beside it, its pictures as PNG files.

    Args:
        data: everything it shows.
        folder: made if absent.

    Returns:
        Path of the HTML file, which needs none of the others.

    Raises:
        RunFolderError: the disk is full or the folder cannot be written.
    """
    from kvtuner.report.plots.search_plots import PICTURES
    from kvtuner.report.report_page import build_page

    pictures = {name: draw(data) for name, draw in PICTURES.items()}
    for name, png in pictures.items():
        write_atomically(folder / f"{name}.png", png)
    page = folder / "report.html"
    write_atomically(page, build_page(data, pictures).encode(errors="replace"))
    return page


def terminal_table(data: ReportData) -> str:
    """Asked, reached and quality beside every baseline, in ASCII and at most 100 columns."""
    lines = _outcome_lines(data)
    for quality in data.quality:
        lines += ["", *_quality_lines(quality, data.interval_level)]
    if data.quality:
        lines += ["", "* inside the budget; +t best transforms; vs winner: KL by the paired interval"]
    return "\n".join(_printable(line)[:TERMINAL_COLUMNS].rstrip() for line in lines)


def summary_json(data: ReportData) -> dict[str, Any]:
    """The same as plain JSON values, for ``--json``."""
    full = data.to_json()
    kept = (
        *("model", "read_plan", "score", "interval_level", "quality", "additivity", "pair_additivity"),
        *("rank_correlations", "gain", "uniform_winner"),
    )
    budget = {
        **full["budget"],
        "tokens_per_gib": data.budget.tokens_per_gib,
        "bf16_tokens_per_gib": data.budget.bf16_tokens_per_gib,
        "tokens_against_bf16": round(data.budget.ratio, 4),
    }
    layers = [f"K{row.k_bits}V{row.v_bits}" for row in data.layers]
    summary = {name: full[name] for name in kept}
    return {**summary, "budget": budget, "layers": layers, "forwards": dict(data.forwards)}


def _outcome_lines(data: ReportData) -> list[str]:
    budget = data.budget
    tokens = f"{budget.tokens_per_gib:,} (bf16 {budget.bf16_tokens_per_gib:,}): {budget.ratio:.2f}x"
    rows = [
        ("model", data.model),
        ("asked", f"{budget.asked}, read plan {data.read_plan}"),
        ("reached", f"mean_bits {budget.mean_bits:.3f}, effective_bits {budget.effective_bits:.3f}"),
        (
            "bytes per token",
            f"{budget.bytes_per_token:,} (bf16 {budget.bf16_bytes_per_token:,}){budget.rank}",
        ),
        ("tokens per GiB", tokens),
        *findings(data),
    ]
    return [f"{name:<17}{value}" for name, value in rows]


def _quality_lines(quality: OffsetQuality, level: float) -> list[str]:
    reference = fixed(quality.reference_perplexity, 3)
    title = f"quality at {quality.offsets} positions ({quality.positions}), unquantized perplexity {reference}"
    kl = f"KL nats/token [{100 * level:g}%]"
    header = ("", "bits", "stored", kl, "vs winner", "p99", "top-1", "perplexity")
    rows = [_cells(row) for row in (quality.winner, *quality.ranked_baselines())]
    return [title, *_aligned([header, *rows])]


def _cells(row: QualityRow) -> tuple[str, ...]:
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


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of even width: words to the left, numbers to the right."""
    words = (0, 3, 4)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _printable(text: str) -> str:
    """ASCII without control characters: a model's name must not steer the terminal."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text)
