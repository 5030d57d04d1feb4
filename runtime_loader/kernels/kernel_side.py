"""The facts that kernels need of keys or values of one layer: prepared once, fixed while serving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from kvtuner.errors import PrecisionError
from kvtuner.precision import FITTED_BITS, NATIVE_BITS, WIDE_WORD_BITS, WordBits, num_slots, used_word_bits
from kvtuner.quant import IDENTITY
from kvtuner.runtime_loader.kernels.transform_steps import KERNEL_STEPS, lanes_of, spread_of

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.packed_attention import PackedRows

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KernelSide:
    """Keys or values of one layer as kernels take them.

    Attributes:
        rows: The int16 units [slots, row units]; native rows as they are.
        words: The rows viewed as int32, scale words or pairs of short ones.
        mu: The mean keys, float32 [num_heads, head_dim]; any tensor where the transform has none.
        lam: The factors lambda, likewise.
        inverse: The inverse 1 / lambda, by IEEE division.
        row: The stride of a row, in elements of `rows`.
        groups: The scales of a head.
        steps: The steps of the transform, in their order.
        symmetric: Whether the grids that are written are symmetric.
        fitted: Whether they are fitted by least squares.
        word_bits: The bits of a scale word.
        token_group: The tokens that share a scale of a channel, and are stored together; 1 for scales of each token.
    """

    rows: Tensor
    words: Tensor
    mu: Tensor
    lam: Tensor
    inverse: Tensor
    row: int
    num_heads: int
    head_dim: int
    bits: int
    groups: int
    steps: tuple[str, ...]
    symmetric: bool
    fitted: bool
    word_bits: WordBits
    token_group: int

    @classmethod
    def of(cls, stored: PackedRows) -> KernelSide:
        """Prepare a pool's rows."""
        row_format, spec = stored.format, stored.format.spec
        word_bits = WIDE_WORD_BITS if spec is None else used_word_bits(spec.bits, spec.word_bits)
        transform = IDENTITY if spec is None else spec.transform
        if row_format.head_dim == 0:
            raise PrecisionError("the kernels take latents (MLA) with rotary channels beside them alone")
        for step in transform.kind.steps:
            if step not in KERNEL_STEPS:
                raise PrecisionError(f"the kernels have no step {step!r} of transform {transform.kind}")
        rows = stored.rows if spec is None else stored.rows.view(torch.int16)
        mu = rows if transform.mu is None else _constant(transform.mu, rows)
        lam = rows if transform.lam is None else _constant(transform.lam, rows)
        return cls(
            rows=rows,
            words=rows if spec is None else stored.rows.view(torch.int32),
            mu=mu,
            lam=lam,
            inverse=rows if transform.lam is None else torch.ones_like(lam) / lam,
            row=rows.stride(0),
            num_heads=row_format.num_heads,
            head_dim=row_format.head_dim,
            bits=row_format.bits,
            groups=1 if spec is None or spec.group_size is None else row_format.head_dim // spec.group_size,
            token_group=row_format.token_group,
            steps=transform.kind.steps,
            symmetric=spec is not None and spec.symmetric,
            word_bits=word_bits,
            fitted=spec is not None and spec.fit == "least_squares" and spec.bits in FITTED_BITS,
        )

    @property
    def centered(self) -> bool:
        """Whether stored keys lack their mean, whose product with a query a caller may have to add."""
        return "centered" in self.steps

    @property
    def has_constants(self) -> bool:
        """Whether the transform has constants, of which values have some where they are latents alone."""
        return "centered" in self.steps or "balanced" in self.steps

    @property
    def padded(self) -> int:
        """Channels of a head, as the next power of two."""
        return int(triton.next_power_of_2(self.head_dim))

    @property
    def stored_lanes(self) -> int:
        """The lanes that share a token where it is stored."""
        if self.head_dim == self.padded or self.bits == NATIVE_BITS:
            return int(lanes_of(self.head_dim))
        return int(spread_of(self.head_dim // num_slots(self.bits)))

    def units(self, heads: int) -> int:
        """Units of so many heads (or native channels), as a power of two that a tensor core takes."""
        return max(16, int(triton.next_power_of_2(heads * self.head_dim // num_slots(self.bits))))


def _constant(values: Tensor, rows: Tensor) -> Tensor:
    return values.to(rows.device, torch.float32).contiguous()
