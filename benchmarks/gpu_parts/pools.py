"""Rows of one layer that hold something, and batches of requests that read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kvtuner.precision import NATIVE_BITS
from kvtuner.quant import QuantSpec, Transform
from kvtuner.runtime_loader.packed_attention import PackedRows
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from torch import Tensor

    from gpu_parts.machine import Machine
    from kvtuner.precision import PrecisionPair
    from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention

FILLED_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of a model's attention."""

    name: str
    num_kv_heads: int
    gqa: int
    head_dim: int

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.gqa

    def elements(self, num_tokens: int) -> int:
        """Of keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * num_tokens


LLAMA: Final = Shape("Llama-3.1-8B", 8, 4, 128)
QWEN: Final = Shape("Qwen2.5-7B", 4, 7, 128)
TINY: Final = Shape("tiny", 1, 2, 64)


def row_format(
    shape: Shape, bits: int, kind: str = "none", group_size: int | None = None, *, symmetric: bool = False
) -> RowFormat:
    """How rows are stored; constants of transforms are random and those of a seed."""
    if bits == NATIVE_BITS:
        return RowFormat(shape.num_kv_heads, shape.head_dim, None)
    parts, size = TransformKind.parse(kind), (shape.num_kv_heads, shape.head_dim)
    generator = torch.Generator().manual_seed(bits)
    mu = torch.randn(size, generator=generator).half() if parts.centered else None
    lam = (0.4 * torch.randn(size, generator=generator)).exp().half() if parts.balanced else None
    return RowFormat(*size, QuantSpec(bits, Transform(parts, mu, lam), group_size, symmetric))


def empty_rows(machine: Machine, form: RowFormat, num_slots: int) -> PackedRows:
    """Rows that nobody wrote."""
    if form.spec is None:
        shape: tuple[int, ...] = (num_slots, form.num_heads, form.head_dim)
        return PackedRows(torch.empty(shape, dtype=machine.dtype, device=machine.device), form)
    shape = (num_slots, form.row_bytes(machine.dtype))
    return PackedRows(torch.empty(shape, dtype=torch.uint8, device=machine.device), form)


def states(machine: Machine, num_tokens: int, num_heads: int, head_dim: int, seed: int = 0) -> Tensor:
    """Random keys, values or queries [tokens, num_heads, head_dim]."""
    generator = torch.Generator(machine.device).manual_seed(seed)
    return torch.randn(num_tokens, num_heads, head_dim, generator=generator, device=machine.device).to(machine.dtype)


def filled(
    machine: Machine, attention: TritonAttention, shape: Shape, pair: PrecisionPair, num_slots: int, kind: str = "none"
) -> tuple[PackedRows, PackedRows]:
    """Keys and values of one layer in every slot; after the first some thousand they repeat."""
    v_kind = "hadamard" if "hadamard" in kind else "none"
    sides = [
        empty_rows(machine, row_format(shape, bits, which), num_slots)
        for bits, which in ((pair.k_bits, kind), (pair.v_bits, v_kind))
    ]
    num_tokens = min(FILLED_TOKENS, num_slots)
    k, v = (states(machine, num_tokens, shape.num_kv_heads, shape.head_dim, seed) for seed in (1, 2))
    attention.store(sides[0], sides[1], torch.arange(num_tokens, device=machine.device), k, v)
    for side in sides:
        for start in range(num_tokens, num_slots, num_tokens):
            part = side.rows[start : start + num_tokens]
            part.copy_(side.rows[: len(part)])
    return sides[0], sides[1]


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests of one length, and where their tokens lie.

    Attributes:
        indptr: [requests + 1].
        slots: token slots, one tensor for every time that the batch is run.
    """

    indptr: Tensor
    slots: list[Tensor]


def batch_of(machine: Machine, num_requests: int, length: int, num_slots: int, times: int, page_size: int = 1) -> Batch:
    """Requests whose pages lie anywhere, others every time."""
    num_tokens = num_requests * length
    generator = torch.Generator(machine.device).manual_seed(0)
    in_page = torch.arange(page_size, device=machine.device)
    order = torch.empty(0, dtype=torch.int64, device=machine.device)
    slots = []
    for _ in range(times):
        if len(order) < num_tokens:
            pages = torch.randperm(num_slots // page_size, generator=generator, device=machine.device)
            order = (pages[:, None] * page_size + in_page).flatten()
        slots.append(order[:num_tokens].contiguous())
        order = order[num_tokens:]
    indptr = torch.arange(0, num_tokens + 1, length, dtype=torch.int32, device=machine.device)
    return Batch(indptr, slots)
