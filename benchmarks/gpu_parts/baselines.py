"""The baselines of the kernels: attention over bf16, and the straightforward kernel over the same rows."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_parts import dequantize_then_dot
from kvtuner.precision import PrecisionPair
from kvtuner.runtime_loader.kernels import launch
from kvtuner.runtime_loader.kernels.extend_and_merge import merge_splits
from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
from kvtuner.runtime_loader.kernels.launch_settings import LOG2_E, WIDE, DecodeLaunch, Device

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gpu_parts.machine import Machine
    from gpu_parts.pools import HeadShape
    from kvtuner.runtime_loader.packed_attention import PackedRows

NATIVE: Final = PrecisionPair(16, 16)
SGLANG_SPLITS: Final = (8, 32)
"""SGLang's default number of splits, and one that fills more of a device at batch 1."""
SGLANG_LAUNCH: Final = DecodeLaunch(tokens=32, warps=4, stages=2, asm=False, tile=WIDE)
SDPA: Final = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def sglang_kernels() -> tuple[Any, str]:
    """SGLang's decode kernel, or None and the reason why it cannot be imported."""
    try:
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    except Exception as error:  # the import of another package may raise anything
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    return decode_attention_fwd, ""


def _outputs(machine: Machine, shape: HeadShape, num_requests: int, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the outputs of splits in float32, for their logarithms of sums, and for the output."""
    size = (num_requests, shape.num_heads, splits)
    partial = torch.empty(*size, shape.head_dim, dtype=torch.float32, device=machine.device)
    lse = torch.empty(size, dtype=torch.float32, device=machine.device)
    out = torch.empty(num_requests, shape.num_heads, shape.head_dim, dtype=machine.dtype, device=machine.device)
    return partial, lse, out


def by_sglang(
    kernel: Any, machine: Machine, shape: HeadShape, keys: PackedRows, values: PackedRows, num_requests: int,
    splits: int,
) -> Callable[..., Tensor]:  # fmt: skip
    """A function that runs SGLang's own Triton kernel over these bf16 rows, or over others."""
    logits, lse, out = _outputs(machine, shape, num_requests, splits)
    num_splits = torch.full((num_requests,), splits, dtype=torch.int32, device=machine.device)

    def run(q: Tensor, indptr: Tensor, slots: Tensor, keys: PackedRows = keys, values: PackedRows = values) -> Tensor:
        kernel(
            q, keys.rows, values.rows, out, indptr, slots, logits, lse, num_splits, splits, shape.head_dim**-0.5,
            1.0, 1.0,
        )  # fmt: skip
        return out

    return run


def of_torch(machine: Machine) -> list[str]:
    """The names of torch's kernels."""
    return ["torch math"] if machine.smoke else list(SDPA)


def attended_by_torch(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of grouped queries [requests, KV heads, queries, head_dim] by one of torch's kernels."""
    with sdpa_kernel(SDPA.get(name, SDPBackend.MATH)):
        return scaled_dot_product_attention(q, k, v)


def by_torch(
    machine: Machine, name: str, shape: HeadShape, q: Tensor, length: int, copies: int
) -> list[Callable[[], object]]:
    """Runs of attention over contiguous bf16 keys and values, other ones in each run: no pages, no gather.

    Queries that share a KV head run as queries of one head, since torch would copy the keys for each.
    """
    size = (copies, len(q), shape.num_kv_heads, length, shape.head_dim)
    k, v = (torch.empty(size, dtype=machine.dtype, device=machine.device).normal_() for _ in range(2))
    grouped = q.unflatten(1, (shape.num_kv_heads, shape.gqa))
    return [functools.partial(attended_by_torch, name, grouped, k[copy], v[copy]) for copy in range(copies)]


def by_dequantizing(
    machine: Machine, shape: HeadShape, keys: PackedRows, values: PackedRows, num_requests: int
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function that runs the straightforward kernel, launched as SGLang launches its own."""
    sides = KernelSide.of(keys), KernelSide.of(values)
    splits = Device.of(machine.device).splits(SGLANG_LAUNCH, num_requests, shape.num_kv_heads)
    partial, lse, out = _outputs(machine, shape, num_requests, splits)
    names = dequantize_then_dot.decode_split.arg_names
    facts = launch.decode_facts(*sides, shape.gqa, SGLANG_LAUNCH)
    facts = {name: value for name, value in facts.items() if name in names}

    def run(q: Tensor, indptr: Tensor, slots: Tensor) -> Tensor:
        dequantize_then_dot.decode_split[(shape.num_kv_heads, splits, num_requests)](
            q, q.stride(0), q.stride(1), sides[0].rows, sides[0].words, sides[1].rows, sides[1].words, indptr, slots,
            partial, lse, shape.head_dim**-0.5 * LOG2_E, splits, **facts, num_warps=SGLANG_LAUNCH.warps,
            num_stages=SGLANG_LAUNCH.stages,
        )  # fmt: skip
        merge_splits[(num_requests, shape.num_heads)](
            partial, lse, indptr, out, out.stride(0), out.stride(1), splits, num_requests, DIM=shape.head_dim,
            PADDED=triton.next_power_of_2(shape.head_dim), STEPS=(), EXTEND=False, EXACT_PARTS=0,
            **launch.merge_facts(replace(SGLANG_LAUNCH, min_split=1), splits),
        )  # fmt: skip
        return out

    return run
