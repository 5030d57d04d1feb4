"""SGLang's attention: the Triton backend's class, its kernels' arguments, and who makes it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.compat.attention.backend_registry import build_by
from kvtuner.runtime_loader.sglang.compat.hooks import AROUND, check_leading, check_named, install
from kvtuner.runtime_loader.sglang.options.option_rules import METADATA_BACKEND
from kvtuner.runtime_loader.sglang.process_state import process_state, refusing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.nn import Module

    from kvtuner.layer_geometry import CacheGeometry

__all__ = [
    "TritonAttnBackend", "check_attention_layers", "check_readers", "check_windows", "first_attention_layer",
    "let_text_run_beside_images", "list_window_slots", "on_triton_backend", "read_absorbed", "read_by_chunks",
    "refuse_unserved",
]  # fmt: skip

logger: Final = logging.getLogger("kvtuner")

_BACKEND = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
_KERNELS = "sglang.kernels.ops.attention"
_MASKS: Final = "sglang.srt.models.gemma3_mm.Gemma3ForConditionalGeneration.prepare_attn_masks"
_SLOTS: Final = "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.pack_read_stream"
_NO_IMAGES: Final = SimpleNamespace(mm_items=())
_DISPATCH: Final = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method"

# What the backend passes by position.
_DECODE = (
    "q", "k_buffer", "v_buffer", "o", "kv_indptr", "kv_indices", "attn_logits", "attn_lse", "num_kv_splits",
    "max_kv_splits", "sm_scale", "k_scale", "v_scale",
)  # fmt: skip
_EXTEND = (
    "q_extend", "k_extend", "v_extend", "o_extend", "k_buffer", "v_buffer", "qo_indptr", "kv_indptr", "kv_indices",
    "custom_mask", "is_causal", "mask_indptr", "max_len_extend", "k_scale", "v_scale", "sm_scale",
)  # fmt: skip

# What is passed by name, and cuts what layers read that are not packed.
_CUTS = ("sliding_window_size", "window_kv_offsets", "skip_prefix_custom_mask", "extend_seq_lens_cpu")
_READ_STREAM = ("req_pool_indices", "seq_lens", "indptr", "out", "kv_start_idx", "token_mapping")

# The arguments of SGLang's kernels that packed rows serve at one value alone.
_SERVED = {
    "is_causal": True,
    **dict.fromkeys(("custom_mask", "score_mod", "aux_tensors", "window_kv_offsets")),
}


def on_triton_backend(make: Callable[[Any], Any | None]) -> None:
    """Let `make` build the backend named triton of a model runner; where it gives None, SGLang's own is built."""
    check_leading(f"{_BACKEND}._forward_extend_kernel", "self", "layer")
    check_leading(f"{_BACKEND}._set_kv_buffer", "self", "forward_batch", "layer", "loc_info", "k", "v")
    for method in ("forward_decode", "forward_extend"):
        check_leading(f"{_BACKEND}.{method}", "self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")
    check_leading(f"{_KERNELS}.decode_attention.decode_attention_fwd", *_DECODE)
    check_leading(f"{_KERNELS}.extend_attention.extend_attention_fwd", *_EXTEND)
    check_named(f"{_KERNELS}.extend_attention.extend_attention_fwd", *_CUTS)
    check_leading(f"{_BACKEND}.init_forward_metadata", "self", "forward_batch")
    check_leading(f"{_BACKEND}._update_decode_kv_buffers", "self", "plan", "bs", "seq_lens", "req_pool_indices")
    check_leading(_SLOTS, "self", "plan")
    check_named(_SLOTS, *_READ_STREAM)
    build_by(METADATA_BACKEND, make)


