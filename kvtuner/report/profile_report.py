"""A profile as text for a terminal, as facts for a program, and as a page. Knows nothing of files."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from kvtuner.evaluation.statistics import Interval
from kvtuner.exported_configs.scheme_names import FP8, REFERENCE
from kvtuner.exported_configs.sharing.serve_command import MODEL_FOLDER, asks_for_folder, page_flags, serve_command
from kvtuner.exported_configs.verdict import verdict_of
from kvtuner.layer_ranges import write_layers
from kvtuner.precision import SHORT_WORD_BITS, tokens_per_gib
from kvtuner.report.evaluation_report import evaluation_part
from kvtuner.report.formatting import (
    count,
    fixed,
    interval,
    model_name,
    number,
    percent,
    printable,
    window_facts,
)
from kvtuner.report.layer_strip import layer_table, profile_layers
from kvtuner.report.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.evaluation_record import EvaluatedProfile
    from kvtuner.exported_configs.profile.layer_storage import KeyDefaults, ValueDefaults
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.profile.records import QualityRecord
    from kvtuner.layer_geometry import LayerGeometry


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
        "residual_length": profile.window.residual_length,
        "sinks": profile.window.sinks,
        "window_bytes_per_request": profile.window_bytes(),
        "constants_sha256": profile.constants_sha256,
        "k_granularity": profile.defaults.k.granularity,
        "bf16_bytes_per_token": profile.bf16_bytes_per_token(),
        "index_bytes_per_token": profile.index_bytes,
        "tokens_per_gib": tokens_per_gib(stored + profile.index_bytes),
        "layers": [
            asdict(row) | {"k_transform": profile.transform_name(row.layer, "k")} for row in profile_layers(profile)
        ],
        "quality": None if profile.quality is None else profile.quality.model_dump(mode="json"),
        "verdict": None if (verdict := verdict_of(profile)) is None else verdict.to_json(),
    }


def describe(profile: Profile, width: int | None = None) -> str:
    """Some lines about a profile, of a terminal's width if one is given; its layers are shown by the strip."""
    stored = profile.bytes_per_token()
    bits = f"{float(profile.mean_bits):.4g} mean bits, {float(profile.effective_bits):.4g} effective"
    facts = [
        ("model", f"{printable(profile.model.id)} ({printable(profile.model.architecture)})"),
        ("digest", profile.digest),
        ("budget", f"{printable(profile.budget.asked)}: {bits}, {stored:,} bytes per token"),
        (
            "capacity",
            f"{tokens_per_gib(stored + profile.index_bytes):,} tokens per GiB, {ratio_to_bf16(profile):.2f}x of bf16",
        ),
        ("keys", _grid_text(profile.defaults.k)),
        ("values", _grid_text(profile.defaults.v)),
        *geometry_facts(profile),
        *_side_file_facts(profile),
        *_window_facts(profile),
    ]
    if (quality := profile.quality) is not None:
        perplexity = f"perplexity {quality.perplexity:.4g} (bf16 {quality.reference_perplexity:.4g})"
        kl = f"KL {interval(quality.measured_kl)} nats per token"
        facts.append(("quality", f"{kl}, top-1 {quality.top1_agreement:.2%}, {perplexity}"))
    return "\n".join(Table.of_facts(facts).lines(width))


def profile_page(profiles: Sequence[EvaluatedProfile]) -> str:
    """The page of one or several profiles, with an article for each."""
    from kvtuner.report.html_page import render  # brings matplotlib, which not every look needs

    return render(
        "profile.html",
        title=f"KV cache profile of {profiles[0].profile.model.id}",
        overview=_overview(profiles),
        articles=[_article(shown) for shown in profiles],
    )


def strip_html(profile: Profile) -> str:
    """The strip of layers with its legend and its style, as a notebook shows it."""
    from kvtuner.report.html_page import render

    return render("strip.html", layers=profile_layers(profile))


def ratio_to_bf16(profile: Profile) -> float:
    """The factor by which more tokens fit than in bf16, keys of indexes included."""
    return (profile.bf16_bytes_per_token() + profile.index_bytes) / (profile.bytes_per_token() + profile.index_bytes)


def geometry_facts(profile: Profile) -> list[tuple[str, str]]:
    """The kinds and shapes of layers with the layers of each, where not all are full and alike."""
    layers = _uneven_layers(profile)
    facts = []
    for geometry in dict.fromkeys(layers):
        ids = write_layers(layer_id for layer_id, layer in enumerate(layers) if layer == geometry)
        facts.append((f"kind {geometry.kind}", f"layers {ids}: {_geometry_text(geometry)}"))
    return facts


