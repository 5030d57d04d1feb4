"""The report of a search: a table for the terminal, JSON, and a page with pictures. Measures nothing."""

from __future__ import annotations

from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, Final

from kvtuner.precision import tokens_per_gib
from kvtuner.report.formatting import ascii_text, count, fixed, interval, number, percent, window_facts
from kvtuner.report.layer_strip import layer_table
from kvtuner.report.search_data import SCORE_TITLES, rank_text
from kvtuner.report.table import Table
from kvtuner.run_folder import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvtuner.evaluation.statistics import Interval
    from kvtuner.report.search_data import OffsetQuality, ReportData, SensitivityRow

TERMINAL_COLUMNS: Final = 100
_SUMMARY: Final = (
    *("model", "read_plan", "score", "interval_level", "quality", "additivity", "pair_additivity"),
    *("rank_correlations", "gain", "uniform_winner", "scale_words", "window_length"),
)


def write_search_report(data: ReportData, folder: Path) -> Path:
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

    descriptions = _descriptions(data)
    return render(
        "search.html",
        title=f"KV cache of {data.model} at {data.budget.asked}",
        data=data,
        headline=_headline(data),
        score=SCORE_TITLES[data.score],
        level=_level(data),
        pictures={name: (png, descriptions[name]) for name, png in pictures.items()},
        qualities=[(quality, _quality_table(quality, _level(data))) for quality in data.quality],
        tables=_page_tables(data),
    )


def terminal_table(data: ReportData) -> str:
    """The budget as asked and reached, and quality beside every baseline, in ASCII and at most 100 columns."""
    lines = Table.of_facts(_outcome(data)).lines()
    for quality in data.quality:
        reference = fixed(quality.reference_perplexity, 3)
        title = f"quality at {quality.offsets} positions ({quality.positions}), unquantized perplexity {reference}"
        lines += ["", title, *_terminal_quality(quality, _level(data)).lines()]
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


def _level(data: ReportData) -> str:
    return f"{100 * data.interval_level:g}%"


def _outcome(data: ReportData) -> list[tuple[str, str]]:
    budget, rank = data.budget, rank_text(data.budget.tp_size, data.budget.pp_size)
    stored, bf16 = budget.bytes_per_token, budget.bf16_bytes_per_token
    return [
        ("model", data.model),
        ("asked", f"{budget.asked}, read plan {data.read_plan}"),
        ("reached", f"mean_bits {budget.mean_bits:.3f}, effective_bits {budget.effective_bits:.3f}"),
        ("bytes per token", f"{stored:,} (bf16 {bf16:,}){rank}"),
        ("tokens per GiB", f"{tokens_per_gib(stored):,} (bf16 {tokens_per_gib(bf16):,}): {budget.ratio:.2f}x"),
        *_remarks(data),
    ]


def _remarks(data: ReportData) -> list[tuple[str, str]]:
    """The scale words, the exact window and its length, and the findings of the search, by name; only what there is."""
    budget = data.budget
    rows = [("scale words", data.scale_words)] if data.scale_words else []
    rows += [("window length", data.window_length)] if data.window_length else []
    rows += window_facts(budget.window, budget.effective_bits, budget.window_bytes)
    if data.uniform_winner is not None:
        rows.append(("winner", f"uniform {data.uniform_winner}: better than the searched one on the report split"))
    if data.gain is not None:
        rows.append(("refinement", f"{number(data.gain)} nats per token below the exact solution, select split"))
    if (pairs := data.pair_additivity) is not None:
        spread = f"{percent(pairs.median)} in the median, {percent(pairs.maximum)} at most"
        rows.append(("K/V pairs", f"e_o differs from the sum of its sides by {spread}"))
    return rows


def _headline(data: ReportData) -> str:
    """The winner's KL beside the best uniforms of its size."""
    if not data.quality or data.quality[0].winner.kl is None:
        return "The quality of this configuration was not measured."
    quality = data.quality[0]
    kl = interval(quality.winner.kl)
    text = f"KL against the unquantized cache: {kl} nats per token ({quality.offsets} position offsets)."
    for transforms, kind in ((False, "without transforms"), (True, "with the best transforms")):
        if baseline := quality.best_baseline(transforms=transforms):
            text += f" Best uniform inside the budget {kind}: {baseline.name} with {interval(baseline.kl)}."
    return text


