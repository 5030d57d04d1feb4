"""Two profiles side by side as one HTML page that needs nothing else. Knows nothing of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtuner.precision import tokens_per_gib
from kvtuner.report.formatting import NOT_MEASURED, fixed, percent
from kvtuner.report.layer_codes import layer_codes
from kvtuner.report.layer_picture import legend_markup, strip_markup, strip_style
from kvtuner.report.markup import Markup, element, join
from kvtuner.report.page import figure, page, section, table
from kvtuner.report.plots.quality_plot import quality_by_bits, quality_points
from kvtuner.report.profile_difference import CONSTANTS
from kvtuner.report.profile_report import kl_text, ratio_to_bf16

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.evidence import QualityRecord
    from kvtuner.report.plots.quality_plot import QualityPoint
    from kvtuner.report.profile_difference import ProfileDifference

STRIP: Final = (
    "Each column is a layer: its number, then bits and transforms of the first profile, then of the second. A ^ stands"
    " below layers whose bits, transform or granularity changed, a ~ below those with other constants only."
)
APART: Final = "The models have not the same number of layers, so that no layer stands beside another."


def difference_page(difference: ProfileDifference, names: tuple[str, str]) -> str:
    """The whole page.

    Args:
        difference: what it shows.
        names: of the files, without folders.
    """
    quality = difference.quality
    return page(
        f"{names[0]} beside {names[1]}",
        element("h1", f"{names[0]} beside {names[1]}"),
        element("p", verdict(difference)),
        table(("", "first", "second"), _identity(difference, names), wrap=True),
        section(
            "Bytes", "All layers, on one rank that holds all heads.", table(("", "first", "second"), _bytes(difference))
        ),
        section("Layers", STRIP if difference.layers is not None else APART, *_layers(difference)),
        section("Quality", f"KL from the unquantized model, nats per token: {quality.words()}.", *_quality(difference)),
        style=strip_style(),
    )


def verdict(difference: ProfileDifference) -> str:
    """What changed, in one sentence."""
    if difference.first.digest == difference.second.digest:
        return "They store every layer alike: the digest is the same."
    parts = []
    if difference.geometry:
        parts.append("they are of models of other shapes")
    if difference.layers is not None:
        count = len(difference.layers)
        only = sum(change.what == CONSTANTS for change in difference.layers)
        parts.append(
            f"{count} of {len(difference.first.pairs)} layers changed" + (f", {only} in constants only" * bool(only))
        )
    if difference.defaults:
        parts.append(f"all quantized layers have another {', '.join(difference.defaults)}")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _identity(difference: ProfileDifference, names: tuple[str, str]) -> list[tuple[str, ...]]:
    both = (difference.first, difference.second)
    return [
        ("file", *names),
        ("digest", *(p.digest for p in both)),
        ("model", *(p.model.id for p in both)),
        ("budget asked", *(p.budget.asked for p in both)),
        *((name, str(a), str(b)) for name, (a, b) in (difference.geometry | difference.defaults).items()),
    ]


def _bytes(difference: ProfileDifference) -> list[tuple[str, ...]]:
    both = (difference.first, difference.second)
    return [
        ("bytes per token", *(f"{p.bytes_per_token():,}" for p in both)),
        ("tokens per GiB", *(f"{tokens_per_gib(p.bytes_per_token()):,}" for p in both)),
        ("tokens against bf16", *(f"{ratio_to_bf16(p):.2f}x" for p in both)),
        ("bytes against the first", "1x", f"{both[1].bytes_per_token() / both[0].bytes_per_token():.3f}x"),
        ("mean_bits", *(fixed(float(p.mean_bits), 3) for p in both)),
        ("effective_bits", *(fixed(float(p.effective_bits), 3) for p in both)),
    ]


def _layers(difference: ProfileDifference) -> tuple[Markup, ...]:
    first, second = layer_codes(difference.first), layer_codes(difference.second)
    legend = legend_markup((*first, *second))
    if difference.layers is None:
        return strip_markup(first), strip_markup(second), legend
    changed = {change.layer: " and ".join(change.what) for change in difference.layers}
    rows = [(str(c.layer), str(c.first), str(c.second), ", ".join(c.what)) for c in difference.layers]
    listed = table(("layer", "first", "second", "changed"), rows) if rows else join()
    return strip_markup(first, second, changed=changed), legend, listed


def _quality(difference: ProfileDifference) -> tuple[Markup, ...]:
    columns = [_quality_column(each) for each in (difference.quality.first, difference.quality.second)]
    names = ("KL [95%]", "top-1 as the unquantized model", "perplexity", "unquantized", "read plan")
    return table(("", "first", "second"), list(zip(names, *columns, strict=True))), *_figures(difference)


def _quality_column(quality: QualityRecord | None) -> tuple[str, ...]:
    if quality is None:
        return (NOT_MEASURED,) * 5
    return (
        kl_text(quality),
        percent(quality.top1_agreement),
        fixed(quality.perplexity, 3),
        fixed(quality.reference_perplexity, 3),
        quality.read_plan,
    )


def _figures(difference: ProfileDifference) -> list[Markup]:
    """One picture of what was measured alike, else one for each."""
    first = quality_points(difference.first, "first")
    second = quality_points(difference.second, "second", "second")
    if difference.quality.is_comparable:
        known = set(first)
        groups = [[*first, *(point for point in second if point not in known)]]
    else:
        groups = [first, second]
    return [_figure(points) for points in groups if points]


def _figure(points: Sequence[QualityPoint]) -> Markup:
    words = "KL by effective bits: " + "; ".join(point.words() for point in points)
    return figure(quality_by_bits(points, {"first": "first profile", "second": "second profile"}), words)
