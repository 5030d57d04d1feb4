"""SGLang's model configurations: which model, and which kind of KV pool SGLang gives it."""

from __future__ import annotations

from typing import Any, Final

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch

from kvtuner.errors import UnsupportedModelError

__all__ = ["model_config_of", "refuse_other_pools"]

WITH_IMAGES: Final = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
"""The architectures of models that read images and were tried."""


def refuse_other_pools(model_config: Any) -> None:
    """Refuse a model to which SGLang does not give one dense KV pool, whatever its configuration says of its layers."""
    name = model_config.hf_config.architectures[0]
    attention = model_config.attention_arch
    reasons = {
        f"{name} has {attention.name} attention, which SGLang keeps in another pool": attention != AttentionArch.MHA,
        f"{name} has layers without a KV cache (linear attention or state spaces), which SGLang keeps in a pool of two"
        " kinds": mambaish_config(model_config) is not None,
        f"SGLang keeps layers of {name} in a pool of windows": model_config.is_hybrid_swa,
        f"{name} reads more than text, which was tried with a packed KV pool for {' and '.join(WITH_IMAGES)}"
        " alone": model_config.is_multimodal and name not in WITH_IMAGES,
        f"{name} generates no text": not model_config.is_generation,
    }
    for reason, is_true in reasons.items():
        if is_true:
            raise UnsupportedModelError(f"{reason}; serve it without a profile")
