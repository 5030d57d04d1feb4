"""vLLM's ``--kv-cache-dtype-skip-layers``: the layers that keep the model's dtype; the dtype of the rest is a flag."""

from typing import Final

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats.conversion import NATIVE, Exported, LostFeature, lost_window
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.precision import PrecisionPair

DTYPES: Final = {PrecisionPair(8, 8): "int8_per_token_head", PrecisionPair(4, 4): "int4_per_token_head"}


def write(profile: Profile) -> Exported:
    """Write the indices of unquantized layers."""
    kept = [layer for layer, pair in enumerate(profile.pairs) if pair == NATIVE]
    packed = {pair: layer for layer, pair in reversed(list(enumerate(profile.pairs))) if pair != NATIVE}
    if not packed:
        raise ProfileError("every layer has 16 bits, and there is nothing to skip; serve with --kv-cache-dtype auto")
    (first, pair), *others = sorted((layer, pair) for pair, layer in packed.items())
    for layer, other in others:
        raise ProfileError(
            f"vLLM quantizes all layers alike, but layer {first} is {pair} and layer {layer} is {other};"
            " serve the profile with SGLang"
        )
    if pair not in DTYPES:
        pairs = ", ".join(map(str, DTYPES))
        raise ProfileError(f"vLLM has no dtype for layer {first}, {pair}; those it has are {pairs}")
    notes = [f"serve with --kv-cache-dtype {DTYPES[pair]}, which quantizes in its own way"]
    if not kept:
        notes.append("no layer has 16 bits: leave --kv-cache-dtype-skip-layers out")
    lost = LostFeature(first, "bits, groups, symmetry and transforms of quantized layers")
    return Exported(" ".join(map(str, kept)) + "\n", tuple(notes), (lost, *lost_window(profile)))
