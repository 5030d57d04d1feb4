"""The report of a search: JSON, and a page with pictures. Measures nothing."""

from __future__ import annotations

from functools import partial
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, Final

from kvtuner.exported_configs.scheme_names import FP8, REFERENCE
from kvtuner.report.formatting import count, fixed, interval, number, percent
from kvtuner.report.layer_strip import layer_table
from kvtuner.report.search_data import SCORE_TITLES, rank_text
from kvtuner.report.search_text import search_facts, stored_facts
from kvtuner.report.table import Table
from kvtuner.run_folder import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvtuner.report.plots.tokens_that_fit import FittedMemory
    from kvtuner.report.search_data import OffsetQuality, ReportData, SensitivityRow

_SUMMARY: Final = (
    *("model", "read_plan", "score", "interval_level", "quality", "additivity", "pair_additivity"),
    *("rank_correlations", "refinement", "uniform_winner", "scale_words", "window_length"),
)


def write_search_report(data: ReportData, folder: Path, fit: FittedMemory | None = None) -> Path:
    """Write the page, which needs nothing else, and beside it pictures as PNG files; returns the path of the page.

    It shows what fits as `fit` says, or the memory that follows from the search where that is None.

    Raises:
        RunFolderError: The disk is full or the folder cannot be written.
    """
    from kvtuner.report.plots.search_plots import PICTURES

    for name, draw in PICTURES.items():
        write_atomically(folder / f"{name}.png", draw(data))
    page = folder / "report.html"
    write_atomically(page, search_page(data, fit).encode(errors="replace"))
    return page


def search_page(data: ReportData, fit: FittedMemory | None = None) -> str:
    """The page, with drawings of what was measured, and of what fits."""
    from kvtuner.report.html_page import render
    from kvtuner.report.plots.bits_over_sensitivity import bits_over_sensitivity, has_gaps, least_width
    from kvtuner.report.plots.drawing import drawn
    from kvtuner.report.plots.kl_by_bits import kl_by_bits, search_points
    from kvtuner.report.plots.kl_near_winner import kl_near_winner
    from kvtuner.report.plots.score_cells import sensitivity_cells, uniform_cells
    from kvtuner.report.plots.tokens_that_fit import FittedMemory, tokens_that_fit
    from kvtuner.report.plots.trial_history import trial_history

    points, fit = search_points(data), fit or FittedMemory.of(data)
    drawings = {
        "bits": drawn(partial(bits_over_sensitivity, data)),
        "fit": drawn(partial(tokens_that_fit, fit)),
        "kl": drawn(partial(kl_near_winner, data.quality[0])) if data.quality else None,
        "front": drawn(partial(kl_by_bits, points)) if points else None,
        "sensitivity": drawn(partial(sensitivity_cells, data)) if data.sensitivity else None,
        "uniforms": drawn(partial(uniform_cells, data)) if data.uniform_kl else None,
        "history": drawn(partial(trial_history, data)) if data.trials else None,
    }
    return render(
        "search.html",
        title=f"KV cache of {data.model} at {data.budget.asked}",
        data=data,
        score=SCORE_TITLES[data.score],
        level=_level(data),
        drawings=drawings,
        least_width=least_width(data),
        has_gaps=has_gaps(data),
        has_fp8=any(row.name == FP8 for row in data.quality[0].rows()) if data.quality else False,
        fit=fit,
        qualities=[(quality, _quality_table(quality, _level(data))) for quality in data.quality],
        tables=_page_tables(data),
    )


def summary_json(data: ReportData) -> dict[str, Any]:
    """The verdict and the figures as plain JSON values, for ``--json``."""
    full = data.to_json()
    budget = {
        **full["budget"],
        "tokens_per_gib": data.budget.tokens,
        "bf16_tokens_per_gib": data.budget.bf16_tokens,
        "tokens_against_bf16": round(data.budget.ratio, 4),
    }
    summary = {name: full[name] for name in _SUMMARY}
    verdict = {"verdict": None if data.verdict is None else data.verdict.to_json()}
    return {
        **verdict,
        **summary,
        "budget": budget,
        "layers": [row.pair for row in data.layers],
        "forwards": dict(data.forwards),
    }


def _level(data: ReportData) -> str:
    return f"{100 * data.interval_level:g}%"


def _page_tables(data: ReportData) -> dict[str, Table]:
    budget, rank = data.budget, rank_text(data.budget.tp_size, data.budget.pp_size)
    stored, bf16 = budget.bytes_per_token, budget.bf16_bytes_per_token
    outcome = [
        ("budget asked", budget.asked, ""),
        ("mean_bits", fixed(budget.mean_bits, 3), "16"),
        ("effective_bits", fixed(budget.effective_bits, 3), "16"),
        (f"bytes per token{rank}", count(stored), count(bf16)),
        ("tokens per GiB", count(budget.tokens), count(budget.bf16_tokens)),
        ("tokens against bf16", f"{budget.ratio:.2f}x", "1x"),
        *((name, remark, "") for name, remark in stored_facts(data) + search_facts(data)),
    ]
    checks = [(row.name, number(row.predicted), number(row.measured), fixed(row.ratio)) for row in data.additivity]
    correlations = [
        (SCORE_TITLES.get(row.score, row.score), row.side.upper(), fixed(row.rho, 3)) for row in data.rank_correlations
    ]
    return {
        "outcome": Table(("", "this profile", REFERENCE), outcome, wrap=True),
        "layers": layer_table(data.layers, "transform of keys", "transform of values"),
        "additivity": Table(("configuration", "predicted KL", "measured KL", "measured / predicted"), checks),
        "gains": Table(("side", "bits", "score", "ratio", "layers"), _transform_gains(data.sensitivity)),
        "correlations": Table(("score", "side", "rho"), correlations),
        "forwards": Table(("forward passes", "count"), [(name, count(passes)) for name, passes in data.forwards]),
        "provenance": Table.of_facts(data.provenance),
    }


def _quality_table(quality: OffsetQuality, level: str) -> Table:
    rows = [
        (
            *(row.label, interval(row.kl), interval(row.difference), number(row.kl_p99), percent(row.top1)),
            *(fixed(row.perplexity, 3), "yes" if row.fits_budget else "no"),
            *(fixed(row.mean_bits), fixed(row.effective_bits)),
        )
        for row in quality.rows()
    ]
    headers = ("", f"KL [{level}]", f"minus winner's [{level}]", "p99", "top-1", "perplexity")
    return Table((*headers, "in budget", "mean_bits", "effective_bits"), rows, has_winner=True)


def _transform_gains(rows: Sequence[SensitivityRow]) -> list[tuple[str, ...]]:
    """The gain of each side and width by the first score that some layer has both with and without transforms."""
    gains: list[tuple[str, ...]] = []
    for side, bits in sorted({(row.side, row.bits) for row in rows}):
        cells = [row for row in rows if (row.side, row.bits) == (side, bits)]
        for score, title in SCORE_TITLES.items():
            pairs = [(row.plain.get(score) or 0.0, row.best.get(score) or 0.0) for row in cells]
            if ratios := [plain / best for plain, best in pairs if plain > 0 and best > 0]:
                gains.append((side.upper(), str(bits), title, f"{geometric_mean(ratios):.2f}x", str(len(ratios))))
                break
    return gains
