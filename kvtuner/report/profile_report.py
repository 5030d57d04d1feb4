"""A profile as text for a terminal: facts and quality. Knows nothing of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtuner.evaluation.statistics import Interval
from kvtuner.precision import tokens_per_gib
from kvtuner.report.formatting import NOT_MEASURED, interval, printable

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.evidence import QualityRecord
    from kvtuner.exported_configs.profile.layer_storage import KeyDefaults, ValueDefaults
    from kvtuner.exported_configs.profile.profile import Profile


def summary(profile: Profile) -> dict[str, Any]:
    """What a program wants to know of a profile."""
    bf16 = profile.to_geometry().bf16_bytes_per_token()
    stored = profile.bytes_per_token()
    return {
        "digest": profile.digest,
        "model": profile.model.id,
        "asked": profile.budget.asked,
        "mean_bits": float(profile.mean_bits),
        "effective_bits": round(float(profile.effective_bits), 6),
        "bytes_per_token": stored,
        "k_granularity": profile.defaults.k.granularity,
        "bf16_bytes_per_token": bf16,
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
    """Some lines about a profile; its layers are `strip`'s."""
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


def ratio_to_bf16(profile: Profile) -> float:
    """How many times more tokens fit than in bf16."""
    return profile.to_geometry().bf16_bytes_per_token() / profile.bytes_per_token()


def measured_kl(quality: QualityRecord) -> Interval:
    """The mean and its interval, nats per token."""
    kl = quality.measured_kl
    return Interval(kl.mean, kl.low, kl.high)


def kl_text(quality: QualityRecord | None) -> str:
    """The same as text."""
    return NOT_MEASURED if quality is None else interval(measured_kl(quality))


def grid_text(defaults: KeyDefaults | ValueDefaults) -> str:
    """How quantized keys or values share scales."""
    unit = "tokens per scale of a channel" if defaults.granularity == "per_channel" else "channels per scale"
    words = f"{defaults.granularity.replace('_', ' ')}, {defaults.group_size} {unit}"
    return words + ", symmetric" * defaults.symmetric
