"""The bytes that layers with a window, and indexes, take of SGLang's cache beside what is tuned.

Knows nothing of schemes or GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtuner.layer_geometry import scaled_bytes
from kvtuner.precision import NATIVE_BITS

if TYPE_CHECKING:
    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.precision import RowShape

PART_SHARE: Final = 0.8
"""SGLang's default of --swa-full-tokens-ratio: the tokens of windows' part of a pool, for each of the full layers'."""
APART: Final = frozenset({
    "DeepseekV4ForCausalLM", "DiffusionGemmaForBlockDiffusion", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration", "GptOssForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteSWAForCausalLM",
    "InklingForConditionalGeneration", "LagunaForCausalLM", "Llama4ForConditionalGeneration", "MellumForCausalLM",
    "MiMoV2FlashForCausalLM", "MuseGlimmerForConditionalGeneration", "Step3p7ForConditionalGeneration",
})  # fmt: skip
"""The architectures whose windows SGLang keeps in a part of the pool of their own; of others it keeps all tokens."""
INDEXED: Final = frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"})
"""The architectures whose indexes SGLang has."""


def window_share(architecture: str) -> float:
    """The tokens of layers with a window that SGLang by default keeps for each token of full layers."""
    return PART_SHARE if architecture in APART else 1


def window_bytes_per_token(shape: ModelShape, tp_size: int) -> float:
    """The bytes on a rank of what SGLang keeps of layers with a window, unquantized, for a token of full layers.

    `GeometryError` where heads cannot be split among ranks.
    """
    windows = [layer for layer in shape.cache.layers if layer.kind.name == "window"]
    return window_share(shape.architecture) * sum(layer.native_bytes(tp_size) for layer in windows)


def fp8_bytes_of_layer(shape: ModelShape, rows: RowShape) -> int:
    """The bytes on a rank of a token in SGLang's fp8, of one layer that is tuned.

    Beside indexes latents have scales, and rotary channels 16 bits.
    """
    if shape.cache.index_bytes():
        return scaled_bytes(rows.head_dim) + NATIVE_BITS // 8 * rows.rope_dim
    return rows.num_kv_heads * rows.channels
