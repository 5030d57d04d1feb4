"""SGLang's model configurations: which model, and which kind of KV pool SGLang gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch

from kvtuner.errors import UnsupportedModelError
from kvtuner.layer_ranges import write_layers

if TYPE_CHECKING:
    from kvtuner.layer_geometry import CacheGeometry

__all__ = ["configuration_of", "has_attention_sinks", "model_config_of", "refuse_other_pools"]

TEXT_ALONE: Final = """--json-model-override-args '{"language_model_only": true}'"""
"""The flag by which SGLang takes a model that reads images for one of text."""
WITH_IMAGES: Final = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
"""The architectures of models that read images and were tried."""
_MADE_ALIKE: Final = ("gemma4", "gemma4_unified")
"""The kinds of models in whose configuration SGLang gives all layers the heads of the full ones."""


def configuration_of(model_config: Any) -> Any:
    """The configuration of a model as transformers reads it and profiles record it, with what a server overrides."""
    config = model_config.hf_config
    if config.model_type not in _MADE_ALIKE:
        return config
    own = type(config).from_pretrained(model_config.model_path, revision=model_config.revision)
    for name, value in model_config.model_override_args.items():
        part: Any = getattr(own, name, None)
        if isinstance(value, dict) and hasattr(part, "get_text_config"):  # a configuration inside it
            part.update(value)
        else:
            setattr(own, name, value)
    return own


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
        f"{name} generates no text": not model_config.is_generation,
    }
    for reason, is_true in reasons.items():
        if is_true:
            raise UnsupportedModelError(f"{reason}; serve it without a profile")
    if model_config.is_multimodal and name not in WITH_IMAGES:
        raise UnsupportedModelError(
            f"{name} reads more than text, which was tried with a packed KV pool for {' and '.join(WITH_IMAGES)} alone;"
            f" serve its text, with {TEXT_ALONE}, or serve it without a profile"
        )
    windows = [layer_id for layer_id, layer in enumerate(geometry.layers) if layer.kind.name == "window"]
    apart = (model_config.swa_attention_layer_ids or []) if model_config.is_hybrid_swa else windows
    if apart != windows:
        raise UnsupportedModelError(
            f"SGLang keeps layers {write_layers(apart)} of {name} in a part for windows, but in a context of"
            f" {model_config.context_len} tokens {write_layers(windows) or 'none'} of its layers have one; add"
            " --disable-hybrid-swa-memory, or serve it without a profile"
        )
    if windows and not _gives_windows(name):
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
