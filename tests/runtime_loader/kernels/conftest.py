"""Rows of every kind for kernels that run in Triton's interpreter."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from kvtuner.precision import ALL_BITS
from kvtuner.quant import QuantSpec, Transform
from kvtuner.runtime_loader.packed_attention import PackedRows
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.precision import Fit, WordBits

SPARE = 255
"""The byte of rows that nobody wrote: their scale words are NaN."""
QUICK_PAIRS = ((2, 3), (3, 4), (4, 8), (8, 16), (16, 2))
"""The pairs of `make check`, every width once on each side; `make test` takes them all."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `k_bits` and `v_bits` on every pair of widths."""
    if {"k_bits", "v_bits"} <= set(metafunc.fixturenames):
        pairs = [
            pytest.param(*pair, marks=() if pair in QUICK_PAIRS else pytest.mark.slow)
            for pair in itertools.product(ALL_BITS, repeat=2)
        ]
        metafunc.parametrize(("k_bits", "v_bits"), pairs)


@pytest.fixture
def row_format() -> Callable[..., RowFormat]:
    """`row_format(num_heads, head_dim, bits, kind, group_size, symmetric, fit, word_bits)`, with random constants."""

    def make(
        num_heads: int,
        head_dim: int,
        bits: int,
        kind: str = "none",
        group_size: int | None = None,
        symmetric: bool = False,
        fit: Fit = "minmax",
        word_bits: WordBits = 32,
    ) -> RowFormat:
        if bits == 16:
            return RowFormat(num_heads, head_dim, None)
        generator = torch.Generator().manual_seed(bits)
        parts, shape = TransformKind.parse(kind), (num_heads, head_dim)
        mu = (0.3 * torch.randn(shape, generator=generator)).half() if parts.centered else None
        lam = (0.4 * torch.randn(shape, generator=generator)).exp().half() if parts.balanced else None
        transform = Transform(parts, mu, lam)
        spec = QuantSpec(bits, transform, group_size, symmetric, fit, word_bits=word_bits)
        return RowFormat(num_heads, head_dim, spec)

    return make


@pytest.fixture
def poisoned() -> Callable[..., PackedRows]:
    """`poisoned(row_format, num_slots, dtype)`: rows in which whatever is not written reads NaN."""

    def make(row_format: RowFormat, num_slots: int, dtype: torch.dtype = torch.float16) -> PackedRows:
        if row_format.spec is None:
            shape = (num_slots, row_format.num_heads, row_format.head_dim)
            return PackedRows(torch.full(shape, torch.nan, dtype=dtype), row_format)
        row_bytes = row_format.row_bytes(dtype)
        return PackedRows(torch.full((num_slots, row_bytes), SPARE, dtype=torch.uint8), row_format)

    return make