def read_by_chunks(runner: Any, chunks: Mapping[int, int]) -> None:
    """Let the layers of a model runner that read chunks, by their global ids, take the token slots of windows.

    SGLang's code gives them no window, so that its Triton attention would look for all tokens in the windows' part.
    """
    for name, module in _attention_layers(runner.model):
        size = chunks.get(module.layer_id)
        if module.use_irope != (size is not None) or size not in (None, runner.sliding_window_size):
            what = f"chunks of {runner.sliding_window_size} tokens" if module.use_irope else "all tokens"
            by_profile = "all tokens" if size is None else f"chunks of {size} tokens"
            raise ServingError(
                f"{name} of this model reads {what} in SGLang, but by its profile {by_profile}: SGLang answers"
                " this model otherwise than transformers, without a profile too; run it by KVTunerCache"
            )
        if size is not None:
            module.sliding_window_size = size - 1  # SGLang counts the tokens before the query


def list_window_slots(
    backend: TritonAttnBackend, plan: Any, requests: torch.Tensor, ends: torch.Tensor, lengths: torch.Tensor,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The bounds and token slots of the last `lengths` tokens before `ends` of requests, where their windows lie.

    Written to where the backend has bounds of windows, and to `out`, if given.
    """
    bounds = backend.window_kv_indptr[: len(lengths) + 1]
    bounds[1:] = lengths.cumsum(0)
    if out is None:
        out = torch.empty(int(bounds[-1]), dtype=torch.int64, device=lengths.device)
    pool, translator = backend.token_to_kv_pool, backend.kv_index_translator
    mapping = pool.full_to_swa_index_mapping if isinstance(pool, SWAKVPool) else None
    is_mapped = translator.pack_read_stream(
        plan, req_pool_indices=requests, seq_lens=lengths, indptr=bounds, out=out, kv_start_idx=ends - lengths,
        token_mapping=mapping,
    )  # fmt: skip
    if is_mapped != (mapping is not None):
        with refusing():
            raise ServingError(
                "SGLang has listed the slots of chunks in another part of its pool than that of windows; install a"
                " version that kvtuner is tested with"
            )
    return bounds, out


def check_attention_layers(model: Module, context_length: int, windows: Mapping[int, int] | None = None) -> None:
    """Refuse a loaded model unless every attention layer reads its whole past, and nothing else.

    A layer of `windows`, by its global id, reads as many tokens instead. One token more is taken away: SGLang's code
    for Gemma 3n gives it to layers, and the right number to its attention.
    """
    scaled: set[float | None] = set()
    longer: set[int] = set()
    for name, module in _attention_layers(model):
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
    for name, module in _attention_layers(model):
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


def let_text_run_beside_images() -> None:
    """Let SGLang make masks of a batch that has requests without an image too: its code for Gemma 3 raises there."""

    def beside_text(original: Callable[..., Any], self: Any, forward_batch: Any, *rest: Any, **options: Any) -> Any:
        inputs = forward_batch.mm_inputs
        forward_batch.mm_inputs = [_NO_IMAGES if each is None else each for each in inputs]
        try:
            return original(self, forward_batch, *rest, **options)
        finally:
            forward_batch.mm_inputs = inputs

    process_state().hook_once("masks", lambda: install(_MASKS, beside_text, AROUND, "forward_batch"))


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
    read = [int(module.layer_id) for _, module in _attention_layers(model)]
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
    layer_ids = [int(module.layer_id) for _, module in _attention_layers(model)]
    if not layer_ids:
        raise ServingError("SGLang's code for this model has no attention of its own; serve it without a profile")
    return min(layer_ids)


def _attention_layers(model: Module) -> Iterator[tuple[str, RadixAttention]]:
    """The name and the attention of every layer of a loaded model on this rank."""
    for name, module in model.named_modules():
        if isinstance(module, RadixAttention):
            yield name, module
    # Where SGLang runs transformers' code of a model, these are no modules of it.
    for layer_id, module in getattr(model, "attention_instances", {}).items():
        yield f"attention_instances.{layer_id}", module


def refuse_unserved(arguments: dict[str, Any]) -> None:
    """Refuse by name what SGLang's kernels take and a packed pool does not know."""
    for name, served in _SERVED.items():
        if arguments.get(name, served) is not served:
            raise ServingError(f"this model's attention needs {name}, which a packed KV pool does not have")
    if arguments.get("xai_temperature_len", -1) > 0 or arguments.get("sliding_window_size", -1) > 0:
        raise ServingError("this model's attention has a window or a temperature, which a packed KV pool does not have")
