"""SGLang's model configurations: which model, and which kind of KV pool SGLang gives it."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch

from kvtuner.errors import UnsupportedModelError

__all__ = ["model_config_of", "refuse_other_pools"]


def refuse_other_pools(model_config: Any) -> None:
    """Refuse a model to which SGLang does not give one dense KV pool, whatever its configuration says of its layers."""
    architecture = model_config.hf_config.architectures[0]
    if model_config.attention_arch != AttentionArch.MHA:
        raise UnsupportedModelError(
            f"{architecture} has {model_config.attention_arch.name} attention, which SGLang keeps in another pool;"
            " serve it without a profile"
        )
    if mambaish_config(model_config) is not None:
        raise UnsupportedModelError(
            f"{architecture} has layers without a KV cache (linear attention or state spaces), which SGLang keeps in a"
            " pool of two kinds; serve it without a profile"
        )
    if model_config.is_hybrid_swa:
        raise UnsupportedModelError(
            f"SGLang keeps layers of {architecture} in a pool of windows; serve it without a profile"
        )
    if model_config.is_multimodal:
        raise UnsupportedModelError(
            f"{architecture} reads more than text, which was never tried with a packed KV pool; serve it without a"
            " profile"
        )
    if not model_config.is_generation:
        raise UnsupportedModelError(f"{architecture} generates no text; serve it without a profile")
