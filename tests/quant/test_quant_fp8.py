"""The fp8 baseline against all 127 magnitudes of e4m3fn, tried one by one."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtuner.quant import QuantSpec, Transform, quantize_fp8
from kvtuner.transforms import TransformKind

F32 = np.float32


def e4m3fn_numbers() -> dict[int, Fraction]:
    """Code byte -> value of every finite, non-negative e4m3fn number: 4 exponent bits of bias 7, 3 mantissa bits."""
    numbers = {}
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        significand = Fraction(mantissa, 8) + (1 if exponent else 0)
        numbers[code] = significand * Fraction(2) ** (max(exponent, 1) - 7)
    return numbers


E4M3FN = e4m3fn_numbers()


def oracle_fp8(x: float) -> float:
    """The nearest e4m3fn number by trying them all; ties go to the even code."""
    if math.isnan(x):
        return x
    size = min(Fraction(abs(x)), Fraction(448)) if math.isfinite(x) else Fraction(448)
    code = min(E4M3FN, key=lambda c: (abs(E4M3FN[c] - size), c & 1))
    return math.copysign(float(E4M3FN[code]), x)


def test_fp8_table_ends_where_the_format_does() -> None:
    assert len(E4M3FN) == 127
    assert (E4M3FN[0], E4M3FN[1], E4M3FN[0x7E]) == (0, Fraction(1, 512), 448)


def test_fp8_keeps_its_numbers_and_rounds_ties_to_even() -> None:
    numbers = [float(v) for v in E4M3FN.values()]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(numbers)]
    beside = [float(np.nextafter(F32(v), F32(end))) for v in middles for end in (0, 1e9)]
    values = [sign * v for v in (*numbers, *middles, *beside) for sign in (1, -1)]
    read = quantize_fp8(torch.tensor(values, dtype=torch.float32)).tolist()
    assert read == [oracle_fp8(v) for v in values]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.one_of(st.floats(-500, 500, width=32), st.floats(width=32)), min_size=1, max_size=9))
def test_fp8_is_the_nearest_number_of_the_table(values: list[float]) -> None:
    read = quantize_fp8(torch.tensor(values, dtype=torch.float32))
    np.testing.assert_array_equal(read.numpy(), np.array([oracle_fp8(v) for v in values], dtype=np.float32))


@pytest.mark.parametrize("x", [448.0, 456.0, 464.0, 465.0, 480.0, 1e9, math.inf])
def test_fp8_saturates_at_448(x: float) -> None:
    assert quantize_fp8(torch.tensor([x, -x])).tolist() == [448.0, -448.0]
    assert quantize_fp8(torch.tensor([math.nan])).isnan().all()


def test_fp8_specification_ignores_the_grid() -> None:
    x = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    spec = QuantSpec(8, Transform(TransformKind.parse("hadamard")), group_size=7, symmetric=True, fp8=True)
    assert torch.equal(spec.simulate(x), quantize_fp8(x))