def _uneven_layers(profile: Profile) -> Sequence[LayerGeometry]:
    """The geometry of every layer, where not all are full and alike."""
    return profile.geometry.by_layer().layers if profile.geometry.is_by_layer else ()


def _geometry_text(geometry: LayerGeometry) -> str:
    if not geometry.kind.owns_cache:
        return "no cache of their own"
    if geometry.kind.name == "latent":
        shape = f"a latent of {geometry.head_dim} channels and {geometry.rope_dim} rotary ones"
    else:
        shape = f"{geometry.num_kv_heads} KV heads of {geometry.head_dim} and {geometry.v_head_dim} channels"
    text = f"{shape}, {geometry.num_attention_heads} query heads"
    if geometry.index_dim:
        text += (
            f", an index with keys of {geometry.index_dim} channels, {geometry.index_bytes} bytes more of each token in"
            " fp8"
        )
    if geometry.kind.number is None:
        return text
    at_most = geometry.kind.number * geometry.native_bytes()
    return f"{text}, at most {count(at_most)} bytes per request"


def _grid_text(defaults: KeyDefaults | ValueDefaults) -> str:
    unit = "tokens per scale of a channel" if defaults.granularity == "per_channel" else "channels per scale"
    text = f"{defaults.granularity.replace('_', ' ')}, {defaults.group_size} {unit}"
    fitted = ", fitted by least squares" if defaults.grid_fit == "least_squares" else ""
    words = ", 16 bits for scale and minimum" if defaults.grid_word_bits == SHORT_WORD_BITS else ""
    return text + ", symmetric" * defaults.symmetric + fitted + words


def _window_facts(profile: Profile) -> list[tuple[str, str]]:
    """The exact window, if there is one."""
    return window_facts(profile.window, float(profile.effective_bits), profile.window_bytes())


def _side_file_facts(profile: Profile) -> list[tuple[str, str]]:
    """The side file, if there is one."""
    return [("constants", f"in a side file, {profile.constants_sha256}")] if profile.constants_sha256 else []


def _overview(profiles: Sequence[EvaluatedProfile]) -> Table:
    rows = []
    for shown in profiles:
        profile, stored = shown.profile, shown.profile.bytes_per_token()
        sizes = (fixed(profile.mean_bits), count(stored), count(tokens_per_gib(stored + profile.index_bytes)))
        kl = interval(profile.quality.measured_kl if profile.quality else None)
        rows.append((shown.name, profile.budget.asked, *sizes, f"{ratio_to_bf16(profile):.2f}x", kl))
    headers = ("profile", "asked", "mean_bits", "bytes per token", "tokens per GiB", "against bf16")
    return Table((*headers, "KL nats per token"), rows)


def _article(shown: EvaluatedProfile) -> dict[str, Any]:
    """The context of ``templates/profile.html`` for one profile, besides the profile itself."""
    from kvtuner.report.plots.drawing import drawn
    from kvtuner.report.plots.kl_by_bits import KlPicture, kl_by_bits, profile_points

    profile, points = shown.profile, profile_points(shown.profile, "this profile")
    layers = profile_layers(profile)
    tables = {
        "identity": Table.of_facts(_identity(profile)),
        "capacity": _capacity(profile),
        "layers": layer_table(layers, "keys", "values"),
        "provenance": Table.of_facts(_provenance(profile)),
    }
    if profile.quality is not None:
        tables["quality"] = Table.of_facts(_quality(profile.quality))
        tables["baselines"] = _baselines(profile, profile.quality)
    return {
        "name": shown.name,
        "profile": profile,
        "verdict": verdict_of(profile),
        "layers": layers,
        "tables": tables,
        "picture": drawn(partial(kl_by_bits, KlPicture(points, {"first": "this profile"}))) if points else None,
        "evaluations": [evaluation_part(evaluation, profile) for evaluation in shown.evaluations],
        "has_relative_path": shown.has_relative_path,
        "command": serve_command(profile.model, shown.reference, *page_flags(profile)),
        "model_folder": MODEL_FOLDER if asks_for_folder(profile.model) else None,
    }


