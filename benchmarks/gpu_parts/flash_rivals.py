"""The rivals that servers decode by on Hopper: SGLang's flash attention 3 over a paged cache, in bf16 and fp8."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gpu_parts.machine import Machine
    from gpu_parts.pools import HeadShape

NAMES: Final = {"sglang fa3": None, "sglang fa3, fp8": torch.float8_e4m3fn}
"""The dtype of the cache of each, None for the model's."""


def flash_kernel() -> Any:
    """SGLang's function."""
    from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

    return flash_attn_with_kvcache


def by_flash(
    machine: Machine, kernel: Any, shape: HeadShape, q: Tensor, length: int, slots: list[Tensor], num_slots: int,
    dtype: torch.dtype | None,
) -> list[Callable[[], object]]:  # fmt: skip
    """Runs of decoding over pages of one token, other ones in each run, as SGLang calls it.

    With a `dtype` queries, keys and values are of it, with scales of 1.
    """
    device, num_requests = machine.device, len(q)
    size = (num_slots, 1, shape.num_kv_heads, shape.head_dim)
    k, v = (torch.randn(size, device=device).to(dtype or machine.dtype) for _ in range(2))
    tables = [each.view(num_requests, length).int() for each in slots]
    scales = torch.ones(num_requests, shape.num_kv_heads, device=device)
    descales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), scales) if dtype else {}
    lengths = torch.full((num_requests,), length, dtype=torch.int32, device=device)
    starts = torch.arange(num_requests + 1, dtype=torch.int32, device=device)
    call = functools.partial(
        kernel, q=q.to(dtype or q.dtype), k_cache=k, v_cache=v, cache_seqlens=lengths, cu_seqlens_q=starts,
        max_seqlen_q=1, softmax_scale=shape.head_dim**-0.5, causal=True, ver=3, **descales,
    )  # fmt: skip
    return [functools.partial(call, page_table=table) for table in tables]