def _page_tables(data: ReportData) -> dict[str, Table]:
    budget, rank = data.budget, rank_text(data.budget.tp_size, data.budget.pp_size)
    stored, bf16 = budget.bytes_per_token, budget.bf16_bytes_per_token
    outcome = [
        ("budget asked", budget.asked, ""),
        ("mean_bits", fixed(budget.mean_bits, 3), "16"),
        ("effective_bits", fixed(budget.effective_bits, 3), "16"),
        (f"bytes per token{rank}", count(stored), count(bf16)),
        ("tokens per GiB", count(tokens_per_gib(stored)), count(tokens_per_gib(bf16))),
        ("tokens against bf16", f"{budget.ratio:.2f}x", "1x"),
        *((name, remark, "") for name, remark in _remarks(data)),
    ]
    checks = [(row.name, number(row.predicted), number(row.measured), fixed(row.ratio)) for row in data.additivity]
    correlations = [
        (SCORE_TITLES.get(row.score, row.score), row.side.upper(), fixed(row.rho, 3)) for row in data.rank_correlations
    ]
    return {
        "outcome": Table(("", "this profile", "bf16"), outcome),
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


def _terminal_quality(quality: OffsetQuality, level: str) -> Table:
    """The page's table in 100 columns: fewer digits, and the comparison with the winner in a word."""
    rows = [
        (
            ("* " if row.fits_budget else "  ") + row.name + (" +t" if row.transforms else ""),
            *(fixed(row.mean_bits), fixed(row.effective_bits), interval(row.kl), _comparison(row.difference)),
            *(number(row.kl_p99), percent(row.top1), fixed(row.perplexity)),
        )
        for row in quality.rows()
    ]
    headers = ("", "bits", "stored", f"KL nats/token [{level}]", "vs winner", "p99", "top-1", "perplexity")
    return Table(headers, rows, left=(0, 3, 4))


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
            if ratios := [plain / best for plain, best in pairs if plain > 0 and best > 0]:
                gains.append((side.upper(), str(bits), title, f"{geometric_mean(ratios):.2f}x", str(len(ratios))))
                break
    return gains


def _descriptions(data: ReportData) -> dict[str, str]:
    """The text of each picture, for those who do not see it."""
    schemes = [row for quality in data.quality[:1] for row in (quality.winner, *quality.baselines)]
    kls = [number(row.kl.mean if row.kl else None) for row in schemes]
    bits = [f"{row.label} at {row.effective_bits:.2f} bits has {kl}" for row, kl in zip(schemes, kls, strict=True)]
    scores = [(row.best.get(data.score), row) for row in data.sensitivity if row.bits == 2]
    ranked = sorted(((score, row) for score, row in scores if score is not None), key=lambda pair: -pair[0])
    worst = [f"layer {row.layer} {row.side.upper()} {number(score)}" for score, row in ranked[:3]]
    values = [trial.value for trial in data.trials if trial.feasible and trial.value is not None]
    *narrow, widest = sorted({row.bits for row in data.sensitivity}) or [0]
    widths = f"{', '.join(map(str, narrow))} and {widest}" if narrow else str(widest)
    uniforms = [f"K{cell.k_bits}V{cell.v_bits} {number(cell.kl)}" for cell in data.uniform_kl]
    texts = {
        "chosen-bits": f"Bits of keys and values: {', '.join(f'layer {row.layer} {row.pair}' for row in data.layers)}",
        "pareto-front": f"KL against effective bits: {'; '.join(bits)}",
        "sensitivity": f"{SCORE_TITLES[data.score]} by layer, at {widths} bits. Worst at 2 bits: {', '.join(worst)}",
        "uniform-kl": f"KL of uniform pairs: {', '.join(uniforms)}",
        "history": f"Measured KL by trial: {len(data.trials)} trials, {len(values)} measured, best"
        f" {number(min(values, default=None))}",
    }
    return {name: text.rstrip() for name, text in texts.items()}
