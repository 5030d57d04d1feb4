"""The rivals that servers attend by: flash attention 3 of SGLang and FlashInfer, over a paged cache in bf16 and fp8."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gpu_parts.machine import Machine
    from gpu_parts.pools import HeadShape

FLASHINFER_WORKSPACE: Final = 256 << 20
"""Bytes for the parts of long requests' outputs."""


def flash_kernel() -> Any:
    """SGLang's function."""
    from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

    return flash_attn_with_kvcache


def by_flash(
    machine: Machine, kernel: Any, shape: HeadShape, q: Tensor, length: int, slots: list[Tensor], num_slots: int,
    dtype: torch.dtype | None, new: int = 1,
) -> list[Callable[[], object]]:  # fmt: skip
    """Runs over pages of one token, other ones in each run, as SGLang calls it.

    The last `new` of a request's tokens are those of its queries. With a `dtype` queries, keys and values are of it,
    with scales of 1.
    """
    device, num_requests = machine.device, len(q) // new
    k, v = _paged(machine, shape, num_slots, dtype)
    tables = [each.view(num_requests, length).int() for each in slots]
    scales = torch.ones(num_requests, shape.num_kv_heads, device=device)
    descales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), scales) if dtype else {}
    lengths = torch.full((num_requests,), length, dtype=torch.int32, device=device)
    starts = new * torch.arange(num_requests + 1, dtype=torch.int32, device=device)
    call = functools.partial(
        kernel, q=q.to(dtype or q.dtype), k_cache=k, v_cache=v, cache_seqlens=lengths, cu_seqlens_q=starts,
        max_seqlen_q=new, softmax_scale=shape.head_dim**-0.5, causal=True, ver=3, **descales,
    )  # fmt: skip
    return [functools.partial(call, page_table=table) for table in tables]


def flashinfer_wrapper() -> Any:
    """FlashInfer's class."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    return BatchDecodeWithPagedKVCacheWrapper


def by_flashinfer(
    machine: Machine, wrapper: Any, shape: HeadShape, q: Tensor, length: int, slots: list[Tensor], num_slots: int,
    dtype: torch.dtype | None,
) -> list[Callable[[], object]]:  # fmt: skip
    """Runs of decoding over pages of one token, other ones in each run, planned as SGLang plans them.

    With a `dtype` keys and values are of it, with scales of 1, and queries stay as they are.
    """
    device, num_requests = machine.device, len(q)
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    indptr = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * length
    last = torch.ones(num_requests, dtype=torch.int32, device=device)
    planned = []
    for each in slots:
        # SGLang's rule: a product of fewer than four queries is not worth the tensor cores.
        one = wrapper(workspace, "NHD", use_tensor_cores=dtype is not None or shape.gqa >= 4)
        one.plan(
            indptr, each.int(), last, shape.num_heads, shape.num_kv_heads, shape.head_dim, 1,
            q_data_type=q.dtype, kv_data_type=dtype or machine.dtype, sm_scale=shape.head_dim**-0.5,
        )  # fmt: skip
        planned.append(one)
    cache = _paged(machine, shape, num_slots, dtype)
    return [functools.partial(one.run, q, cache) for one in planned]


def flashinfer_prefill_wrapper() -> Any:
    """FlashInfer's class for many queries of a request."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    return BatchPrefillWithPagedKVCacheWrapper


def prefill_by_flashinfer(
    machine: Machine, wrapper: Any, shape: HeadShape, q: Tensor, length: int, slots: list[Tensor], num_slots: int,
    dtype: torch.dtype | None, new: int,
) -> list[Callable[[], object]]:  # fmt: skip
    """Runs of prefill over pages of one token, which hold the new ones too: the last `new` of each request."""
    device, num_requests = machine.device, len(q) // new
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    requests = torch.arange(num_requests + 1, dtype=torch.int32, device=device)
    last = torch.ones(num_requests, dtype=torch.int32, device=device)
    cache = _paged(machine, shape, num_slots, dtype)
    planned = []
    for each in slots:
        one = wrapper(workspace, "NHD")
        one.plan(
            new * requests, length * requests, each.int(), last, shape.num_heads, shape.num_kv_heads, shape.head_dim,
            1, causal=True, q_data_type=q.dtype, kv_data_type=dtype or machine.dtype, sm_scale=shape.head_dim**-0.5,
        )  # fmt: skip
        planned.append(one)
    return [functools.partial(one.run, q, cache) for one in planned]


def _paged(machine: Machine, shape: HeadShape, num_slots: int, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Keys and values [slots, 1, KV heads, channels]."""
    size = (num_slots, 1, shape.num_kv_heads, shape.head_dim)
    k, v = (torch.randn(size, device=machine.device).to(dtype or machine.dtype) for _ in range(2))
    return k, v


class FlashRival(NamedTuple):
    """A rival: the dtype of its cache, None for the model's, what imports its kernel, and what makes runs of that."""

    dtype: torch.dtype | None
    load: Callable[[], Any]
    runs: Callable[..., list[Callable[[], object]]]


def _rivals(flashinfer: Callable[[], Any], planned: Callable[..., Any]) -> dict[str, FlashRival]:
    return {
        f"{name}{', fp8' if dtype else ''}": FlashRival(dtype, load, runs)
        for name, load, runs in (("sglang fa3", flash_kernel, by_flash), ("flashinfer", flashinfer, planned))
        for dtype in (None, torch.float8_e4m3fn)
    }


FLASH_RIVALS: Final = _rivals(flashinfer_wrapper, by_flashinfer)
"""The rivals that decode."""
PREFILL_RIVALS: Final = _rivals(flashinfer_prefill_wrapper, prefill_by_flashinfer)
"""The rivals that prefill, whose runs also take the new tokens of a request."""
