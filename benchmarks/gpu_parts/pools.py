"""Rows of one layer, filled with random keys and values, and batches of requests that read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kvtuner.precision import NATIVE_BITS, WIDE_WORD_BITS
from kvtuner.quant import QuantSpec, Transform
from kvtuner.runtime_loader.packed_attention import PackedRows
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from torch import Tensor

    from gpu_parts.machine import Machine
    from kvtuner.precision import Fit, PrecisionPair, WordBits
    from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention

    Layer = tuple[PackedRows, PackedRows]
    """Keys and values of one layer."""

FILLED_TOKENS: Final = 4096
ALL_TRANSFORMS: Final = "centered+balanced+hadamard"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of a model's attention, the channels of one scale, None for all of a head's, and its word's bits."""

    name: str
    num_kv_heads: int
    gqa: int
    head_dim: int
    group_size: int | None = None
    word_bits: WordBits = WIDE_WORD_BITS

    @property
    def num_heads(self) -> int:
        """The number of query heads."""
        return self.num_kv_heads * self.gqa

    def elements(self, num_tokens: int) -> int:
        """The number of elements of the keys and values of so many tokens."""
        return 2 * self.num_kv_heads * self.head_dim * num_tokens


LLAMA: Final = HeadShape("Llama-3.1-8B", 8, 4, 128)
QWEN: Final = HeadShape("Qwen2.5-7B", 4, 7, 128)
QWEN_OF_TWO: Final = HeadShape("Qwen2.5-7B, TP 2", 2, 7, 128)
LLAMA_OF_EIGHT: Final = HeadShape("Llama-3.1-8B, TP 8", 1, 4, 128)
TINY: Final = HeadShape("tiny", 1, 2, 64)


def value_kind(kind: str) -> str:
    """The transform of values beside keys of a transform: they are rotated where the keys are."""
    return "hadamard" if "hadamard" in kind else "none"


def row_format(
    shape: HeadShape, bits: int, kind: str = "none", *, symmetric: bool = False, fit: Fit = "minmax"
) -> RowFormat:
    """The format of rows; the constants of their transform are random, from a fixed seed."""
    if bits == NATIVE_BITS:
        return RowFormat(shape.num_kv_heads, shape.head_dim, None)
    parts, size = TransformKind.parse(kind), (shape.num_kv_heads, shape.head_dim)
    generator = torch.Generator().manual_seed(bits)
    mu = torch.randn(size, generator=generator).half() if parts.centered else None
    lam = (0.4 * torch.randn(size, generator=generator)).exp().half() if parts.balanced else None
    transform = Transform(parts, mu, lam)
    return RowFormat(*size, QuantSpec(bits, transform, shape.group_size, symmetric, fit, word_bits=shape.word_bits))


def empty_rows(device: torch.device | str, dtype: torch.dtype, row: RowFormat, num_slots: int) -> PackedRows:
    """Rows that nobody has written; `dtype` is that of 16-bit rows."""
    if row.spec is None:
        return PackedRows(torch.empty(num_slots, row.num_heads, row.head_dim, dtype=dtype, device=device), row)
    return PackedRows(torch.empty(num_slots, row.row_bytes(dtype), dtype=torch.uint8, device=device), row)


def empty_layer(
    machine: Machine, shape: HeadShape, pair: PrecisionPair, num_slots: int, kind: str = "none",
    *, symmetric: bool = False, fit: Fit = "minmax",
) -> Layer:  # fmt: skip
    """Keys and values of one layer that nobody has written."""
    keys, values = (
        empty_rows(machine.device, machine.dtype, row, num_slots)
        for row in (
            row_format(shape, bits, side_kind, symmetric=symmetric, fit=fit)
            for bits, side_kind in ((pair.k_bits, kind), (pair.v_bits, value_kind(kind)))
        )
    )
    return keys, values


def states(machine: Machine, num_tokens: int, num_heads: int, head_dim: int, seed: int = 0) -> Tensor:
    """Random keys, values or queries [tokens, num_heads, head_dim]."""
    generator = torch.Generator(machine.device).manual_seed(seed)
    return torch.randn(num_tokens, num_heads, head_dim, generator=generator, device=machine.device).to(machine.dtype)


def keys_and_values(machine: Machine, shape: HeadShape, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Random keys and values, [tokens, num_kv_heads, head_dim] each."""
    k, v = (states(machine, num_tokens, shape.num_kv_heads, shape.head_dim, seed) for seed in (1, 2))
    return k, v


def filled(
    machine: Machine, attention: TritonAttention, shape: HeadShape, pair: PrecisionPair, num_slots: int,
    kind: str = "none",
) -> Layer:  # fmt: skip
    """Keys and values of one layer in every slot; after the first `FILLED_TOKENS` they repeat."""
    layer = empty_layer(machine, shape, pair, num_slots, kind)
    num_tokens = min(FILLED_TOKENS, num_slots)
    slots = torch.arange(num_tokens, device=machine.device)
    attention.store(*layer, slots, *keys_and_values(machine, shape, num_tokens))
    for side in layer:
        for start in range(num_tokens, num_slots, num_tokens):
            part = side.rows[start : start + num_tokens]
            part.copy_(side.rows[: len(part)])
    return layer


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Requests of one length, and where their tokens lie.

    Attributes:
        indptr: The first token of each request, and the end of the last, [requests + 1].
        slots: The token slots, one tensor for every time that the batch is run.
    """

    indptr: Tensor
    slots: list[Tensor]


def batch_of(
    machine: Machine, num_requests: int, length: int, num_slots: int, times: int, page_size: int = 1
) -> RequestBatch:
    """Requests whose pages lie anywhere, elsewhere every time that they are run."""
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
    return RequestBatch(indptr, slots)