def _identity(profile: Profile) -> list[tuple[str, str]]:
    model, shape, budget = profile.model, profile.geometry, profile.budget
    heads = f"{shape.num_kv_heads} KV heads of {shape.head_dim} and {shape.v_head_dim} channels"
    ranks = f", kept on TP {budget.tp_size} x PP {budget.pp_size}" if max(budget.tp_size, budget.pp_size) > 1 else ""
    return [
        ("digest", profile.digest),
        ("model", f"{model_name(model)} ({model.architecture}, {model.dtype})"),
        ("budget asked", f"{budget.asked}{ranks}"),
        *(
            geometry_facts(profile)
            or [("shape", f"{shape.num_layers} layers, {heads}, {shape.num_attention_heads} query heads")]
        ),
        ("keys", _grid_text(profile.defaults.k)),
        ("values", _grid_text(profile.defaults.v)),
        *_side_file_facts(profile),
        *_window_facts(profile),
    ]


def _capacity(profile: Profile) -> Table:
    stored, bf16, index = profile.bytes_per_token(), profile.bf16_bytes_per_token(), profile.index_bytes
    # fp8 has half the bytes of bf16 and no scales.
    rows = [("bytes per token", *map(count, (stored, bf16 // 2, bf16)))]
    taken = [size + index for size in (stored, bf16 // 2, bf16)]
    rows += [("with keys of indexes", *map(count, taken))] if index else []
    if (tp_size := profile.budget.tp_size) > 1:
        on_rank = profile.bf16_bytes_per_token(tp_size)
        sizes = (profile.bytes_per_token(tp_size), on_rank // 2, on_rank)
        rows.append((f"on a rank of TP {tp_size}", *map(count, sizes)))
    rows += [
        ("tokens per GiB", *(count(tokens_per_gib(size)) for size in taken)),
        ("tokens against bf16", *(f"{(bf16 + index) / size:.2f}x" for size in taken)),
        ("mean_bits", fixed(profile.mean_bits, 3), "8", "16"),
        ("effective_bits", fixed(profile.effective_bits, 3), "8", "16"),
    ]
    return Table(("", "this profile", FP8, REFERENCE), rows)


def _quality(quality: QualityRecord) -> list[tuple[str, str]]:
    return [
        ("KL, nats per token", interval(quality.measured_kl)),
        ("predicted", number(quality.predicted_kl)),
        ("p99 over tokens", number(quality.kl_p99)),
        ("top-1 as the unquantized model", percent(quality.top1_agreement)),
        ("perplexity", f"{fixed(quality.perplexity, 3)}, unquantized {fixed(quality.reference_perplexity, 3)}"),
        ("measured on", f"{count(quality.split_tokens)} tokens, read plan {quality.read_plan}"),
    ]


def _baselines(profile: Profile, quality: QualityRecord) -> Table:
    """The profile, then the baselines from most to least memory."""
    rows = [("this profile", interval(quality.measured_kl), fixed(profile.mean_bits), fixed(profile.effective_bits))]
    for baseline in sorted(quality.baselines, key=lambda row: (-row.effective_bits, row.name)):
        kl = interval(Interval(baseline.kl_mean, baseline.kl_low, baseline.kl_high))
        rows.append((baseline.name, kl, fixed(baseline.mean_bits), fixed(baseline.effective_bits)))
    return Table(("", "KL [95%]", "mean_bits", "effective_bits"), rows, has_winner=True)


def _provenance(profile: Profile) -> list[tuple[str, str]]:
    provenance, shown = profile.provenance, ("id", "revision", "architecture", "dtype")
    rows = [
        (f"{name} of the model", str(value)) for name, value in profile.model if value is not None and name not in shown
    ]
    rows.append(("kvtuner", provenance.kvtuner_version))
    if provenance.command is not None:
        rows.append(("made by", provenance.command))
    if (record := provenance.calibration) is not None:
        counts = [f"{count(number)} to {split}" for split, number in record.num_sequences]
        rows += [
            ("corpus", record.corpus),
            ("sequences", f"{', '.join(counts)}, of {count(record.sequence_length)} tokens"),
            ("positions", " to ".join(map(count, record.position_range))),
            ("score that allocated bits", record.score),
            ("seed", str(record.seed)),
            *((f"{split} tokens", digest) for split, digest in record.token_ids_sha256),
        ]
    if (search := provenance.search) is not None:
        rows.append(("refined by", f"{search.sampler}, {count(search.trials)} trials, seed {search.seed}"))
    return rows + list(provenance.libraries)
