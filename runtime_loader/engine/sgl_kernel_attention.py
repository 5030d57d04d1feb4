"""The attention of sgl_kernel's `flash_attn_with_kvcache` over unquantized pages, on GPUs that it has kernels for."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtuner.errors import ServingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvtuner.runtime_loader.engine.paged_pool import PagedPool
    from kvtuner.runtime_loader.engine.step_batch import StepPart
    from kvtuner.runtime_loader.packed_attention import PackedRows, ScoreScaling

HOPPER: Final = 9
MOST_CHANNELS: Final = 256
_TAKES: Final = (
    "q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "softmax_scale", "causal",
    "softcap",
)  # fmt: skip


def sgl_kernel_refusal(pool: PagedPool) -> str | None:
    """The reason why sgl_kernel cannot attend over a pool; None where it can."""
    if pool.is_packed:
        return "sgl_kernel reads no packed rows"
    if pool.device.type != "cuda" or torch.cuda.get_device_capability(pool.device)[0] != HOPPER:
        return f"sgl_kernel has flash attention 3 for GPUs of compute capability 9.0 alone, and this is {pool.device}"
    return _unserved_shape(pool) or _missing()


def _unserved_shape(pool: PagedPool) -> str | None:
    """The reason why flash attention takes no pages of this dtype or these heads."""
    if pool.shape.dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention does not take {pool.shape.dtype}"
    channels = {side.shape[2] for layer in pool.layers for side in layer}
    if len(channels) > 1 or any(size % 8 or size > MOST_CHANNELS for size in channels):
        return f"flash attention does not take heads of {sorted(channels)} channels"
    return None


def _missing() -> str | None:
    try:
        function = _installed()
    except Exception as error:  # a package of binaries may raise anything
        return f"{type(error).__name__}: {error}".splitlines()[0] + "; pip install sglang-kernel"
    return unknown_arguments(function)


def unknown_arguments(function: Callable[..., Any]) -> str | None:
    """The reason why a function is not the one that is known here: an argument that it does not take."""
    lacking = [name for name in _TAKES if name not in signature(function).parameters]
    if lacking:
        return f"flash_attn_with_kvcache of this sgl_kernel does not take {', '.join(lacking)}"
    return None


def _installed() -> Callable[..., Any]:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    function: Callable[..., Any] = flash_attn_with_kvcache
    return function


class SglKernelAttention:
    """`StepAttention` by one call for all requests of a part, which reads pages where they lie.

    New tokens are stored first and are the last that `cache_seqlens` counts: the function aligns its causal mask to
    the end, so chunks and single tokens are the same call.
    """

    name = "sgl_kernel"
    reads_pages = True

    def __init__(self, pool: PagedPool, flash: Callable[..., Any]) -> None:
        self._pool, self._flash = pool, flash

    @classmethod
    def installed(cls, pool: PagedPool) -> SglKernelAttention:
        """The attention by the installed package."""
        return cls(pool, _installed())

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, part: StepPart, scores: ScoreScaling) -> Tensor:
        """See `StepAttention.prefill`."""
        return self._attend(layer, q, k, v, part, scores)

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, part: StepPart, scores: ScoreScaling) -> Tensor:
        """See `StepAttention.decode`."""
        return self._attend(layer, q, k, v, part, scores)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, part: StepPart, scores: ScoreScaling) -> Tensor:
        assert part.paged is not None
        keys, values = self._pool.sides(layer)
        keys.write(part.new_slots, k)
        values.write(part.new_slots, v)
        output = self._flash(
            q=q.contiguous(), k_cache=self._pages(keys), v_cache=self._pages(values), cache_seqlens=part.paged.lengths,
            page_table=part.paged.pages, cu_seqlens_q=part.tokens.int(), max_seqlen_q=part.longest,
            softmax_scale=scores.scale, causal=True, softcap=scores.logit_cap,
        )  # fmt: skip
        if not isinstance(output, torch.Tensor):
            raise ServingError("flash_attn_with_kvcache of this sgl_kernel returns no tensor; choose another attention")
        return output

    def _pages(self, stored: PackedRows) -> Tensor:
        """The rows as pages, [pages, page_size, num_kv_heads, channels]."""
        return stored.rows.view(-1, self._pool.shape.page_size, *stored.shape[1:])
