"""The facts that kernels need of keys or values of one layer: prepared once, fixed while serving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import triton

from kvtuner.errors import PrecisionError
from kvtuner.quant import IDENTITY, hadamard_block

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.packed_attention import PackedRows

Facts = dict[str, Any]
KERNEL_STEPS: Final = {"centered", "balanced", "hadamard"}


@dataclass(frozen=True, slots=True)
class KernelSide:
    """Keys or values of one layer as kernels take them.

    Attributes:
        rows: The int16 units [slots, row units]; native rows as they are.
        words: The rows viewed as int32.
        mu: The mean keys, float32 [num_heads, head_dim]; any tensor where the transform is not `centered`.
        lam: The factors lambda, likewise where it is not `balanced`.
        inverse: The inverse 1 / lambda, by IEEE division.
        row: The stride of a row, in elements of `rows`.
        groups: The scales of a head.
        stages: The stages of the Hadamard's butterfly; 0 for none.
        symmetric: Whether the grid that is written is symmetric.
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
    stages: int
    centered: bool
    balanced: bool
    symmetric: bool

    @classmethod
    def of(cls, stored: PackedRows) -> KernelSide:
        """Prepare a pool's rows."""
        row_format, spec = stored.format, stored.format.spec
        transform = IDENTITY if spec is None else spec.transform
        if missing := set(transform.kind.steps) - KERNEL_STEPS:
            raise PrecisionError(f"the kernels have no step {min(missing)!r} of transform {transform.kind}")
        rows = stored.rows if spec is None else stored.rows.view(torch.int16)
        mu = rows if transform.mu is None else _constant(transform.mu, rows)
        lam = rows if transform.lam is None else _constant(transform.lam, rows)
        stages = hadamard_block(row_format.head_dim).bit_length() - 1 if transform.kind.hadamard else 0
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
            stages=stages,
            centered=transform.kind.centered,
            balanced=transform.kind.balanced,
            symmetric=spec is not None and spec.symmetric,
        )

    @property
    def padded(self) -> int:
        """Channels of a head, as the next power of two."""
        return int(triton.next_power_of_2(self.head_dim))

    @property
    def units(self) -> int:
        """Units of a head (or native channels), as a power of two that a tensor core takes."""
        return max(16, int(triton.next_power_of_2(self.head_dim * self.bits // 16)))


def _constant(values: Tensor, rows: Tensor) -> Tensor:
    return values.to(rows.device, torch.float32).contiguous()
