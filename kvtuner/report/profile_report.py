"""A profile as text for a terminal, as facts for a program, and as a page. Knows nothing of files."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtuner.evaluation.statistics import Interval
from kvtuner.exported_configs.profile.profile import NO_TAIL_PAGES
from kvtuner.precision import tokens_per_gib
from kvtuner.report.evaluation_report import evaluation_context
from kvtuner.report.formatting import NOT_MEASURED, fixed, interval, model_name, number, percent, printable
from kvtuner.report.layer_strip import layer_codes, page_strip
from kvtuner.report.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.evaluation_record import Evaluation
    from kvtuner.exported_configs.profile.evidence import QualityRecord
    from kvtuner.exported_configs.profile.layer_storage import KeyDefaults, ValueDefaults
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.report.html_page import Picture


@dataclass(frozen=True, slots=True)
class ShownProfile:
    """A profile and what stands beside it on a page.

    Attributes:
        name: The name of its file, without folders.
        profile: The profile.
        evaluations: The evaluations of this profile.
    """

    name: str
    profile: Profile
    evaluations: tuple[Evaluation, ...] = ()


def summary(profile: Profile) -> dict[str, Any]:
    """The facts that a program reads."""
    stored = profile.bytes_per_token()
    return {
        "digest": profile.digest,
        "model": profile.model.id,
        "asked": profile.budget.asked,
        "mean_bits": float(profile.mean_bits),
        "effective_bits": round(float(profile.effective_bits), 6),
        "bytes_per_token": stored,
        "k_granularity": profile.defaults.k.granularity,
        "bf16_bytes_per_token": profile.to_geometry().bf16_bytes_per_token(),
        "tokens_per_gib": tokens_per_gib(stored),
        "layers": [
            {
                "layer": layer,
                "k_bits": pair.k_bits,
                "v_bits": pair.v_bits,
                "k_transform": profile.transform_name(layer, "k"),
                "v_transform": profile.transform_name(layer, "v"),
            }
            for layer, pair in enumerate(profile.pairs)
        ],
        "quality": None if profile.quality is None else profile.quality.model_dump(mode="json"),
    }


def describe(profile: Profile) -> str:
    """Some lines about a profile; its layers are shown by the strip."""
    facts = summary(profile)
    lines = [
        f"model     {printable(profile.model.id)} ({printable(profile.model.architecture)})",
        f"digest    {profile.digest}",
        f"budget    {printable(profile.budget.asked)}: {facts['mean_bits']:.4g} mean bits,"
        f" {facts['effective_bits']:.4g} effective, {facts['bytes_per_token']:,} bytes per token",
        f"capacity  {facts['tokens_per_gib']:,} tokens per GiB, {ratio_to_bf16(profile):.2f}x of bf16",
        f"keys      {grid_text(profile.defaults.k)}",
        f"values    {grid_text(profile.defaults.v)}",
    ]
    if (quality := profile.quality) is not None:
        lines.append(
            f"quality   KL {kl_text(quality)} nats per token, top-1 {quality.top1_agreement:.2%},"
            f" perplexity {quality.perplexity:.4g} (bf16 {quality.reference_perplexity:.4g})"
        )
    return "\n".join(lines)


def profile_page(profiles: Sequence[ShownProfile]) -> str:
    """The page of one or several profiles, with an article for each."""
    from kvtuner.report.html_page import render  # brings matplotlib, which not every look needs

    return render(
        "profile.html",
        title=f"KV cache profile of {profiles[0].profile.model.id}",
        overview=_overview(profiles) if len(profiles) > 1 else None,
        articles=[_article(shown) for shown in profiles],
        no_tail_pages=NO_TAIL_PAGES,
    )


def strip_html(profile: Profile) -> str:
    """The strip of layers with its legend and its style, as a notebook shows it."""
    from kvtuner.report.html_page import render

    codes = layer_codes(profile)
    return render("strip.html", strip=page_strip(codes), codes=codes)


def ratio_to_bf16(profile: Profile) -> float:
    """How many times more tokens fit than in bf16."""
    return profile.to_geometry().bf16_bytes_per_token() / profile.bytes_per_token()


def measured_kl(quality: QualityRecord) -> Interval:
    """The mean KL and its interval, nats per token."""
    kl = quality.measured_kl
    return Interval(kl.mean, kl.low, kl.high)


def kl_text(quality: QualityRecord | None) -> str:
    """The measured KL as text."""
    return NOT_MEASURED if quality is None else interval(measured_kl(quality))


def grid_text(defaults: KeyDefaults | ValueDefaults) -> str:
    """How quantized keys or values share scales."""
    unit = "tokens per scale of a channel" if defaults.granularity == "per_channel" else "channels per scale"
    text = f"{defaults.granularity.replace('_', ' ')}, {defaults.group_size} {unit}"
    return text + ", symmetric" * defaults.symmetric


def size_rows(profile: Profile) -> list[tuple[str, str]]:
    """What the cache of one token takes, and how many tokens fit."""
    size = profile.bytes_per_token()
    return [
        ("bytes per token", f"{size:,}"),
        ("tokens per GiB", f"{tokens_per_gib(size):,}"),
        ("tokens against bf16", f"{ratio_to_bf16(profile):.2f}x"),
        ("mean_bits", fixed(float(profile.mean_bits), 3)),
        ("effective_bits", fixed(float(profile.effective_bits), 3)),
    ]


def _overview(profiles: Sequence[ShownProfile]) -> Table:
    headers = ("profile", "asked", "mean_bits", "bytes per token", "tokens per GiB", "against bf16")
    rows = []
    for shown in profiles:
        profile = shown.profile
        (_, size), (_, tokens), (_, ratio), *_ = size_rows(profile)
        bits = fixed(float(profile.mean_bits))
        rows.append((shown.name, profile.budget.asked, bits, size, tokens, ratio, kl_text(profile.quality)))
    return Table((*headers, "KL nats per token"), rows)


def _article(shown: ShownProfile) -> dict[str, Any]:
    """What ``templates/profile.html`` shows of one profile."""
    profile, codes = shown.profile, layer_codes(shown.profile)
    layers = [(str(code.layer), f"K{code.k_bits}V{code.v_bits}", code.k_kind, code.v_kind) for code in codes]
    return {
        "name": shown.name,
        "profile": profile,
        "identity": Table(("", ""), _identity(profile), wrap=True),
        "capacity": Table(("", "this profile", "fp8", "bf16"), _capacity(profile)),
        "strip": page_strip(codes),
        "codes": codes,
        "layers": Table(("layer", "bits", "keys", "values"), layers),
        **({} if profile.quality is None else _quality(profile, profile.quality)),
        "evaluations": [evaluation_context(evaluation, profile) for evaluation in shown.evaluations],
        "command": _serve_command(shown),
        "provenance": Table(("", ""), _provenance(profile), wrap=True),
    }


def _identity(profile: Profile) -> list[tuple[str, str]]:
    model, geometry, ranks = profile.model, profile.to_geometry(), profile.budget
    parallel = "" if ranks.tp_size == ranks.pp_size == 1 else f", kept on TP {ranks.tp_size} x PP {ranks.pp_size}"
    return [
        ("digest", profile.digest),
        ("model", f"{model_name(model)} ({model.architecture}, {model.dtype})"),
        ("budget asked", f"{ranks.asked}{parallel}"),
        (
            "shape",
            f"{geometry.num_layers} layers, {geometry.num_kv_heads} KV heads of {geometry.head_dim} and"
            f" {geometry.v_head_dim} channels, {geometry.num_attention_heads} query heads",
        ),
        ("keys", grid_text(profile.defaults.k)),
        ("values", grid_text(profile.defaults.v)),
    ]


def _capacity(profile: Profile) -> list[tuple[str, ...]]:
    """The sizes beside fp8's and bf16's."""
    bf16, ranks = profile.to_geometry().bf16_bytes_per_token(), profile.budget.tp_size
    others = [
        (f"{bf16 // 2:,}", f"{bf16:,}"),
        (f"{tokens_per_gib(bf16 // 2):,}", f"{tokens_per_gib(bf16):,}"),
        ("2.00x", "1.00x"),
        ("8", "16"),
        ("8", "16"),
    ]
    rows: list[tuple[str, ...]] = [(*row, *other) for row, other in zip(size_rows(profile), others, strict=True)]
    if ranks > 1:
        whole = profile.to_geometry().bf16_bytes_per_token(tp_size=ranks)
        sizes = (profile.bytes_per_token(ranks), whole // 2, whole)
        rows.insert(1, (f"on a rank of TP {ranks}", *(f"{size:,}" for size in sizes)))
    return rows


def _quality(profile: Profile, quality: QualityRecord) -> dict[str, Any]:
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
        for b in sorted(quality.baselines, key=lambda baseline: (-baseline.effective_bits, baseline.name))
    ]
    return {
        "quality": Table(("", ""), facts, wrap=True),
        "picture": _picture(profile),
        "baselines": Table(("", "KL [95%]", "mean_bits", "effective_bits"), [own, *rows], marked=0),
    }


def _picture(profile: Profile) -> Picture | None:
    from kvtuner.report.plots.quality_plot import quality_picture, quality_points

    points = quality_points(profile, "this profile")
    return quality_picture(points, {"first": "this profile"}) if points else None


def _serve_command(shown: ShownProfile) -> str:
    model = shown.profile.model
    revision = ["--revision", model.revision] if model.revision else []
    return shlex.join(["sglang", "serve", "--model-path", model.id, *revision, "--kvtuner-profile", shown.name])


def _provenance(profile: Profile) -> list[tuple[str, str]]:
    made, rows = profile.provenance, []
    hashes = profile.model.model_dump(exclude={"id", "revision", "architecture", "dtype"}, exclude_none=True)
    rows += [(f"{name} of the model", str(value)) for name, value in hashes.items()]
    rows.append(("kvtuner", made.kvtuner_version))
    if made.command is not None:
        rows.append(("made by", made.command))
    if (record := made.calibration) is not None:
        counts = record.num_sequences
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
            *((f"{name} tokens", digest) for name, digest in record.token_ids_sha256.model_dump().items()),
        ]
    if made.search is not None:
        rows.append(("refined by", f"{made.search.sampler}, {made.search.trials:,} trials, seed {made.search.seed}"))
    return rows + list(made.libraries.model_dump().items())
