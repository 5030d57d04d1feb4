"""The attention hook: a function that transformers calls with the post-RoPE q, k, v of every layer.

Registered with AttentionInterface and AttentionMaskInterface, so no model code is patched. Sequences are never padded:
attention is causal, and in place of a mask a layer with a window, or one that lets images see all of themselves, is
given what a query sees. Knows nothing of quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from kvtuner.calibration.forward.latents import noted_latent
from kvtuner.calibration.forward.read_plan import AttentionCall, attend
from kvtuner.calibration.forward.seen_tokens import CausalMask, SeenTokens, SelectedTokens, last_tokens
from kvtuner.errors import UnsupportedModelError
from kvtuner.supported_models import INDICES, SINKS, has_indexes, refuse_other_attention

IMPLEMENTATION = "kvtuner"
AttentionHook = Callable[[int, AttentionCall], Tensor]

_hook: ContextVar[AttentionHook | None] = ContextVar("kvtuner_attention_hook", default=None)


@contextmanager
def hooked(hook: AttentionHook | None) -> Iterator[None]:
    """Let `hook(layer_id, call)` compute attention, [batch, num_heads, tokens, v_head_dim]; None is exact attention."""
    token = _hook.set(hook)
    try:
        yield
    finally:
        _hook.reset(token)


def register_hook() -> str:
    """Register the attention and mask functions; idempotent. Returns the implementation's name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    return IMPLEMENTATION


def _mask(
    *_: Any,
    kv_length: int,
    mask_function: Any,
    q_length: int = 0,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
    **__: Any,
) -> SeenTokens | CausalMask | None:
    """What a query sees, in a layer with a window or chunks, or beside images; None where that is all before it.

    A model with indexes, which read a mask in any case, is given that.
    """
    from transformers.masking_utils import causal_mask_function

    if local_size is None and mask_function is causal_mask_function:
        is_read = config is not None and has_indexes(config)
        return CausalMask(q_length, kv_length, torch.device(device)) if is_read else None
    return SeenTokens.of(mask_function, kv_length, torch.device(device), size=local_size)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: SeenTokens | CausalMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    layer_id = getattr(module, "layer_idx", None)
    name = type(module).__name__
    if layer_id is None:
        raise UnsupportedModelError(f"{name} has no layer_idx, so its keys belong to no layer of the cache")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise UnsupportedModelError(f"layer {layer_id} ({name}) is not causal; only decoders have a KV cache to tune")
    if isinstance(attention_mask, Tensor):
        raise UnsupportedModelError(f"layer {layer_id} ({name}) builds its own attention mask, which is not supported")
    sinks, selected = kwargs.pop(SINKS, None), None
    if isinstance(attention_mask, CausalMask):
        attention_mask, indices = None, kwargs.pop(INDICES, None)
        selected = None if indices is None else SelectedTokens.of(indices, key.shape[2])
    refuse_other_attention(f"layer {layer_id} ({name})", kwargs)
    seen = last_tokens(sliding_window) if attention_mask is None and sliding_window else attention_mask
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    latent = noted_latent(module, layer_id)
    call = AttentionCall(query, key, value, scaling, softcap, seen, sinks, latent, selected)
    hook = _hook.get()
    output = attend(call) if hook is None else hook(layer_id, call)
    return output.transpose(1, 2).contiguous(), None
