"""SGLang's model configurations: which model, and which kind of KV pool SGLang gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import (
    AttentionArch,
    dsa_layer_skips_topk,
    get_dsa_index_head_dim,
    get_dsa_index_topk,
    is_deepseek_dsa,
)

from kvtuner.errors import UnsupportedModelError
from kvtuner.layer_ranges import write_layers
from kvtuner.runtime_loader.sglang.compat.differences import (
    GEMMA_4,
    LLAMA_4,
    TEXT_ALONE,
    reads_in_windows_both_ways,
    refuse_other_images,
    refuse_other_positions,
)
from kvtuner.supported_models import layer_kinds

if TYPE_CHECKING:
    from kvtuner.layer_geometry import CacheGeometry, KindName

__all__ = [
    "chunk_of", "configuration_of", "has_attention_sinks", "has_index", "keeps_states", "model_config_of",
    "reading_both_ways", "refuse_other_pools", "selected_tokens",
]  # fmt: skip

WITH_IMAGES: Final = (
    "Gemma3ForConditionalGeneration",
    GEMMA_4,
    "KimiK25ForConditionalGeneration",
    LLAMA_4,
    "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
)
"""The architectures of models that read images and were tried."""
_INTERLEAVED_INDEX: Final = "glm_moe_dsa"
"""The kind of model whose index has neighbours rotated together, in transformers' code."""
_INTERLEAVES: Final = "indexer_rope_interleave"
"""The field by which SGLang tells so, which transformers' configuration does not have."""
_USUAL_INDEX: Final = {"index_init_tokens": 0, "index_local_tokens": 0, "index_k_norm_type": "layer"}
"""Fields that SGLang's index has in any configuration, and what transformers' always is."""
_MADE_ALIKE: Final = ("gemma4", "gemma4_unified")
"""The kinds of models in whose configuration SGLang gives all layers the heads of the full ones."""


def configuration_of(model_config: Any) -> Any:
    """The configuration of a model as transformers reads it and profiles record it, with what a server overrides."""
    config = model_config.hf_config
    is_of_sglang = type(config).__module__.startswith("sglang.")  # which may rename the model's class, as for OLMo 3
    if config.model_type not in _MADE_ALIKE and not is_of_sglang and not keeps_states(model_config):
        return config
    own = _own_class(config).from_pretrained(model_config.model_path, revision=model_config.revision)
    for name, value in model_config.model_override_args.items():
        part: Any = getattr(own, name, None)
        if isinstance(value, dict) and hasattr(part, "get_text_config"):  # a configuration inside it
            part.update(value)
        else:
            setattr(own, name, value)
    return own


def _own_class(config: Any) -> Any:
    """The class that transformers has of a configuration, which SGLang reads by its own where layers keep states."""
    import transformers
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    return getattr(transformers, CONFIG_MAPPING_NAMES.get(config.model_type, ""), type(config))


def chunk_of(model_config: Any) -> int | None:
    """The tokens of the chunks that some layers of a model read by; None where none does."""
    text = configuration_of(model_config).get_text_config(decoder=True)
    return int(text.attention_chunk_size) if "chunked_attention" in layer_kinds(text) else None


def keeps_states(model_config: Any) -> bool:
    """Whether some layers of a model keep a state of each request, of linear attention, convolutions or the like."""
    return mambaish_config(model_config) is not None


def refuse_other_pools(model_config: Any, geometry: CacheGeometry) -> None:
    """Refuse a model whose full layers SGLang keeps otherwise than in a dense KV pool, or takes for other layers.

    Its geometry is read from its configuration.
    """
    name = model_config.hf_config.architectures[0]
    attention = model_config.attention_arch
    is_gguf = model_config.quantization == "gguf"
    has_latents = any(layer.kind.name == "latent" for layer in geometry.layers)
    _refuse_other_index(model_config, geometry)
    reasons = {
        f"{name} has {attention.name} attention, which SGLang keeps in another pool": not has_latents
        and attention != AttentionArch.MHA,
        f"{name} has latents (MLA), which SGLang keeps as keys and values": has_latents
        and attention != AttentionArch.MLA,
        f"{name} has latents (MLA) beside layers of another kind, which was never tried": has_latents
        and any(layer.kind.name not in ("latent", "none") for layer in geometry.layers),
        f"{name} is read from GGUF, where some models' keys have another order of channels": is_gguf,
        f"{name} generates no text": not model_config.is_generation,
    }
    for reason, is_true in reasons.items():
        if is_true:
            raise UnsupportedModelError(f"{reason}; serve it without a profile")
    if model_config.is_multimodal and name not in WITH_IMAGES:
        tried = ", ".join(tried.removesuffix("ForConditionalGeneration") for tried in WITH_IMAGES)
        raise UnsupportedModelError(
            f"{name} reads more than text, which was tried with a packed KV pool for the classes of {tried} alone;"
            f" serve its text, with {TEXT_ALONE}, or serve it without a profile"
        )
    if model_config.is_multimodal:
        refuse_other_images(model_config, geometry, reading_both_ways(model_config))
    _refuse_other_states(model_config, geometry)
    readers = geometry.readers
    windows = [layer for layer in readers if geometry.layers[geometry.owner_of(layer)].kind.name == "window"]
    apart = (model_config.swa_attention_layer_ids or []) if model_config.is_hybrid_swa else windows
    if apart != windows:
        raise UnsupportedModelError(
            f"SGLang keeps layers {write_layers(apart)} of {name} in a part for windows, but in a context of"
            f" {model_config.context_len} tokens {write_layers(windows) or 'none'} of its layers have one; add"
            " --disable-hybrid-swa-memory, or serve it without a profile"
        )
    refuse_other_positions(configuration_of(model_config), model_config.hf_config)
    if windows and chunk_of(model_config) is None and not _gives_windows(name):
        raise UnsupportedModelError(
            f"SGLang's code for {name} tells its Triton attention of no window, though layers have one; serve it"
            " without a profile"
        )


