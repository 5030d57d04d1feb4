"""The report as one HTML page that needs nothing else. Knows nothing of files; pictures come as PNG bytes."""

from __future__ import annotations

import base64
import math
import struct
from typing import TYPE_CHECKING, Final

from kvtuner.evaluation import report_words as words
from kvtuner.evaluation.findings import findings
from kvtuner.evaluation.formatting import NOT_MEASURED, fixed, interval, number, percent
from kvtuner.evaluation.grid_plots import SCORE_TITLES
from kvtuner.evaluation.markup import Markup, element, join
from kvtuner.evaluation.report_style import PAGE_STYLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtuner.evaluation.report_data import OffsetQuality, QualityRow, ReportData, SensitivityRow

    Pictures = Mapping[str, Markup]

# No script, font or picture from anywhere: a browser refuses even what an escaping fault would let through.
_POLICY: Final = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_CSS_PIXELS_PER_PIXEL: Final = 0.625  # pictures have 160 dots per inch; 100 CSS pixels are an inch here


def build_page(data: ReportData, pictures: Mapping[str, bytes]) -> str:
    """The whole page.

    Args:
        data: everything it shows.
        pictures: PNG bytes by the names of `kvtuner.evaluation.plots.PICTURES`.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", f"KV cache of {data.model} at {data.budget.asked}"),
        element("style", PAGE_STYLE),
    )
    descriptions = words.describe(data)
    figures = {name: _figure(png, descriptions[name]) for name, png in pictures.items()}
    body = element("body", *_sections(data, figures))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _sections(data: ReportData, figures: Pictures) -> tuple[Markup, ...]:
    return (
        _headline(data),
        _quality(data),
        _chosen(data, figures),
        _front(data, figures),
        _sensitivity(data, figures),
        _section(
            "Keys against values",
            words.uniform_kl(data),
            figures["uniform-kl"] if data.uniform_kl else _absent(),
        ),
        _section("History of the search", words.HISTORY, figures["history"] if data.trials else _absent()),
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
        _table(("", "this profile", "bf16"), rows),
        element("p", words.BITS, class_="soft"),
    )


def _quality(data: ReportData) -> Markup:
    parts = [part for quality in data.quality for part in _quality_of(quality, words.level(data))]
    return _section("Quality", words.quality(data), *(parts or [_absent()]))


def _quality_of(quality: OffsetQuality, level: str) -> tuple[Markup, ...]:
    headers = ("", f"KL [{level}]", f"minus winner's [{level}]", "p99", "top-1", "perplexity")
    reference = fixed(quality.reference_perplexity, 3)
    rows = [quality.winner, *quality.ranked_baselines()]
    return (
        element("h3", f"{quality.offsets.capitalize()} position offsets ({quality.positions})"),
        element("p", f"Perplexity of the unquantized model: {reference}.", class_="soft"),
        _table((*headers, "in budget", "mean_bits", "effective_bits"), [_quality_cells(row) for row in rows], marked=0),
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
    table = _table(("layer", "bits", "transform of keys", "transform of values"), rows)
    return _section(
        "Bits chosen",
        words.BITS_CHOSEN,
        figures["chosen-bits"],
        element("details", element("summary", "Every layer with its transforms"), table),
    )


def _front(data: ReportData, figures: Pictures) -> Markup:
    rows = [
        (row.name, number(row.predicted), number(row.measured), _quotient(row.measured, row.predicted))
        for row in data.additivity
    ]
    return _section(
        "Quality against memory",
        words.FRONT,
        figures["pareto-front"],
        element("h3", "How additive the scores are"),
        element("p", words.ADDITIVITY),
        _table(("configuration", "predicted KL", "measured KL", "measured / predicted"), rows),
    )


def _sensitivity(data: ReportData, figures: Pictures) -> Markup:
    rhos = [
        (SCORE_TITLES.get(row.score, row.score), row.side.upper(), fixed(row.rho, 3)) for row in data.rank_correlations
    ]
    return _section(
        "Sensitivity of the layers",
        words.sensitivity(data),
        figures["sensitivity"],
        element("h3", "What the transforms buy"),
        element("p", words.TRANSFORM_GAINS),
        _table(("side", "bits", "score", "ratio", "layers"), _transform_gains(data.sensitivity)),
        element("h3", "Cheap scores against the isolated KL"),
        element("p", words.RANK_CORRELATIONS),
        _table(("score", "side", "rho"), rhos),
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
    return _section(
        "Where the numbers come from",
        f"Data: {data.corpus}. Bits were allocated by {SCORE_TITLES[data.score]}. {words.NO_LATENCY}",
        _table(("forward passes", "count"), forwards) if forwards else join(),
        _table(("", ""), data.provenance, wrap=True) if data.provenance else join(),
    )


def _quotient(measured: float | None, predicted: float) -> str:
    return NOT_MEASURED if measured is None or predicted <= 0 else fixed(measured / predicted)


def _section(title: str, explanation: str, *parts: Markup) -> Markup:
    return element("section", element("h2", title), element("p", explanation), *parts)


def _absent() -> Markup:
    return element("p", "Not measured in this run.", class_="soft")


def _table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, marked: int | None = None, wrap: bool = False
) -> Markup:
    wrapping = {"class_": "wrap"} if wrap else {}
    body = [
        element("tr", *(element("td", cell, **wrapping) for cell in row), **_marking(index == marked))
        for index, row in enumerate(rows)
    ]
    if not body:
        return _absent()
    head = element("tr", *(element("th", text) for text in headers)) if any(headers) else join()
    return element("div", element("table", head, *body), class_="scroll")


def _marking(is_marked: bool) -> dict[str, str]:
    return {"class_": "winner"} if is_marked else {}


def _figure(png: bytes, description: str) -> Markup:
    width, height = (str(round(side * _CSS_PIXELS_PER_PIXEL)) for side in struct.unpack(">II", png[16:24]))
    source = "data:image/png;base64," + base64.b64encode(png).decode()
    return element("figure", element("img", src=source, alt=description, width=width, height=height))
