"""SGLang's model configurations: which model, and which kind of KV pool SGLang gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch

from kvtuner.errors import UnsupportedModelError

if TYPE_CHECKING:
    from kvtuner.layer_geometry import CacheGeometry

__all__ = ["has_attention_sinks", "model_config_of", "refuse_other_pools"]

WITH_IMAGES: Final = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
"""The architectures of models that read images and were tried."""


def refuse_other_pools(model_config: Any, geometry: CacheGeometry) -> None:
    """Refuse a model to which SGLang does not give one dense KV pool, or whose windows its attention is not told.

    Its geometry is read from its configuration.
    """
    name = model_config.hf_config.architectures[0]
    attention = model_config.attention_arch
    reasons = {
        f"{name} has {attention.name} attention, which SGLang keeps in another pool": attention != AttentionArch.MHA,
        f"{name} has layers without a KV cache (linear attention or state spaces), which SGLang keeps in a pool of two"
        " kinds": mambaish_config(model_config) is not None,
        f"SGLang keeps layers of {name} with a window in a pool of their own, which was never tried": (
            model_config.is_hybrid_swa
        ),
        f"{name} has attention sinks, which no server was tried with": has_attention_sinks(model_config),
        f"{name} reads more than text, which was tried with a packed KV pool for {' and '.join(WITH_IMAGES)}"
        " alone": model_config.is_multimodal and name not in WITH_IMAGES,
        f"{name} generates no text": not model_config.is_generation,
    }
    for reason, is_true in reasons.items():
        if is_true:
            raise UnsupportedModelError(f"{reason}; serve it without a profile")
    has_windows = any(layer.kind.name == "window" for layer in geometry.layers)
    if has_windows and not _gives_windows(name):
        raise UnsupportedModelError(
            f"SGLang's code for {name} tells its Triton attention of no window, though layers have one; serve it"
            " without a profile"
        )


def _gives_windows(architecture: str) -> bool:
    """Whether SGLang's class of an architecture says how long the windows of its layers are."""
    from sglang.srt.models.registry import ModelRegistry  # imports the code of all models

    model_class, _ = ModelRegistry.resolve_model_cls([architecture])
    return hasattr(model_class, "get_attention_sliding_window_size")


def has_attention_sinks(model_config: Any) -> bool:
    """Whether the attention of a model has sinks."""
    return bool(model_config.has_attention_sinks)