def has_index(model_config: Any) -> bool:
    """Whether an index of a model selects, by SGLang's code, the tokens that queries read."""
    return bool(is_deepseek_dsa(model_config.hf_config))


def selected_tokens(model_config: Any) -> int:
    """The tokens that an index selects for a query, by SGLang's code; 0 without one."""
    return int(get_dsa_index_topk(model_config.hf_config)) if has_index(model_config) else 0


def _refuse_other_index(model_config: Any, geometry: CacheGeometry) -> None:
    """Refuse a model to whose layers SGLang gives no index, or another one than its configuration does."""
    name, config = model_config.hf_config.architectures[0], model_config.hf_config
    own = [layer.index_dim for layer in geometry.layers]
    if not has_index(model_config):
        if any(own):
            raise UnsupportedModelError(
                f"an index selects what queries of {name} read, which SGLang does not know of this model; run it by"
                " KVTunerCache"
            )
        return
    keys = get_dsa_index_head_dim(config)
    served = [0 if dsa_layer_skips_topk(config, layer_id) else keys for layer_id in range(len(own))]
    if served != own:
        raise UnsupportedModelError(
            f"SGLang gives other layers of {name} an index than its configuration does; serve it without a profile"
        )
    other = [name for name, usual in _USUAL_INDEX.items() if getattr(config, name, None) not in (None, usual)]
    if other:
        raise UnsupportedModelError(
            f"SGLang gives the index of {name} {other[0]} {getattr(config, other[0])!r}, which transformers does not"
            " know; serve it without a profile"
        )
    is_interleaved = config.model_type == _INTERLEAVED_INDEX
    if bool(getattr(config, _INTERLEAVES, False)) != is_interleaved:
        raise UnsupportedModelError(
            f"without {_INTERLEAVES} {str(is_interleaved).lower()} in its config.json SGLang rotates other channels of"
            f" the index of {name} than transformers; add it"
        )


def _refuse_other_states(model_config: Any, geometry: CacheGeometry) -> None:
    """Refuse a model whose layers with keys, beside those that keep a state, are others in SGLang."""
    name, beside = model_config.hf_config.architectures[0], mambaish_config(model_config)
    if beside is None:
        if any(layer.kind.name == "none" for layer in geometry.layers):
            raise UnsupportedModelError(
                f"{name} has layers that keep a state, for which SGLang has no pool; serve it without a profile, or"
                " by KVTunerCache"
            )
        return
    full = [layer_id for layer_id, layer in enumerate(geometry.layers) if layer.kind.name in ("full", "latent")]
    # A field that SGLang reads and transformers leaves out.
    missing = "linear_attn_config" if getattr(beside, "linear_attn_config", {}) is None else None
    try:
        served = list(beside.full_attention_layer_ids)
    except AttributeError as error:
        served, missing = [], error.name
    if missing:
        raise UnsupportedModelError(
            f"{name} is configured without {missing}, by which SGLang tells which layers have keys; add it to its"
            " config.json, as the hub's checkpoints have it"
        )
    if served != full:
        raise UnsupportedModelError(
            f"SGLang gives keys to other layers of {name} than its configuration does: layers"
            f" {write_layers(served) or 'of none'} in place of {write_layers(full)}; serve it without a profile"
        )


def _gives_windows(architecture: str) -> bool:
    """Whether SGLang's class of an architecture says how long the windows of its layers are."""
    return hasattr(_class_of(architecture), "get_attention_sliding_window_size")


def reading_both_ways(model_config: Any) -> frozenset[KindName]:
    """The kinds of layers in which the tokens of an image read one another: SGLang makes masks of chunks for them."""
    name = model_config.hf_config.architectures[0]
    if not model_config.is_multimodal or not hasattr(_class_of(name), "prepare_attn_masks"):
        return frozenset()
    if name != GEMMA_4:
        return frozenset({"full", "window"})
    return frozenset({"window"} if reads_in_windows_both_ways(model_config.hf_config) else ())


def _class_of(architecture: str) -> type:
    from sglang.srt.models.registry import ModelRegistry  # imports the code of all models

    model_class: type = ModelRegistry.resolve_model_cls([architecture])[0]
    return model_class


def has_attention_sinks(model_config: Any) -> bool:
    """Whether the attention of a model has sinks."""
    return bool(model_config.has_attention_sinks)
