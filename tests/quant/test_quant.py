"""Quantization against a scalar oracle: every fp16 number in a sorted table, numpy float32, one value at a time."""

from __future__ import annotations

import bisect
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtuner.errors import PrecisionError
from kvtuner.grid_fit import fp16_down, fp16_up
from kvtuner.precision import PACKED_BITS
from kvtuner.quant import Quantized, QuantSpec, Transform, TransformKind, quantize

F32 = np.float32

FP16_NUMBERS = sorted({float(v) for v in np.arange(2**16).astype(np.uint16).view(np.float16) if np.isfinite(v)})

NAN_WORD = 0x7E00

# (head_dim, bits, group_size): one and several groups, odd groups, heads that are no power of two.
SHAPES = [
    (64, 2, 64),
    (64, 2, 16),
    (72, 2, 9),
    (80, 2, 10),
    (8, 2, 1),
    (64, 4, 64),
    (80, 4, 40),
    (12, 4, 3),
    (96, 4, 24),
    (64, 8, 64),
    (80, 8, 40),
    (96, 8, 48),
    (6, 8, 3),
]

# offset and spread of a group's values
FAMILIES = {
    "unit": (0.0, 1.0),
    "offset": (1000.0, 1.0),
    "negative offset": (-1000.0, 1.0),
    "offset within one fp16 step": (1000.0, 0.01),
    "offset within one float32 step": (1.0, 1e-7),
    "one-sided": (3.0, 3.0),
    "tiny": (0.0, 1e-8),
    "fp16 subnormal": (0.0, 3e-6),
    "float32 subnormal": (0.0, 1e-40),
    "constant": (0.1, 0.0),
    "large": (0.0, 65504.0),
    "huge": (0.0, 1e6),
    "huge on one side": (1e9, 1e5),
}


def fp16_below(x: float) -> float:
    return FP16_NUMBERS[bisect.bisect_right(FP16_NUMBERS, x) - 1]


def fp16_above(x: float) -> float:
    return FP16_NUMBERS[bisect.bisect_left(FP16_NUMBERS, x)]


def oracle_words(values: list[np.float32], bits: int, symmetric: bool) -> tuple[float, float]:
    """Scale and minimum of finite, clamped values."""
    levels = 2**bits - 1
    if symmetric:
        half = 2 ** (bits - 1)
        quotient = max(abs(v) for v in values) / F32(half - 1)
        scale = fp16_above(min(float(quotient), 65504 / half))
        return scale, -half * scale
    minimum = fp16_below(float(min(values)))
    span = float(max(values) - F32(minimum))
    # Exact: the law's "nearest, or the next up if scale * levels falls short" is the smallest that does not.
    return next(
        s for s in FP16_NUMBERS[bisect.bisect_left(FP16_NUMBERS, span / levels * 0.99) :] if s * levels >= span
    ), minimum


def oracle_group(group: list[np.float32], bits: int, symmetric: bool) -> tuple[list[int], int, int, list[np.float32]]:
    """Codes, scale word, minimum word and what a reader sees of one group."""
    if not all(np.isfinite(v) for v in group):
        return [0] * len(group), 0, NAN_WORD, [F32("nan")] * len(group)
    values = [min(max(v, F32(-65504)), F32(65504)) for v in group]
    scale, minimum = oracle_words(values, bits, symmetric)
    codes = [0] * len(group)
    if scale:
        inverse = F32(1) / F32(scale)
        codes = [min(max(round(float((v - F32(minimum)) * inverse)), 0), 2**bits - 1) for v in values]
    read = [F32(code) * F32(scale) + F32(minimum) for code in codes]
    scale_word, minimum_word = np.array([scale, minimum], dtype=np.float16).view(np.uint16)
    return codes, int(scale_word), int(minimum_word), read


def words(x: Tensor) -> list[int]:
    return [word & 0xFFFF for word in x.contiguous().view(torch.int16).flatten().tolist()]


def quantize_words(x: Tensor, bits: int) -> tuple[list[int], list[int]]:
    quantized = quantize(x, bits)
    return words(quantized.scale), words(quantized.minimum)


