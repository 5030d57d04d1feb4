"""The models that cache one key and one value per layer, token and KV head. Knows nothing of weights or profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtuner.geometry import ConfigLike

_OTHER_CACHES: Final = {
    "is_encoder_decoder": "an encoder: it is an encoder-decoder",
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "cross_attention_layers": "cross-attention layers",
    "num_kv_shared_layers": "layers that read another layer's keys",
}
_SINKS: Final = ("gpt_oss",)
"""No configuration says that its layers have sinks: the attention hook would find them in the weights."""
_WINDOWS: Final = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_OTHER_ATTENTION: Final = {
    "s_aux": "attention sinks",
    **{name: name for name in ("position_bias", "head_mask", "sinks", "indices", "block_indices")},
}
"""What arguments of some models' attention are, which change its result."""
_FULL: Final = ("full_attention", "attention")


def refuse_other_caches(config: ConfigLike, *, context_length: int | None = None) -> None:
    """Check that every layer has a cache of its own and reads all of it.

    A window that is at least as long as the context is none; its length is the configuration's by default.

    Raises:
        UnsupportedModelError: The model has another cache, which is named.
    """
    text = config.get_text_config(decoder=True)
    name = getattr(text, "model_type", type(text).__name__)
    for attribute, what in _OTHER_CACHES.items():
        if getattr(text, attribute, None) or getattr(config, attribute, None):
            raise UnsupportedModelError(_refusal(name, what))
    if name in _SINKS:
        raise UnsupportedModelError(_refusal(name, "attention sinks"))
    longest = context_length or getattr(text, "max_position_embeddings", None)
    for layer_id, kind in enumerate(_layer_kinds(text)):
        window = getattr(text, _WINDOWS.get(kind, ""), None)
        if kind in _FULL or (window and longest and window >= longest):
            continue
        if window:
            raise UnsupportedModelError(
                f"{name!r} has {kind} in layer {layer_id}: a window of {window} tokens, shorter than the context of"
                f" {longest}; search with --context-length {window} and serve at most that many tokens, or run it with"
                " its own cache"
            )
        raise UnsupportedModelError(_refusal(name, f"{kind} in layer {layer_id}, a layer without a KV cache"))


def _layer_kinds(text: Any) -> list[str]:
    """The kind of every layer, or one entry for all where the configuration lists none."""
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        return list(kinds)
    return [next((kind for kind, attribute in _WINDOWS.items() if getattr(text, attribute, None)), "full_attention")]


def _refusal(name: str, what: str) -> str:
    return (
        f"{name!r} has {what}; only full attention layers of decoder-only models are supported:"
        " run it with its own cache"
    )


def refuse_other_attention(layer: str, arguments: Mapping[str, object]) -> None:
    """Refuse a layer's attention that is more than a softmax over keys, by an `UnsupportedModelError`.

    The arguments are those that transformers gives beside queries, keys, values, mask, scaling and cap.
    """
    for argument, what in _OTHER_ATTENTION.items():
        if arguments.get(argument) is not None:
            raise UnsupportedModelError(f"{layer} has {what}: that is not supported yet")
