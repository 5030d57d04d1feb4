"""The report as one HTML page that needs nothing else. Knows nothing of files; pictures come as PNG bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvtuner.report import report_words as words
from kvtuner.report.findings import findings
from kvtuner.report.formatting import NOT_MEASURED, fixed, interval, number, percent
from kvtuner.report.markup import Markup, element, join
from kvtuner.report.page import absent, figure, page, section, table
from kvtuner.report.plots.grid_plots import SCORE_TITLES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.report.search_data import OffsetQuality, QualityRow, ReportData, SensitivityRow

    Pictures = Mapping[str, Markup]


def build_page(data: ReportData, pictures: Mapping[str, bytes]) -> str:
    """The whole page.

    Args:
        data: everything it shows.
        pictures: PNG bytes by the names of `kvtuner.report.plots.search_plots.PICTURES`.
    """
    descriptions = words.describe(data)
    figures = {name: figure(png, descriptions[name]) for name, png in pictures.items()}
    return page(f"KV cache of {data.model} at {data.budget.asked}", *_sections(data, figures))


def _sections(data: ReportData, figures: Pictures) -> tuple[Markup, ...]:
    return (
        _headline(data),
        _quality(data),
        _chosen(data, figures),
        _front(data, figures),
        _sensitivity(data, figures),
        section(
            "Keys against values",
            words.uniform_kl(data),
            figures["uniform-kl"] if data.uniform_kl else absent(),
        ),
        section("History of the search", words.HISTORY, figures["history"] if data.trials else absent()),
        _provenance(data),
    )


def _headline(data: ReportData) -> Markup:
    budget = data.budget
    rows = [
        ("budget asked", budget.asked, ""),
        ("mean_bits", fixed(budget.mean_bits, 3), "16"),
        ("effective_bits", fixed(budget.effective_bits, 3), "16"),
        (f"bytes per token{budget.rank}", f"{budget.bytes_per_token:,}", f"{budget.bf16_bytes_per_token:,}"),
        ("tokens per GiB", f"{budget.tokens_per_gib:,}", f"{budget.bf16_tokens_per_gib:,}"),
        ("tokens against bf16", f"{budget.ratio:.2f}x", "1x"),
        *((name, text, "") for name, text in findings(data)),
    ]
    return join(
        element("h1", f"KV cache precision of {data.model}"),
        element("p", words.verdict(data)),
        table(("", "this profile", "bf16"), rows),
        element("p", words.BITS, class_="soft"),
    )


def _quality(data: ReportData) -> Markup:
    parts = [part for quality in data.quality for part in _quality_of(quality, words.level(data))]
    return section("Quality", words.quality(data), *(parts or [absent()]))


def _quality_of(quality: OffsetQuality, level: str) -> tuple[Markup, ...]:
    headers = ("", f"KL [{level}]", f"minus winner's [{level}]", "p99", "top-1", "perplexity")
    reference = fixed(quality.reference_perplexity, 3)
    rows = [quality.winner, *quality.ranked_baselines()]
    return (
        element("h3", f"{quality.offsets.capitalize()} position offsets ({quality.positions})"),
        element("p", f"Perplexity of the unquantized model: {reference}.", class_="soft"),
        table((*headers, "in budget", "mean_bits", "effective_bits"), [_quality_cells(row) for row in rows], marked=0),
    )


def _quality_cells(row: QualityRow) -> tuple[str, ...]:
    return (
        row.label,
        interval(row.kl),
        interval(row.difference),
        number(row.kl_p99),
        percent(row.top1),
        fixed(row.perplexity, 3),
        "yes" if row.fits_budget else "no",
        fixed(row.mean_bits),
        fixed(row.effective_bits),
    )


def _chosen(data: ReportData, figures: Pictures) -> Markup:
    rows = [(str(r.layer), f"K{r.k_bits}V{r.v_bits}", r.k_transform, r.v_transform) for r in data.layers]
    every_layer = table(("layer", "bits", "transform of keys", "transform of values"), rows)
    return section(
        "Bits chosen",
        words.BITS_CHOSEN,
        figures["chosen-bits"],
        element("details", element("summary", "Every layer with its transforms"), every_layer),
    )


def _front(data: ReportData, figures: Pictures) -> Markup:
    rows = [
        (row.name, number(row.predicted), number(row.measured), _quotient(row.measured, row.predicted))
        for row in data.additivity
    ]
    return section(
        "Quality against memory",
        words.FRONT,
        figures["pareto-front"],
        element("h3", "How additive the scores are"),
        element("p", words.ADDITIVITY),
        table(("configuration", "predicted KL", "measured KL", "measured / predicted"), rows),
    )


def _sensitivity(data: ReportData, figures: Pictures) -> Markup:
    rhos = [
        (SCORE_TITLES.get(row.score, row.score), row.side.upper(), fixed(row.rho, 3)) for row in data.rank_correlations
    ]
    return section(
        "Sensitivity of the layers",
        words.sensitivity(data),
        figures["sensitivity"],
        element("h3", "What the transforms buy"),
        element("p", words.TRANSFORM_GAINS),
        table(("side", "bits", "score", "ratio", "layers"), _transform_gains(data.sensitivity)),
        element("h3", "Cheap scores against the isolated KL"),
        element("p", words.RANK_CORRELATIONS),
        table(("score", "side", "rho"), rhos),
    )


def _transform_gains(rows: Sequence[SensitivityRow]) -> list[tuple[str, ...]]:
    cells = sorted({(row.side, row.bits) for row in rows})
    return [
        gain for side, bits in cells if (gain := _transform_gain([r for r in rows if (r.side, r.bits) == (side, bits)]))
    ]


def _transform_gain(rows: Sequence[SensitivityRow]) -> tuple[str, ...] | None:
    """By the first score that some layer has both with and without transforms."""
    for score, title in SCORE_TITLES.items():
        pairs = [(row.plain.get(score) or 0.0, row.best.get(score) or 0.0) for row in rows]
        logs = [math.log(plain / best) for plain, best in pairs if plain > 0 and best > 0]
        if logs:
            ratio = math.exp(sum(logs) / len(logs))
            return rows[0].side.upper(), str(rows[0].bits), title, f"{ratio:.2f}x", str(len(logs))
    return None


def _provenance(data: ReportData) -> Markup:
    forwards = [(name, f"{count:,}") for name, count in data.forwards]
    return section(
        "Where the numbers come from",
        f"Data: {data.corpus}. Bits were allocated by {SCORE_TITLES[data.score]}. {words.NO_LATENCY}",
        table(("forward passes", "count"), forwards) if forwards else join(),
        table(("", ""), data.provenance, wrap=True) if data.provenance else join(),
    )


def _quotient(measured: float | None, predicted: float) -> str:
    return NOT_MEASURED if measured is None or predicted <= 0 else fixed(measured / predicted)
