"""The models that kvtuner takes, and what their layers cache, by their configuration alone. Knows nothing of weights.

Layers that read all tokens are tuned, those that cache latents among them. A search, a transformers cache and SGLang
leave other layers as they are beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import UnsupportedModelError
from kvtuner.geometry import ModelGeometry, read_heads, read_latent, read_num_layers
from kvtuner.layer_geometry import CacheGeometry, LayerGeometry, LayerKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtuner.geometry import ConfigLike

_OTHER_CACHES: Final = {
    "is_encoder_decoder": "an encoder: it is an encoder-decoder",
    "cross_attention_layers": "cross-attention layers",
}
_READS_LATER: Final[Mapping[str, tuple[object, ...]]] = {
    "use_bidirectional_attention": (True, "all"), "is_causal": (False,),
}  # fmt: skip
"""The fields, and their values, by which transformers lets tokens of text read later ones, as those of images may."""
_SHARED: Final = "num_kv_shared_layers"
"""The number of last layers that read the keys and values of the last layer of their type before them."""
_READS_ANOTHER: Final = "layers that read another layer's keys"
_LATENT: Final = "kv_lora_rank"
"""The channels of the latents of a model with multi-head latent attention (MLA), in its configuration."""
_SINKS: Final = ("gpt_oss",)
"""No configuration says that its layers have sinks: the attention hook finds them in the weights."""
_TWICE_IN_WINDOWS: Final = ("mimo_v2_flash",)
"""The models whose layers with a window have twice the KV heads of full ones, which no field of theirs says."""
_OWN_CACHE: Final = ("minimax",)
"""The models that transformers runs with a cache of their own class alone."""
_WINDOWS: Final = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""What the layers of these types have their window from."""
SINKS: Final = "s_aux"
"""The argument that transformers gives attention sinks in: a score of each query head, which no token has."""
INDICES: Final = "indices"
"""The argument that transformers gives the tokens in that an index selects for each query."""
_OTHER_ATTENTION: Final = {
    SINKS: "attention sinks",
    **{name: name for name in ("position_bias", "head_mask", "sinks", INDICES, "block_indices")},
}
"""What arguments of some models' attention are, which change its result."""
_SERVED_BY_CHUNKS: Final = ("llama4_text",)
"""The models whose layers read chunks in a server of a profile."""
_ATTENTION: Final = ("full_attention", "attention")
_INDEXED: Final = "indexed_attention"
"""The name of layers that read the tokens that an index selects."""
_POOLED: Final = "index_kpool"
"""The tokens that an index selects together, which only some have: their layers make masks of their own."""
_STATES: Final = ("linear_attention", "conv", "mamba", "recurrent", "moe", "mlp")
"""The names of layers without keys: those with a state of another kind, and those with none."""
_WITHOUT_STATES: Final = ("moe", "mlp")
_BESIDE_STATES: Final = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""The attention of layers that have both."""


def refuse_other_caches(config: ConfigLike, *, context_length: int | None = None) -> None:
    """Check that every layer has a cache of its own and reads all of it.

    A window that is at least as long as the context is none; its length is the configuration's by default.

    Raises:
        UnsupportedModelError: The model has another cache, which is named.
    """
    refuse_other_models(config)
    text = config.get_text_config(decoder=True)
    name = getattr(text, "model_type", type(text).__name__)
    if getattr(text, _SHARED, None):
        raise UnsupportedModelError(_refusal(name, _READS_ANOTHER))
    if name in _SINKS:
        raise UnsupportedModelError(_refusal(name, "attention sinks"))
    if getattr(text, _LATENT, None):
        raise UnsupportedModelError(_refusal(name, "multi-head latent attention (MLA)"))
    longest = longest_context(text, context_length)
    for layer_id, kind in enumerate(layer_kinds(text)):
        window = _window(text, layer_id, kind)
        if kind in _ATTENTION or (window and longest and window >= longest):
            continue
        if window:
            raise UnsupportedModelError(
                f"{name!r} has {kind} in layer {layer_id}: a window of {window} tokens, shorter than the context of"
                f" {longest}; search with --context-length {window} and serve at most that many tokens, or run it with"
                " its own cache"
            )
        raise UnsupportedModelError(_refusal(name, f"{kind} in layer {layer_id}, a layer without a KV cache"))


def refuse_other_models(config: ConfigLike) -> None:
    """Refuse a model that is no decoder by an `UnsupportedModelError`."""
    text = config.get_text_config(decoder=True)
    name = getattr(text, "model_type", type(text).__name__)
    for attribute, what in _OTHER_CACHES.items():
        if getattr(text, attribute, None) or getattr(config, attribute, None):
            raise UnsupportedModelError(_refusal(name, what))
    for attribute, values in _READS_LATER.items():
        value = getattr(text, attribute, None)
        if value in values:
            raise UnsupportedModelError(_refusal(name, f"text that reads later tokens too, by {attribute}={value!r}"))


def refuse_own_cache(config: ConfigLike) -> None:
    """Refuse a model that transformers runs with a cache of its own class, by an `UnsupportedModelError`."""
    name = getattr(config.get_text_config(decoder=True), "model_type", None)
    if name in _OWN_CACHE:
        raise UnsupportedModelError(f"{name!r} takes no other cache than its own in transformers: serve it elsewhere")


def longest_context(text: Any, context_length: int | None) -> int | None:
    """The tokens that a model will read: as many as are given, or the positions that its configuration names."""
    return context_length or getattr(text, "max_position_embeddings", None)


def layer_kinds(text: Any) -> list[str]:
    """The type of every layer in a decoder's configuration, or one entry for all where it lists none."""
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


