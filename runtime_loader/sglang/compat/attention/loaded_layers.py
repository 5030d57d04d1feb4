"""The attention layers of a model that SGLang has loaded, compared with what a profile has of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.compat.hooks import AROUND, install
from kvtuner.runtime_loader.sglang.process_state import process_state, refusing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.nn import Module

    from kvtuner.layer_geometry import CacheGeometry

logger: Final = logging.getLogger("kvtuner")

_DISPATCH: Final = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method"


def check_attention_layers(model: Module, context_length: int, windows: Mapping[int, int] | None = None) -> None:
    """Refuse a loaded model unless every attention layer reads its whole past, and nothing else.

    A layer of `windows`, by its global id, reads as many tokens instead. One token more is taken away: SGLang's code
    for Gemma 3n gives it to layers, and the right number to its attention.
    """
    scaled: set[float | None] = set()
    longer: set[int] = set()
    for name, module in attention_layers(model):
        if module.attn_type != AttentionType.DECODER or module.is_cross_attention:
            raise ServingError(f"{name} of this model is not a decoder's attention; serve it without a profile")
        if module.xai_temperature_len > 0:
            raise ServingError(f"{name} of this model scales its scores by position; serve it without a profile")
        if module.sliding_window_size > -1:
            # SGLang counts the tokens before the query. A window that is at least as long as the context is none.
            window = module.sliding_window_size + 1
            wanted = (windows or {}).get(module.layer_id)
            if wanted is not None and window == wanted + 1:
                longer.add(window)
                module.sliding_window_size -= 1
                continue
            if window == wanted:
                continue
            if window < context_length:
                raise ServingError(
                    f"{name} of this model has a window of {window} tokens, shorter than the context of"
                    f" {context_length}, which the profile does not have; serve with --context-length {window}"
                )
            module.sliding_window_size = -1
        elif windows and module.layer_id in windows:
            raise ServingError(
                f"{name} of this model reads all tokens in SGLang, but by its profile the last"
                f" {windows[module.layer_id]}; serve it without a profile"
            )
        scaled |= {module.k_scale_float, module.v_scale_float} - {None, 1.0}  # 1.0 where the checkpoint has none
    for window in longer:
        logger.info(
            "kvtuner: layers read windows of %d tokens as configured, for which SGLang's code has %d",
            window - 1,
            window,
        )
    if scaled:
        logger.warning("kvtuner: the checkpoint's scales for an fp8 cache are not used: packed rows have their own")


def read_absorbed(model: Module, channels: tuple[int, int]) -> None:
    """Let a loaded model read latents as keys and values in every forward, by queries that absorb its projections.

    SGLang expands the keys and values of prompts without a prefix otherwise. An attention layer that reads anything
    else than a latent of `channels`, its own and rotary ones, is a `ServingError`, and so are scales of an fp8 cache.
    """
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    def absorbed(original: Callable[..., Any], self: Any, forward_batch: Any) -> Any:
        method = original(self, forward_batch)  # which notes the backend too
        if method not in (AttnForwardMethod.MHA, AttnForwardMethod.MLA):
            with refusing():
                raise ServingError(f"SGLang reads latents by {method.name} here, which no packed pool has")
        return AttnForwardMethod.MLA

    expanded = {id(module.attn_mha) for module in model.modules() if isinstance(module, DeepseekV2AttentionMLA)}
    for name, module in attention_layers(model):
        if id(module) in expanded:
            continue
        if (module.tp_k_head_num, module.qk_head_dim, module.v_head_dim) != (1, sum(channels), channels[0]):
            raise ServingError(
                f"{name} of this model does not read latents of {channels[0]} and {channels[1]} channels in SGLang;"
                " serve it without a profile"
            )
        if {module.k_scale_float, module.v_scale_float} - {None, 1.0}:
            raise ServingError(
                f"{name} of this model has the checkpoint's scales for an fp8 cache, by which SGLang divides latents;"
                " serve it without a profile"
            )
        module.k_scale = module.v_scale = None  # scales of 1, by which it would store a copy
    process_state().hook_once("absorbed", lambda: install(_DISPATCH, absorbed, AROUND, "forward_batch"))


def check_windows(runner: Any, windows: Mapping[int, int]) -> None:
    """Refuse a model runner whose attention has not the one window of a model's layers, by their global ids."""
    if not windows:
        return
    size = runner.sliding_window_size
    wanted = sorted(set(windows.values()))
    if size is None or wanted != [size + 1]:
        has = "no window" if size is None else f"one window of {size + 1} tokens"
        raise ServingError(
            f"SGLang's attention has {has} for this model, whose layers have windows of"
            f" {' and '.join(map(str, wanted))} tokens; serve it without a profile"
        )


def check_readers(model: Module, geometry: CacheGeometry) -> None:
    """Refuse a loaded model whose layers read others' keys than its configuration says, where any reads another's.

    SGLang gives the attention of such a layer the id of the one that it reads.
    """
    if not geometry.num_shared_layers:
        return
    read = [int(module.layer_id) for _, module in attention_layers(model)]
    wanted = [geometry.owner_of(layer_id) for layer_id in geometry.readers]
    if len(read) != len(wanted):
        raise ServingError(
            f"this model has {len(read)} layers with attention in SGLang and {len(wanted)} by its configuration; serve"
            " it without a profile"
        )
    for layer_id, other, owner in zip(geometry.readers, read, wanted, strict=True):
        if other != owner:
            raise ServingError(
                f"layer {layer_id} of this model reads the keys of layer {other} in SGLang, but by its configuration"
                f" those of layer {owner}; serve it without a profile"
            )


def first_attention_layer(model: Module) -> int:
    """The global id of the first layer with attention on this rank; a `ServingError` where there is none."""
    layer_ids = [int(module.layer_id) for _, module in attention_layers(model)]
    if not layer_ids:
        raise ServingError("SGLang's code for this model has no attention of its own; serve it without a profile")
    return min(layer_ids)


def attention_layers(model: Module) -> Iterator[tuple[str, RadixAttention]]:
    """The name and the attention of every layer of a loaded model on this rank."""
    for name, module in model.named_modules():
        if isinstance(module, RadixAttention):
            yield name, module
    # Where SGLang runs transformers' code of a model, these are no modules of it.
    for layer_id, module in getattr(model, "attention_instances", {}).items():
        yield f"attention_instances.{layer_id}", module
