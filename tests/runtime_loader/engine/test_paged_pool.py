"""A pool takes memory as its rows are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.engine.paged_pool import PagedPool, PoolShape, unwritten_zeros
from kvtuner.runtime_loader.row_format import LayerFormat, RowFormat

MIB = 1 << 20


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident bytes are Linux's")
@pytest.mark.parametrize("spec", [None, QuantSpec(4, 32)], ids=["unquantized", "4 bits"])
def test_a_pool_that_nobody_has_written_takes_no_memory(spec: QuantSpec | None) -> None:
    side = RowFormat(8, 128, spec)
    shape = PoolShape([LayerFormat(side, side)], torch.float32, 16, 4, 4096)
    before = resident_bytes()
    pool = PagedPool(shape, 512 * MIB // (16 * shape.bytes_per_token), torch.device("cpu"))
    assert pool.num_bytes > 510 * MIB
    assert resident_bytes() - before < 64 * MIB
    rows = pool.sides(0)[0].rows
    half = len(rows) // 2
    assert not rows[half : half + 1000].any()
    rows[:half] = 1
    assert resident_bytes() - before > 100 * MIB
    assert rows[half - 1].all() and not rows[half].any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 4), (3, 5), (7, 3, 11)])
def test_zeros_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    zeros = unwritten_zeros(shape, dtype=dtype, device=torch.device("cpu"))
    assert (zeros.is_contiguous() and zeros.data_ptr() % 64 == 0) or zeros.numel() == 0
    assert torch.equal(zeros, torch.zeros(shape, dtype=dtype))
