"""What a reader may rely on: error bounds, kept grids, poisoned groups, and the same codes on every device."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvtuner.precision import PACKED_BITS
from kvtuner.quant import Transform, quantize
from kvtuner.transforms import TransformKind

# (head_dim, bits, group_size)
SHAPES = [(64, 2, 16), (72, 2, 9), (64, 4, 64), (80, 4, 40), (12, 4, 3), (80, 8, 40), (96, 8, 48), (6, 8, 3)]
# offset and spread of a group's values
FAMILIES = [
    (0.0, 1.0),
    (1000.0, 1.0),
    (-1000.0, 0.01),
    (1.0, 1e-7),
    (0.0, 1e-8),
    (0.0, 3e-6),
    (0.1, 0.0),
    (0.0, 1e6),
    (1e9, 1e5),
]


def seeded_group(family: tuple[float, float], size: int, seed: int) -> Tensor:
    offset, spread = family
    noise = torch.rand(size, generator=torch.Generator().manual_seed(seed))
    return offset + spread * (2 * noise - 1)


@st.composite
def groups_of_48(draw: st.DrawFn) -> Tensor:
    """[4, 48], each group of its own family."""
    seeds = st.tuples(st.sampled_from(FAMILIES), st.integers(0, 2**32 - 1))
    return torch.stack([seeded_group(family, 48, seed) for family, seed in draw(st.tuples(*[seeds] * 4))])


@settings(deadline=None, max_examples=60)
@given(groups_of_48(), st.sampled_from(PACKED_BITS))
def test_asymmetric_grid_covers_its_group_and_errs_by_at_most_half_a_step(x: Tensor, bits: int) -> None:
    quantized = quantize(x.unsqueeze(1), bits, 48)
    read = quantized.dequantize().squeeze(1)
    for group, seen, scale_, minimum_ in zip(
        x, read, quantized.scale.flatten().tolist(), quantized.minimum.flatten().tolist(), strict=True
    ):
        scale, minimum = Fraction(scale_), Fraction(minimum_)
        values = [Fraction(v) for v in group.clamp(-65504, 65504).tolist()]
        span, reach = max(values) - minimum, max(abs(v) for v in values)
        ulp = Fraction(1, 2**24)
        assert all(minimum <= v for v in values)
        # Float32 subtraction may round the span down by half an ulp of it.
        assert max(values) <= minimum + scale * (2**bits - 1) + span * ulp
        # x - minimum, 1 / scale, their product and the final addition round by half an ulp each.
        slack = 4 * span * ulp + 2 * reach * ulp
        for v, y in zip(values, seen.tolist(), strict=True):
            assert abs(v - Fraction(y)) <= scale / 2 + slack


@settings(deadline=None, max_examples=60)
@given(groups_of_48(), st.sampled_from(PACKED_BITS))
def test_symmetric_grid_errs_by_half_a_step_until_its_scale_is_capped(x: Tensor, bits: int) -> None:
    quantized = quantize(x.unsqueeze(1), bits, 48, symmetric=True)
    read = quantized.dequantize().squeeze(1)
    half = 2 ** (bits - 1)
    for group, seen, scale, minimum in zip(
        x, read, quantized.scale.flatten().tolist(), quantized.minimum.flatten().tolist(), strict=True
    ):
        values = group.double().clamp(-65504, 65504)
        largest = float(values.abs().max())
        assert minimum == -half * scale
        assert scale <= 65504 / half
        within = values <= (half - 1) * scale
        if scale < 65504 / half:
            # the quotient's float32 rounding may leave the largest value that much outside
            assert largest <= (half - 1) * scale * (1 + 2**-23)
            within = torch.ones_like(within)
        errors = (values - seen.double()).abs()
        assert (errors[within] <= scale / 2 + 2**-22 * max(largest, half * scale)).all()
        assert (seen[~within].double() == (half - 1) * scale).all()


@pytest.mark.parametrize(("bits", "top"), [(2, 32752.0), (4, 57316.0), (8, 64992.25)])
def test_symmetric_grid_saturates_above_and_reaches_the_largest_fp16_below(bits: int, top: float) -> None:
    x = torch.tensor([[1e30, 65504.0, -65504.0, -1e30, top, -top, 0.0, 1.0]])
    read = quantize(x, bits, symmetric=True).dequantize()
    assert read[0, :5].tolist() == [top, top, -65504.0, -65504.0, top]
    assert read[0, 5:7].tolist() == [-top, 0.0]
    assert torch.isfinite(read).all()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("head_dim", "bits", "group_size"), SHAPES)
def test_non_finite_value_poisons_its_own_group_and_no_other(
    head_dim: int, bits: int, group_size: int, poison: float, symmetric: bool
) -> None:
    clean = torch.randn(3, 2, head_dim, generator=torch.Generator().manual_seed(0))
    dirty = clean.clone()
    dirty[1, 0, head_dim - 1] = poison
    expected = quantize(clean, bits, group_size, symmetric=symmetric)
    found = quantize(dirty, bits, group_size, symmetric=symmetric)
    group = slice(head_dim - group_size, head_dim)
    assert found.codes[1, 0, group].tolist() == [0] * group_size
    assert found.scale[1, 0, -1].view(torch.int16) == 0
    assert found.minimum[1, 0, -1].view(torch.int16) == 0x7E00
    read = found.dequantize()
    assert read[1, 0, group].isnan().all()
    assert read.isnan().sum() == group_size
    rest = torch.ones(3, 2, head_dim // group_size, dtype=torch.bool)
    rest[1, 0, -1] = False
    channels = rest.repeat_interleave(group_size, dim=-1)
    assert torch.equal(found.codes[channels], expected.codes[channels])
    assert torch.equal(found.scale[rest], expected.scale[rest])
    assert torch.equal(found.minimum[rest], expected.minimum[rest])


@settings(deadline=None, max_examples=100)
@given(
    bits=st.sampled_from(PACKED_BITS),
    step=st.integers(1, 2047),
    base=st.integers(-2047, 2047),
    exponent=st.integers(-24, -3),
    codes=st.lists(st.integers(0, 255), min_size=14, max_size=14),
)
def test_values_on_a_grid_that_they_span_are_kept_exactly(
    bits: int, step: int, base: int, exponent: int, codes: list[int]
) -> None:
    scale, minimum = math.ldexp(step, exponent), math.ldexp(base, exponent)
    levels = 2**bits - 1
    chosen = [0, *(code & levels for code in codes), levels]
    values = [code * scale + minimum for code in chosen]  # integers below 2**20 times 2**exponent: exact
    assume(max(abs(v) for v in values) <= 65504)
    x = torch.tensor([values], dtype=torch.float64)
    quantized = quantize(x, bits)
    assert quantized.codes[0].tolist() == chosen
    assert quantized.scale.tolist() == [[scale]]
    assert quantized.minimum.tolist() == [[minimum]]
    assert quantized.dequantize().tolist() == x.tolist()


@settings(deadline=None, max_examples=100)
@given(
    bits=st.sampled_from(PACKED_BITS),
    step=st.integers(1, 2047),
    exponent=st.integers(-24, -3),
    codes=st.lists(st.integers(0, 255), min_size=15, max_size=15),
    is_top=st.booleans(),
)
def test_symmetric_values_on_their_grid_are_kept_exactly(
    bits: int, step: int, exponent: int, codes: list[int], is_top: bool
) -> None:
    scale, half, levels = math.ldexp(step, exponent), 2 ** (bits - 1), 2**bits - 1
    assume(half * scale <= 65504)
    chosen = [levels if is_top else 1, *(max(1, code & levels) for code in codes)]
    x = torch.tensor([[(code - half) * scale for code in chosen]], dtype=torch.float64)
    quantized = quantize(x, bits, symmetric=True)
    assert quantized.codes[0].tolist() == chosen
    assert quantized.scale.tolist() == [[scale]]
    assert quantized.dequantize().tolist() == x.tolist()


def test_tokens_heads_dtypes_and_strides_do_not_change_a_code() -> None:
    x = torch.randn(5, 3, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    whole = quantize(x, 4, 48)
    strided = quantize(x.transpose(0, 1).contiguous().transpose(0, 1).float(), 4, 48)
    for name in ("codes", "scale", "minimum"):
        expected = getattr(whole, name)
        assert torch.equal(getattr(strided, name), expected)
        for token in range(5):
            alone = quantize(x[token, 1:2], 4, 48)
            assert torch.equal(getattr(alone, name), expected[token, 1:2])


class DivisionsByPythonNumbers(TorchDispatchMode):
    """Counts divisions that CUDA would turn into a multiplication by a rounded reciprocal."""

    def __init__(self) -> None:
        super().__init__()
        self.by_tensor = self.by_number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket is torch.ops.aten.div:
            is_number = not isinstance(args[1], Tensor) or args[1].ndim == 0
            self.by_number += is_number
            self.by_tensor += not is_number
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("symmetric", [False, True])
def test_every_division_is_ieee_on_cuda_too(symmetric: bool) -> None:
    lam = torch.full((2, 64), 3.0, dtype=torch.float16)
    with DivisionsByPythonNumbers() as divisions:
        x = Transform(TransformKind.parse("balanced"), lam=lam).apply(torch.randn(3, 2, 64))
        quantize(x, 4, symmetric=symmetric)
    assert (divisions.by_number, divisions.by_tensor) == (0, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("head_dim", "bits", "group_size"), SHAPES)
def test_cuda_quantizes_like_the_cpu(head_dim: int, bits: int, group_size: int, symmetric: bool) -> None:
    rng = np.random.default_rng(0)
    grid = torch.from_numpy(rng.integers(-7, 8, (512, 2, head_dim)) * rng.uniform(0, 9, (512, 2, 1))).half().float()
    mixed = [seeded_group(family, 2 * head_dim, 0).reshape(1, 2, head_dim) for family in FAMILIES]
    x = torch.cat((grid, *mixed))
    here, there = (quantize(y, bits, group_size, symmetric=symmetric) for y in (x, x.cuda()))
    for name in ("codes", "scale", "minimum"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name))
    assert torch.equal(there.dequantize().cpu(), here.dequantize())