def assert_is_the_oracles(x: Tensor, bits: int, group_size: int, *, symmetric: bool) -> None:
    quantized = quantize(x, bits, group_size, symmetric=symmetric)
    groups = x.float().reshape(-1, group_size).numpy()
    expected = [oracle_group(list(group), bits, symmetric) for group in groups]
    assert quantized.codes.dtype == torch.uint8
    assert quantized.codes.shape == x.shape
    assert quantized.scale.shape == quantized.minimum.shape == (*x.shape[:-1], x.shape[-1] // group_size)
    assert quantized.codes.flatten().tolist() == [code for codes, *_ in expected for code in codes]
    assert words(quantized.scale) == [scale for _, scale, _, _ in expected]
    assert words(quantized.minimum) == [minimum for _, _, minimum, _ in expected]
    read = np.array([value for *_, read in expected for value in read], dtype=np.float32)
    np.testing.assert_array_equal(quantized.dequantize().numpy().ravel(), read)


def family_group(family: str, size: int, rng: np.random.Generator) -> np.ndarray:
    offset, spread = FAMILIES[family]
    return F32(offset) + F32(spread) * rng.uniform(-1, 1, size).astype(F32)


@st.composite
def family_groups(draw: st.DrawFn, num_groups: int, size: int) -> Tensor:
    """[num_groups, size], each group of its own family."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chosen = [draw(st.sampled_from(list(FAMILIES))) for _ in range(num_groups)]
    return torch.from_numpy(np.stack([family_group(family, size, rng) for family in chosen]))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("head_dim", "bits", "group_size"), SHAPES)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_codes_words_and_readings_are_the_oracles(
    data: st.DataObject, head_dim: int, bits: int, group_size: int, symmetric: bool
) -> None:
    num_groups = 2 * 2 * head_dim // group_size
    x = data.draw(family_groups(num_groups, group_size)).reshape(2, 2, head_dim)
    assert_is_the_oracles(x, bits, group_size, symmetric=symmetric)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.floats(width=32), min_size=8, max_size=8),
    st.sampled_from([(2, 1), (2, 4), (2, 8), (4, 2), (4, 8), (8, 4), (8, 8)]),
    st.booleans(),
)
def test_any_eight_floats_are_quantized_as_the_oracle_does(
    values: list[float], layout: tuple[int, int], symmetric: bool
) -> None:
    bits, group_size = layout
    assert_is_the_oracles(torch.tensor([values], dtype=torch.float32), bits, group_size, symmetric=symmetric)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 8), (4, 8), (8, 8), (8, 4)])
@pytest.mark.parametrize(
    "values",
    [
        [-65504.0, 65504.0, 0.0, 1.0, -1.0, 65503.0, -65503.0, 32752.0],
        [65504.0] * 8,
        [-1e30, 1e30] * 4,
        [3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, -0.0, 65520.0, 65519.0],
        [2.0**-24] * 7 + [2.0**-25],
        [2.0**-26, -(2.0**-26)] * 4,
        [0.0] * 8,
        [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5],
    ],
)
def test_edges_of_the_range_are_quantized_as_the_oracle_does(
    values: list[float], bits: int, group_size: int, symmetric: bool
) -> None:
    assert_is_the_oracles(torch.tensor([values], dtype=torch.float32), bits, group_size, symmetric=symmetric)


@pytest.mark.parametrize("size", [16, 48, 64])
@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("other", [0.0, 1.0, -1.0])
def test_zeros_of_either_sign_have_the_same_words_in_any_order(size: int, bits: int, other: float) -> None:
    x = torch.zeros(size, 1, size)
    x[:, :, ::3] = other
    x[torch.arange(size), 0, torch.arange(size)] = -0.0
    x = torch.cat((x, -x))
    for signed, plain in zip(quantize_words(x, bits), quantize_words(x + 0.0, bits), strict=True):
        assert signed == plain
        assert 0x8000 not in signed


def test_no_tokens_quantize_to_no_codes() -> None:
    quantized = quantize(torch.zeros(0, 2, 64), 4, 32)
    assert quantized.codes.shape == quantized.dequantize().shape == (0, 2, 64)
    assert quantized.scale.shape == quantized.minimum.shape == (0, 2, 2)


@pytest.mark.parametrize(
    ("head_dim", "bits", "group_size"), [(64, 8, 16), (80, 4, 16), (96, 4, 0), (63, 4, 63), (72, 3, 72)]
)
def test_groups_that_cannot_be_packed_are_refused_before_any_arithmetic(
    head_dim: int, bits: int, group_size: int
) -> None:
    with pytest.raises(PrecisionError):
        quantize(torch.full((1, 1, head_dim), math.nan), bits, group_size)


@given(st.floats(-65504, 65504, width=32))
@settings(deadline=None, max_examples=200)
def test_directed_rounding_is_the_next_number_of_the_table(x: float) -> None:
    for value in (x, fp16_below(x), fp16_above(x)):
        tensor = torch.tensor(value, dtype=torch.float32)
        assert fp16_down(tensor).item() == fp16_below(value)
        assert fp16_up(tensor).item() == fp16_above(value)


def test_directed_rounding_keeps_all_fp16_numbers_and_splits_their_gaps() -> None:
    numbers = torch.tensor(FP16_NUMBERS, dtype=torch.float32)
    middles = ((numbers[:-1].double() + numbers[1:].double()) / 2).float()
    for rounding in (fp16_down, fp16_up):
        assert torch.equal(rounding(numbers).float(), numbers)
    assert torch.equal(fp16_down(middles).float(), numbers[:-1])
    assert torch.equal(fp16_up(middles).float(), numbers[1:])


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 10), (4, 20), (8, 40), (8, None)])
def test_simulation_transforms_quantizes_reads_and_undoes(bits: int, group_size: int | None, symmetric: bool) -> None:
    rng = np.random.default_rng(5)
    x = (50 + 10 * rng.standard_normal((3, 2, 80))).astype(F32)
    mu = (50 + rng.standard_normal((2, 80))).astype(np.float16)
    lam = np.exp2(rng.uniform(-6, 6, (2, 80))).astype(np.float16)
    stored = (x - mu.astype(F32)) * (F32(1) / lam.astype(F32))
    groups = stored.reshape(-1, group_size or 80)
    read = np.array([oracle_group(list(group), bits, symmetric)[3] for group in groups]).reshape(x.shape)
    expected = read * lam.astype(F32) + mu.astype(F32)
    transform = Transform(TransformKind.parse("centered+balanced"), torch.from_numpy(mu), torch.from_numpy(lam))
    spec = QuantSpec(bits, transform, group_size, symmetric)
    np.testing.assert_array_equal(spec.simulate(torch.from_numpy(x)).numpy(), expected)


def test_simulation_of_a_rotated_side_reads_in_model_space() -> None:
    x = torch.randn(16, 2, 96, generator=torch.Generator().manual_seed(6))
    x[..., 3] *= 50  # an outlier channel, which the rotation spreads
    plain = (QuantSpec(8).simulate(x) - x).norm()
    rotated = (QuantSpec(8, Transform(TransformKind.parse("hadamard"))).simulate(x) - x).norm()
    assert 0 < rotated < plain / 2


def test_simulation_does_not_write_to_its_input() -> None:
    x = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(7))
    before = x.clone()
    for fp8 in (False, True):
        QuantSpec(8, fp8=fp8).simulate(x)
    assert torch.equal(x, before)


def test_readers_need_no_mode() -> None:
    """Symmetric and asymmetric words are read by one formula: codes * scale + minimum."""
    codes = torch.tensor([[0, 1, 2, 3, 3, 2, 1, 0]], dtype=torch.uint8)
    scale, minimum = torch.tensor([[0.5, 2.0]]).half(), torch.tensor([[-1.0, 7.0]]).half()
    read = Quantized(codes, scale, minimum, bits=2).dequantize()
    assert read.tolist() == [[-1.0, -0.5, 0.0, 0.5, 13.0, 11.0, 9.0, 7.0]]
