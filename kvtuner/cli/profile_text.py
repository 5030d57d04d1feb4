"""A profile as text for a terminal: facts, quality, runs of layers. Knows nothing of files."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvtuner.precision import NATIVE_BITS

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile import Profile

GIB = 1 << 30


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
        "tokens_per_gib": GIB // stored,
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
    """Some lines about a profile."""
    facts = summary(profile)
    ratio = facts["bf16_bytes_per_token"] / facts["bytes_per_token"]
    lines = [
        f"model     {printable(profile.model.id)} ({printable(profile.model.architecture)})",
        f"digest    {profile.digest}",
        f"budget    {printable(profile.budget.asked)}: {facts['mean_bits']:.4g} mean bits,"
        f" {facts['effective_bits']:.4g} effective, {facts['bytes_per_token']:,} bytes per token",
        f"capacity  {facts['tokens_per_gib']:,} tokens per GiB, {ratio:.2f}x of bf16",
    ]
    if (quality := profile.quality) is not None:
        kl = quality.measured_kl
        lines.append(
            f"quality   KL {kl.mean:.3g} [{kl.low:.3g}, {kl.high:.3g}] nats per token,"
            f" top-1 {quality.top1_agreement:.2%},"
            f" perplexity {quality.perplexity:.4g} (bf16 {quality.reference_perplexity:.4g})"
        )
    lines += ["", "layers    keys (transform)                            values (transform)"]
    for first, last, keys, values in runs(profile):
        name = str(first) if first == last else f"{first}-{last}"
        lines.append(f"{name:<10}{keys:<44}{values}")
    return "\n".join(lines)


def runs(profile: Profile) -> list[tuple[int, int, str, str]]:
    """Neighbouring layers that are stored alike, as (first, last, keys, values)."""

    def side(bits: int, name: str) -> str:
        return f"{bits} bit" if name == "none" else f"{bits} bit ({name})"

    def keys_of(layer: int, bits: int) -> str:
        if profile.defaults.k.granularity == "per_channel" and bits != NATIVE_BITS:
            return f"{bits} bit per channel ({profile.defaults.k.group_size} tokens)"
        return side(bits, profile.transform_name(layer, "k"))

    rows = [
        (keys_of(layer, pair.k_bits), side(pair.v_bits, profile.transform_name(layer, "v")))
        for layer, pair in enumerate(profile.pairs)
    ]
    result, layer = [], 0
    for (keys, values), members in groupby(rows):
        count = len(list(members))
        result.append((layer, layer + count - 1, keys, values))
        layer += count
    return result


def printable(text: str) -> str:
    """Text without control characters: a profile may come from anybody."""
    return "".join(c if c.isprintable() else "?" for c in text)
