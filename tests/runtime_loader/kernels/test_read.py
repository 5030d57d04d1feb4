"""The read kernel gives what `RowFormat.unpack` gives, rounding for rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kvtuner.precision import ALL_BITS
from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
from kvtuner.runtime_loader.kernels.launch import read
from kvtuner.runtime_loader.kernels.transform_steps import KERNEL_STEPS
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.transforms import TRANSFORMS, candidate_transforms

if TYPE_CHECKING:
    from fixture_types import MakePoisoned, MakeRowFormat

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KINDS = [name for name in candidate_transforms("k") if set(TRANSFORMS[name].steps) <= set(KERNEL_STEPS)]
SHAPES = [(2, 64), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((3, 80), (2, 96), (1, 128)))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize(("num_heads", "head_dim"), SHAPES)
def test_rows_read_back_are_those_of_quant(
    num_heads: int, head_dim: int, bits: int, kind: str, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    stored = poisoned(row_format(num_heads, head_dim, bits, kind, group_size=head_dim // 2 if bits < 8 else None), 40)
    generator = torch.Generator().manual_seed(5)
    slots = torch.randperm(40, generator=generator)[:23]
    states = torch.randn(23, num_heads, head_dim, generator=generator).half()
    states[4, 0, 1] = torch.nan
    stored.write(slots, states)
    out = torch.empty(23, num_heads, head_dim)
    read(KernelSide.of(stored), slots, torch.tensor([23]), out)
    torch.testing.assert_close(out, stored.read(slots, torch.float32), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("bits", "head_dim", "group_size"), [(2, 64, 8), (3, 80, 40), (4, 96, None)])
def test_rows_of_short_words_read_back_are_those_of_quant(
    bits: int, head_dim: int, group_size: int | None, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    kind = "centered+balanced+hadamard"
    stored = poisoned(row_format(3, head_dim, bits, kind, group_size, fit="least_squares", word_bits=16), 9)
    states = torch.randn(7, 3, head_dim, generator=torch.Generator().manual_seed(5)).half()
    states[4, 0, 1] = torch.nan
    slots = torch.tensor([8, 1, 3, 0, 5, 2, 7])
    stored.write(slots, states)
    out = torch.empty(7, 3, head_dim)
    read(KernelSide.of(stored), slots, torch.tensor([7]), out)
    torch.testing.assert_close(out, stored.read(slots, torch.float32), rtol=0, atol=0, equal_nan=True)
    assert out[4].isnan().any() and out[[0, 1, 2, 3, 5, 6]].isfinite().all()


@pytest.mark.parametrize("kind", ["none", "hadamard"])
@pytest.mark.parametrize("bits", [2, 8])
def test_an_fp16_model_reads_finite_numbers_of_keys_at_its_end(
    bits: int, kind: str, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    stored = poisoned(row_format(1, 64, bits, kind), 8)
    states = torch.randn(8, 1, 64, generator=torch.Generator().manual_seed(0)).half()
    states[:4, 0, 7], states[:, 0, 9] = 65504.0, -65504.0
    states[5, 0, 3] = torch.nan
    slots = torch.arange(8)
    stored.write(slots, states)
    out = torch.empty(8, 1, 64, dtype=torch.float16)
    read(KernelSide.of(stored), slots, torch.tensor([8]), out)
    torch.testing.assert_close(out, stored.read(slots, torch.float16), rtol=0, atol=0, equal_nan=True)
    assert torch.isnan(out[5]).any()
    assert torch.isfinite(out[[0, 1, 2, 3, 4, 6, 7]]).all()
    assert float(stored.read(slots[:4], torch.float32).abs().max()) > 65519, "or nothing was beyond fp16"


def test_attention_reads_new_tokens_back_in_the_served_dtype(row_format: MakeRowFormat, poisoned: MakePoisoned) -> None:
    attention = TritonAttention(torch.device("cpu"))
    for bits in ALL_BITS:
        stored = poisoned(row_format(2, 64, bits, "centered+balanced+hadamard"), 40)
        slots = torch.tensor([39, 3, 17, 5])
        attention.store(stored, stored, slots, *torch.randn(2, 4, 2, 64, generator=torch.Generator().manual_seed(5)))
        for dtype in (torch.float16, torch.float32):
            assert torch.equal(attention.read(stored, slots, dtype), stored.read(slots, dtype))
    assert attention.read(stored, slots[:0], torch.float16).shape == (0, 2, 64)
