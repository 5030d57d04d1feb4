"""SGLang's Triton backend: its class, its kernels' arguments, and the token slots that it lists."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.compat.attention.backend_registry import build_by
from kvtuner.runtime_loader.sglang.compat.attention.loaded_layers import attention_layers
from kvtuner.runtime_loader.sglang.compat.hooks import AROUND, check_leading, check_named, install
from kvtuner.runtime_loader.sglang.options.option_rules import METADATA_BACKEND
from kvtuner.runtime_loader.sglang.process_state import process_state, refusing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


__all__ = [
    "TritonAttnBackend", "let_text_run_beside_images", "list_window_slots", "on_triton_backend", "read_by_chunks",
    "refuse_unserved",
]  # fmt: skip

logger: Final = logging.getLogger("kvtuner")

_BACKEND = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
_KERNELS = "sglang.kernels.ops.attention"
_MASKS: Final = "sglang.srt.models.gemma3_mm.Gemma3ForConditionalGeneration.prepare_attn_masks"
_SLOTS: Final = "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.pack_read_stream"
_NO_IMAGES: Final = SimpleNamespace(mm_items=())

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
    for name, module in attention_layers(runner.model):
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


def refuse_unserved(arguments: dict[str, Any]) -> None:
    """Refuse by name what SGLang's kernels take and a packed pool does not know."""
    for name, served in _SERVED.items():
        if arguments.get(name, served) is not served:
            raise ServingError(f"this model's attention needs {name}, which a packed KV pool does not have")
    if arguments.get("xai_temperature_len", -1) > 0 or arguments.get("sliding_window_size", -1) > 0:
        raise ServingError("this model's attention has a window or a temperature, which a packed KV pool does not have")