def has_states(config: ConfigLike) -> bool:
    """Whether some layer keeps something else than keys and values of tokens, such as a recurrent state."""
    kinds = layer_kinds(config.get_text_config(decoder=True))
    return any(kind in _STATES or kind in _BESIDE_STATES for kind in kinds)


def has_indexes(config: ConfigLike) -> bool:
    """Whether some layer's queries read the tokens that an index selects."""
    return _INDEXED in layer_kinds(config.get_text_config(decoder=True))


def num_selected_tokens(config: ConfigLike) -> int | None:
    """The tokens that an index selects for a query; None where no layer has one."""
    selected: int | None = config.get_text_config(decoder=True).index_topk if has_indexes(config) else None
    return selected


def num_state_layers(config: ConfigLike) -> int:
    """The layers that keep a state of each request, beside keys or without any."""
    kinds = layer_kinds(config.get_text_config(decoder=True))
    return sum((kind in _STATES and kind not in _WITHOUT_STATES) or kind in _BESIDE_STATES for kind in kinds)


def read_cache_geometry(config: ConfigLike, *, context_length: int | None = None) -> CacheGeometry:
    """What every layer of a model caches, in a context of so many tokens; the configuration's longest by default.

    A window that is at least as long as the context is none.

    Raises:
        UnsupportedModelError: A layer's cache is none that is searched, or no layer reads all tokens.
        GeometryError: The configuration does not tell its heads.
    """
    refuse_other_models(config)
    text = config.get_text_config(decoder=True)
    name = getattr(text, "model_type", type(text).__name__)
    types = layer_kinds(text)
    longest = longest_context(text, context_length)
    kinds = [_kind(text, name, layer_id, kind, longest) for layer_id, kind in enumerate(types)]
    num_shared = getattr(text, _SHARED, None) or 0
    if all(kind == LayerKind() for kind in kinds) and not num_shared and not getattr(text, "is_heterogeneous", False):
        return CacheGeometry.of(ModelGeometry.from_config(config))
    if len(kinds) == 1:
        kinds, types = kinds * read_num_layers(text), types * read_num_layers(text)
    if num_shared:
        kinds = _with_readers(name, kinds, types, num_shared)
    if not {LayerKind(), LayerKind("latent")} & {*kinds}:
        _refuse_no_full_layer(text, name, types, longest)
    geometry = CacheGeometry(tuple(_layer(text, layer_id, kind) for layer_id, kind in enumerate(kinds)))
    geometry.tuned()
    return geometry


def read_served_geometry(config: ConfigLike, *, context_length: int | None = None) -> CacheGeometry:
    """What every layer of a model caches that SGLang serves with a profile: all tokens, those of a window, or none.

    Chunks are windows that SGLang serves of some models.

    Of all tokens a layer caches keys and values, or latents; one that reads another layer's caches none.

    Raises:
        UnsupportedModelError: A layer has another cache.
        GeometryError: The configuration does not tell its heads.
    """
    geometry = read_cache_geometry(config, context_length=context_length)
    text = config.get_text_config(decoder=True)
    name, types = getattr(text, "model_type", type(text).__name__), layer_kinds(text)
    for layer_id, layer in enumerate(geometry.layers):
        kind = types[min(layer_id, len(types) - 1)]
        if kind == "chunked_attention" and layer.kind != LayerKind() and name not in _SERVED_BY_CHUNKS:
            raise UnsupportedModelError(_not_served(name, f"{kind} in layer {layer_id}, which reads its chunk alone"))
    return geometry


