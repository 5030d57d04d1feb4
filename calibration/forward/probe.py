"""Whether a model's attention is what its configuration says, by one forward of a few tokens. Knows no layers' code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtuner.calibration.forward.latents import CACHE_ARGUMENT, LatentRecorder
from kvtuner.calibration.forward.trace import is_same
from kvtuner.errors import UnsupportedModelError
from kvtuner.layer_geometry import CacheGeometry, LayerGeometry, index_text
from kvtuner.layer_ranges import write_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.calibration.forward.read_plan import AttentionCall
    from kvtuner.calibration.forward.trace import LayerCall


def check_attention(
    name: str, cache: CacheGeometry, calls: Sequence[tuple[int, AttentionCall]]
) -> tuple[CacheGeometry, int]:
    """Check the attention of all layers of a model of that name, in order, each with the layer that it came from.

    Returns:
        The cache with the heads and channels that layers with a window have, and the numbers of one token that all
        layers cache, and of keys and values that are made of latents.

    Raises:
        UnsupportedModelError: A layer attends not at all or twice, with other heads or another window than the
            configuration says, or reads keys that are not those of the layer whose cache it should read.
    """
    _check_order(name, cache, [layer_id for layer_id, _ in calls])
    layers, num_elements, by_layer = list(cache.layers), 0, dict(calls)
    for layer_id, call in calls:
        layer, place = layers[layer_id], f"{name}: layer {layer_id}"
        if layer.kind.name == "latent":
            num_elements += call.k[0, :, 0].numel() + call.v[0, :, 0].numel()
        elif layer.kind.name == "shared":
            _check_reader(place, layer, call, by_layer[cache.owner_of(layer_id)])
        elif layer.kind.name == "window":
            _check_window(place, layer, call)
            layers[layer_id] = LayerGeometry(layer.kind, *_heads(call))
        elif _heads(call) != (layer.num_attention_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim):
            expected = (layer.num_attention_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim)
            raise UnsupportedModelError(
                f"{place} has (query heads, KV heads, head_dim, v_head_dim) = {_heads(call)}, its configuration says"
                f" {expected}"
            )
    return CacheGeometry(tuple(layers)), num_elements + sum(layer.num_elements for layer in layers)


def check_indexes(name: str, cache: CacheGeometry, calls: Sequence[LayerCall]) -> None:
    """Check the calls of all layers of a model of that name: their indexes gave keys as the configuration says.

    Raises:
        UnsupportedModelError: A layer's index has keys of other channels, or keys though it should have none.
    """
    for layer_id, (layer, call) in enumerate(zip(cache.layers, calls, strict=True)):
        recorder = call.kwargs.get(CACHE_ARGUMENT)
        given = recorder.index_dim if isinstance(recorder, LatentRecorder) else 0
        if given != layer.index_dim:
            raise UnsupportedModelError(
                f"{name}: layer {layer_id} has {index_text(layer.index_dim)} by its configuration, but"
                f" {index_text(given)} by the keys that its cache is given"
            )


def _check_order(name: str, cache: CacheGeometry, ids: list[int]) -> None:
    expected = cache.readers
    if ids != list(expected):
        raise UnsupportedModelError(
            f"{name} has no attention hook in every layer: {len(expected)} layers are expected to call transformers'"
            f" AttentionInterface once each, in order, layers {write_layers(expected)}, but the calls came from layers"
            f" {ids}"
        )


def _check_window(place: str, layer: LayerGeometry, call: AttentionCall) -> None:
    if call.seen is None or call.seen.size != layer.kind.number:
        size = "none" if call.seen is None else f"one of {call.seen.size} tokens"
        raise UnsupportedModelError(
            f"{place} has kind {layer.kind} by its configuration, but its attention is given {size}"
        )


def _check_reader(place: str, layer: LayerGeometry, call: AttentionCall, owner: AttentionCall) -> None:
    """Check that a layer without keys of its own reads another one's, and sees as many of them."""
    sizes = [None if seen is None else seen.size for seen in (call.seen, owner.seen)]
    is_other = call.k.shape != owner.k.shape or call.v.shape != owner.v.shape
    if is_other or not (is_same(call.k, owner.k) and is_same(call.v, owner.v)):
        raise UnsupportedModelError(
            f"{place} has kind {layer.kind} by its configuration, but reads other keys and values than layer"
            f" {layer.kind.number}'s: such models need a release of transformers in which it reads those"
        )
    if sizes[0] != sizes[1]:
        raise UnsupportedModelError(
            f"{place} has kind {layer.kind} by its configuration, but sees {sizes[0] or 'all'} tokens where layer"
            f" {layer.kind.number} sees {sizes[1] or 'all'}"
        )


def _heads(call: AttentionCall) -> tuple[int, int, int, int]:
    return call.q.shape[1], call.k.shape[1], call.k.shape[3], call.v.shape[3]
