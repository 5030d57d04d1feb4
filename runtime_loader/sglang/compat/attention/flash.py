"""SGLang's flash attention of variable lengths: where it runs, and its arguments."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.compat.hooks import check_leading

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.sglang.attention.flash_prefill import FlashAttention

_FLASH: Final = "sglang.kernels.ops.attention.flash_attention.flash_attn_varlen_func"
_TAKES: Final = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_VERSION: Final = 3
_HOPPER: Final = 9
_MOST_CHANNELS: Final = 256


def flash_attention(device: torch.device, dtype: torch.dtype, head_dims: set[int]) -> tuple[FlashAttention | None, str]:
    """Return SGLang's flash attention for heads of these channels, or None and why it does not run."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return None, "SGLang takes flash attention 3 on GPUs of compute capability 9.0 alone"
    if dtype not in (torch.float16, torch.bfloat16):
        return None, f"flash attention does not take {dtype}"
    if len(head_dims) > 1 or any(size % 8 or size > _MOST_CHANNELS for size in head_dims):
        return None, f"flash attention does not take heads of {sorted(head_dims)} channels"
    try:
        importlib.import_module("sgl_kernel.flash_attn")  # what the function would load at its first call
        from sglang.kernels.ops.attention.flash_attention import flash_attn_varlen_func
    except Exception as error:  # a package of binaries may raise anything
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    return called_by_place(flash_attn_varlen_func), ""


def check_flash() -> None:
    """Refuse an SGLang whose function begins with other arguments."""
    check_leading(_FLASH, *_TAKES)


def called_by_place(function: Any) -> FlashAttention:
    """Return a function as SGLang has it as a `FlashAttention`."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, queries: Tensor, ends: Tensor, most_queries: int, most_keys: int,
        scale: float, out: Tensor,
    ) -> Tensor:  # fmt: skip
        found: Tensor = function(
            q=q, k=k, v=v, cu_seqlens_q=queries, cu_seqlens_k=ends, max_seqlen_q=most_queries, max_seqlen_k=most_keys,
            softmax_scale=scale, causal=True, ver=_VERSION, out=out,
        )  # fmt: skip
        if not isinstance(found, torch.Tensor):
            raise ServingError(f"{_FLASH} of this SGLang returns no tensor; install a version that kvtuner knows")
        return found

    return attend
