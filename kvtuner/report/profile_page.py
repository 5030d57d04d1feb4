"""Profiles as one HTML page that needs nothing else: what they store, cost and were measured to do. Knows no files."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtuner.evaluation.statistics import Interval
from kvtuner.exported_configs.profile.profile import NO_TAIL_PAGES
from kvtuner.precision import tokens_per_gib
from kvtuner.report.evaluation_page import evaluation_markup
from kvtuner.report.formatting import fixed, interval, number, percent
from kvtuner.report.layer_codes import layer_codes
from kvtuner.report.layer_picture import legend_markup, strip_markup, strip_style
from kvtuner.report.markup import Markup, element, join
from kvtuner.report.page import figure, page, section, table
from kvtuner.report.plots.quality_plot import quality_by_bits, quality_points
from kvtuner.report.profile_report import grid_text, kl_text, ratio_to_bf16

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.evaluation_record import Evaluation
    from kvtuner.exported_configs.profile.profile import Profile

STRIP: Final = (
    "Each column is a layer: its number, the bits of its keys and of its values, then how keys and values are"
    " transformed before they are rounded. Darker is wider; 16 bits are stored as they are."
)
QUALITY: Final = (
    "KL is the divergence of the next-token distribution from the unquantized model's, in nats per token: 0 is"
    " identical, less is better. Brackets hold 95% bootstrap intervals over whole sequences that took no part in the"
    " search. Baselines were measured on the same tokens."
)


@dataclass(frozen=True, slots=True)
class ShownProfile:
    """A profile and what stands beside it.

    Attributes:
        name: of its file, without folders.
        profile: what it holds.
        evaluations: of this profile.
    """

    name: str
    profile: Profile
    evaluations: tuple[Evaluation, ...] = ()


def profile_page(shown: Sequence[ShownProfile]) -> str:
    """The whole page, an article for each profile."""
    title = f"KV cache profile of {shown[0].profile.model.id}"
    articles = [element("article", *_article(each)) for each in shown]
    overview = [] if len(shown) == 1 else [_overview(shown)]
    return page(title, *overview, *articles, style=strip_style())


def byte_rows(profile: Profile) -> list[tuple[str, ...]]:
    """Bytes of a token, tokens per GiB and the gain, beside fp8 and bf16."""
    bf16 = profile.to_geometry().bf16_bytes_per_token()
    sizes = (profile.bytes_per_token(), bf16 // 2, bf16)
    rows = [
        ("bytes per token", *(f"{size:,}" for size in sizes)),
        ("tokens per GiB", *(f"{tokens_per_gib(size):,}" for size in sizes)),
        ("tokens against bf16", f"{ratio_to_bf16(profile):.2f}x", "2.00x", "1.00x"),
        ("mean_bits", fixed(float(profile.mean_bits), 3), "8", "16"),
        ("effective_bits", fixed(float(profile.effective_bits), 3), "8", "16"),
    ]
    if (ranks := profile.budget.tp_size) > 1:
        whole = profile.to_geometry().bf16_bytes_per_token(tp_size=ranks)
        ranked = (profile.bytes_per_token(ranks), whole // 2, whole)
        rows.insert(1, (f"on a rank of TP {ranks}", *(f"{size:,}" for size in ranked)))
    return rows


def identity_rows(profile: Profile) -> list[tuple[str, str]]:
    """Which model, which digest, which budget."""
    model, geometry = profile.model, profile.to_geometry()
    ranks = profile.budget
    parallel = "" if ranks.tp_size == ranks.pp_size == 1 else f", kept on TP {ranks.tp_size} x PP {ranks.pp_size}"
    return [
        ("digest", profile.digest),
        ("model", f"{model.id}{f'@{model.revision}' if model.revision else ''} ({model.architecture}, {model.dtype})"),
        ("budget asked", f"{ranks.asked}{parallel}"),
        (
            "shape",
            f"{geometry.num_layers} layers, {geometry.num_kv_heads} KV heads of {geometry.head_dim} and"
            f" {geometry.v_head_dim} channels, {geometry.num_attention_heads} query heads",
        ),
        ("keys", grid_text(profile.defaults.k)),
        ("values", grid_text(profile.defaults.v)),
    ]


def _overview(shown: Sequence[ShownProfile]) -> Markup:
    rows = [
        (
            each.name,
            each.profile.budget.asked,
            fixed(float(each.profile.mean_bits)),
            f"{each.profile.bytes_per_token():,}",
            f"{tokens_per_gib(each.profile.bytes_per_token()):,}",
            f"{ratio_to_bf16(each.profile):.2f}x",
            kl_text(each.profile.quality),
        )
        for each in shown
    ]
    headers = (
        "profile",
        "asked",
        "mean_bits",
        "bytes per token",
        "tokens per GiB",
        "against bf16",
        "KL nats per token",
    )
    return join(element("h1", f"{len(shown)} profiles"), table(headers, rows))


def _article(shown: ShownProfile) -> tuple[Markup, ...]:
    profile = shown.profile
    return (
        element("h1", f"KV cache profile of {profile.model.id}"),
        element("p", f"{shown.name}, {profile.budget.asked}", class_="soft"),
        table(("", ""), identity_rows(profile), wrap=True),
        section("Capacity", "All layers, on one rank that holds all heads.", _capacity(profile)),
        section("Layers", STRIP, *_layers(profile)),
        section("Quality", QUALITY if profile.quality else "Not measured.", *_quality(profile)),
        *_evaluations(shown),
        section("How to serve it", *_serving(shown)),
        _provenance(profile),
    )


def _capacity(profile: Profile) -> Markup:
    return table(("", "this profile", "fp8", "bf16"), byte_rows(profile))


def _layers(profile: Profile) -> tuple[Markup, ...]:
    codes = layer_codes(profile)
    rows = [(str(c.layer), f"K{c.k_bits}V{c.v_bits}", c.k_kind, c.v_kind) for c in codes]
    every_layer = table(("layer", "bits", "keys", "values"), rows)
    return (
        strip_markup(codes),
        legend_markup(codes),
        element("details", element("summary", "Every layer as a table"), every_layer),
    )


def _quality(profile: Profile) -> tuple[Markup, ...]:
    if (quality := profile.quality) is None:
        return ()
    facts = [
        ("KL, nats per token", kl_text(quality)),
        ("predicted", number(quality.predicted_kl)),
        ("p99 over tokens", number(quality.kl_p99)),
        ("top-1 as the unquantized model", percent(quality.top1_agreement)),
        ("perplexity", f"{fixed(quality.perplexity, 3)}, unquantized {fixed(quality.reference_perplexity, 3)}"),
        ("measured on", f"{quality.split_tokens:,} tokens, read plan {quality.read_plan}"),
    ]
    own = ("this profile", kl_text(quality), fixed(float(profile.mean_bits)), fixed(float(profile.effective_bits)))
    rows = [
        (b.name, interval(Interval(b.kl_mean, b.kl_low, b.kl_high)), fixed(b.mean_bits), fixed(b.effective_bits))
        for b in sorted(quality.baselines, key=lambda each: (-each.effective_bits, each.name))
    ]
    return (
        table(("", ""), facts, wrap=True),
        *quality_figure(profile),
        table(("", "KL [95%]", "mean_bits", "effective_bits"), [own, *rows], marked=0),
    )


def quality_figure(profile: Profile) -> tuple[Markup, ...]:
    """The picture of a profile beside its baselines, if there is anything to draw."""
    points = quality_points(profile, "this profile")
    if not points:
        return ()
    words = "KL by effective bits: " + "; ".join(point.words() for point in points)
    return (figure(quality_by_bits(points, {"first": "this profile"}), words),)


def _evaluations(shown: ShownProfile) -> tuple[Markup, ...]:
    if not shown.evaluations:
        return ()
    parts = [evaluation_markup(each, shown.profile) for each in shown.evaluations]
    return (section("Evaluations", "Every way was asked the same; mean and 95% interval.", *parts),)


def _serving(shown: ShownProfile) -> tuple[str, Markup]:
    profile = shown.profile
    if profile.has_per_channel_keys:
        return f"It is not served: {NO_TAIL_PAGES}.", join()
    model, revision = shlex.quote(profile.model.id), profile.model.revision
    words = ["sglang serve", "--model-path", model, *(["--revision", shlex.quote(revision)] if revision else [])]
    command = " ".join([*words, "--kvtuner-profile", shlex.quote(shown.name)])
    return (
        "With SGLang, in an environment that has kvtuner with its extra `sglang`. The server refuses to start where the"
        " profile cannot be honoured, and says bytes per token, tokens that fit and the digest when it does.",
        element("pre", command),
    )


def _provenance(profile: Profile) -> Markup:
    made = profile.provenance
    said = profile.model.model_dump(exclude={"id", "revision", "architecture", "dtype"})
    rows = [(f"{name} of the model", str(value)) for name, value in said.items() if value is not None]
    rows.append(("kvtuner", made.kvtuner_version))
    if made.command is not None:
        rows.append(("made by", made.command))
    if (record := made.calibration) is not None:
        counts, hashes = record.num_sequences, record.token_ids_sha256
        rows += [
            ("corpus", record.corpus),
            (
                "sequences",
                f"{counts.calibrate:,} to calibrate, {counts.select:,} to select, {counts.report:,} to report, of"
                f" {record.sequence_length:,} tokens",
            ),
            ("positions", f"{record.position_range[0]:,} to {record.position_range[1]:,}"),
            ("score that allocated bits", record.score),
            ("seed", str(record.seed)),
            *((f"{name} tokens", digest) for name, digest in hashes.model_dump().items()),
        ]
    if made.search is not None:
        rows.append(("refined by", f"{made.search.sampler}, {made.search.trials:,} trials, seed {made.search.seed}"))
    rows += list(made.libraries.model_dump().items())
    told = "" if made.calibration else "It was written by hand or imported: nothing says what it was chosen on."
    return section("Where it comes from", told, table(("", ""), rows, wrap=True))