def _not_served(name: str, what: str) -> str:
    return f"{name!r} has {what}; SGLang serves profiles of layers that read all tokens or a window: run it without one"


def _kind(text: Any, name: str, layer_id: int, layer_type: str, longest: int | None) -> LayerKind:
    layer_type = _BESIDE_STATES.get(layer_type, layer_type)
    if layer_type in _ATTENTION:
        return LayerKind("latent" if getattr(text, _LATENT, None) else "full")
    if layer_type in _STATES:
        return LayerKind("none")
    if layer_type == _INDEXED and getattr(text, _LATENT, None) and not getattr(text, _POOLED, None):
        return LayerKind("latent")
    window = None if getattr(text, _LATENT, None) else _window(text, layer_id, layer_type)
    if isinstance(window, int) and window > 0:
        return LayerKind() if longest and window >= longest else LayerKind("window", window)
    raise UnsupportedModelError(
        f"{name!r} has {layer_type} in layer {layer_id}, which reads its tokens otherwise than attention does: run it"
        " with its own cache"
    )


def _with_readers(name: str, kinds: list[LayerKind], types: list[str], num_readers: int) -> list[LayerKind]:
    """The kinds in which the last layers read the last layer of their type before them, a window's or another."""
    first = len(kinds) - num_readers
    owners = {layer_type: layer_id for layer_id, layer_type in enumerate(types[: max(first, 0)])}
    for layer_id, layer_type in enumerate(types[max(first, 0) :], max(first, 0)):
        if layer_type not in owners:
            raise UnsupportedModelError(
                f"{name!r} has {layer_type} in layer {layer_id}, one of {num_readers} {_READS_ANOTHER}, but no layer of"
                " that type has keys of its own: is its configuration whole?"
            )
        kinds[layer_id] = LayerKind("shared", owners[layer_type])
    return kinds


def _window(text: Any, layer_id: int, layer_type: str) -> Any:
    """The window that a layer of such a type has, None without one; some configurations have one for each layer."""
    own = getattr(text, "per_layer_config", None) if getattr(text, "is_heterogeneous", False) else None
    return getattr(text if own is None else own[layer_id], _WINDOWS.get(layer_type, ""), None)


def _layer(text: Any, layer_id: int, kind: LayerKind) -> LayerGeometry:
    if not kind.owns_cache:
        return LayerGeometry(kind)
    if kind.name == "latent":
        return LayerGeometry(kind, *read_latent(text), index_dim=_index_dim(text, layer_id))
    if kind.name != "window":
        return LayerGeometry(kind, *read_heads(text, layer_id))
    num_heads, num_kv_heads, *channels = read_heads(text, layer_id, "swa_")
    is_doubled = getattr(text, "model_type", None) in _TWICE_IN_WINDOWS and not hasattr(text, "swa_num_key_value_heads")
    return LayerGeometry(kind, num_heads, 2 * num_kv_heads if is_doubled else num_kv_heads, *channels)


def _index_dim(text: Any, layer_id: int) -> int:
    """The channels of the keys of a layer's index; 0 where it has none, or reads by that of a layer before it."""
    is_indexed = layer_kinds(text)[layer_id if len(layer_kinds(text)) > 1 else 0] == _INDEXED
    types = getattr(text, "indexer_types", None)
    return text.index_head_dim if is_indexed and (types is None or types[layer_id] == "full") else 0


def _refuse_no_full_layer(text: Any, name: str, types: list[str], longest: int | None) -> None:
    windows = [getattr(text, _WINDOWS[kind], None) for kind in types if kind in _WINDOWS]
    if windows and windows[0]:
        raise UnsupportedModelError(
            f"{name!r} has {types[0]} in all layers that have keys: a window of {windows[0]} tokens, shorter than the"
            f" context of {longest}; search with --context-length {windows[0]} and serve at most that many tokens, or"
            " run it with its own cache"
        )
    raise UnsupportedModelError(f"{name!r} has no layer with a KV cache: there is nothing to tune")
