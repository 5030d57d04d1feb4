"""Fitted grids: those of an oracle in Python's integers, whatever the order of sums, and closer than min-max ones."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hostile_groups import first_grid, hostile_groups, squared_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtuner import grid_fit
from kvtuner.errors import PrecisionError
from kvtuner.precision import FITTED_BITS, PACKED_BITS
from kvtuner.quant import quantize, quantize_widths

WIDTHS = FITTED_BITS
GROUP_SIZES = (16, 64, 80, 96, 128)


def oracle(group: Tensor, bits: int, *, symmetric: bool) -> tuple[list[int], float, float] | None:
    """Codes, scale and minimum of a finite group by docs/format.md, in Python's integers and numpy's float32.

    None where min-max holds.
    """
    f32, x = np.float32, group.float().numpy()
    n, top, zero = len(x), 2**bits - 1, 2 ** (bits - 1)
    largest = max(abs(x.min()), abs(x.max()))
    origin, span = (f32(0), largest) if symmetric else (x.min(), x.max() - x.min())
    if largest >= 65504 or span < 2**-14:
        return None
    count = f32(127 if symmetric else 255)
    units = [round(float(v)) for v in (x - origin) * (count / span)]
    multiplier, offset = first_grid(bits, symmetric=symmetric)
    for refits in (2, 1, 0):
        codes = [min(max((u * multiplier + offset) >> 14, 0), top) for u in units]
        if symmetric:
            covariance = sum((c - zero) * u for c, u in zip(codes, units, strict=True))
            variance = sum((c - zero) ** 2 for c in codes)
        else:
            covariance = n * sum(c * u for c, u in zip(codes, units, strict=True)) - sum(codes) * sum(units)
            variance = n * sum(c * c for c in codes) - sum(codes) ** 2
        if covariance <= 0:
            return None
        if refits:
            multiplier = round(float(min(f32(variance) / f32(covariance), f32(1)) * f32(16384)))
            if not symmetric:
                offset = 8192 + round(float(f32(16384 * sum(codes) - multiplier * sum(units)) / f32(n)))
    spread = sum(u * u for u in units) if symmetric else n * sum(u * u for u in units) - sum(units) ** 2
    slope = min(f32(spread) / f32(covariance), f32(covariance) / f32(variance) * f32(1.6))
    unit = span / count
    scale = np.float16(min(slope * unit, f32(65504) / f32(zero if symmetric else 1)))
    if symmetric:
        return (codes, float(scale), -zero * float(scale)) if scale >= 2**-14 else None
    mean = origin + f32(sum(units)) / f32(n) * unit
    minimum = mean - f32(scale) * (f32(sum(codes)) / f32(n))
    if scale < 2**-14 or abs(minimum) > f32(scale) * f32(256):
        return None
    return codes, float(scale), float(np.float16(minimum))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", WIDTHS)
def test_first_codes_are_of_the_grid_that_the_format_names(bits: int, symmetric: bool) -> None:
    # Refits leave few codes that show where they began.
    assert grid_fit.first_grid(bits, symmetric=symmetric) == first_grid(bits, symmetric=symmetric)


@pytest.mark.parametrize("size", GROUP_SIZES)
@pytest.mark.parametrize("bits", WIDTHS)
def test_a_minimum_of_up_to_256_steps_is_fitted(bits: int, size: int) -> None:
    x = torch.randn(1, 1, size, generator=torch.Generator().manual_seed(5))
    at_zero = quantize(x, bits, fit="least_squares")
    step, least = at_zero.scale.float(), at_zero.minimum.float()
    for steps, is_fitted in ((255.5, True), (256.5, False)):
        for moved in (x - least + steps * step, x - least - steps * step):
            fitted, plain = (quantize(moved, bits, fit=fit) for fit in ("least_squares", "minmax"))
            assert torch.equal(fitted.scale, (at_zero if is_fitted else plain).scale), steps
            assert not torch.equal(plain.scale, at_zero.scale)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", GROUP_SIZES)
@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_and_words_are_the_oracles(bits: int, size: int, symmetric: bool) -> None:
    x = hostile_groups(size)
    fitted, plain = (quantize(x, bits, symmetric=symmetric, fit=fit) for fit in ("least_squares", "minmax"))
    num_fitted = 0
    for number, group in enumerate(x.squeeze(1)):
        expected = oracle(group, bits, symmetric=symmetric)
        if expected is None:
            for name in ("codes", "scale", "minimum"):
                assert torch.equal(getattr(fitted, name)[number], getattr(plain, name)[number]), (number, name)
        else:
            num_fitted += 1
            codes, scale, minimum = expected
            assert fitted.codes[number, 0].tolist() == codes, number
            assert (fitted.scale[number].item(), fitted.minimum[number].item()) == (scale, minimum), number
    assert len(x) // 2 < num_fitted < len(x)


@settings(deadline=None, max_examples=50)
@given(st.randoms(use_true_random=False), st.sampled_from(WIDTHS), st.booleans())
def test_order_of_channels_does_not_change_a_grid(random: object, bits: int, symmetric: bool) -> None:
    size = 96
    order = list(range(size))
    random.shuffle(order)  # type: ignore[attr-defined]
    x = hostile_groups(size)
    straight = quantize(x, bits, fit="least_squares", symmetric=symmetric)
    shuffled = quantize(x[..., order], bits, fit="least_squares", symmetric=symmetric)
    assert torch.equal(shuffled.codes, straight.codes[..., order])
    assert torch.equal(shuffled.scale, straight.scale) and torch.equal(shuffled.minimum, straight.minimum)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("size", [64, 128])
def test_fit_is_close_to_the_best_of_many_starts(size: int, bits: int, symmetric: bool) -> None:
    """Ten starts with a dozen passes each, in float64, without the last rescale."""
    x = torch.randn(500, 1, size, generator=torch.Generator().manual_seed(1)).double()
    top = 2**bits - 1
    best = torch.full((500,), math.inf, dtype=torch.float64)
    for share in np.linspace(0.5, 1, 10):
        groups = x.squeeze(1)
        if symmetric:
            step = 2 * groups.abs().amax(1, keepdim=True) * share / top
            minimum = -(2 ** (bits - 1)) * step
        else:
            step = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) * share / top
            minimum = (groups.amax(1, keepdim=True) + groups.amin(1, keepdim=True) - step * top) / 2
        for _ in range(12):
            codes = ((groups - minimum) / step).round().clamp(0, top)
            if symmetric:
                signed = codes - 2 ** (bits - 1)
                step = (signed * groups).sum(1, keepdim=True) / signed.square().sum(1, keepdim=True)
                minimum = -(2 ** (bits - 1)) * step
            else:
                centred = codes - codes.mean(1, keepdim=True)
                step = (centred * groups).sum(1, keepdim=True) / centred.square().sum(1, keepdim=True)
                minimum = (groups - step * codes).mean(1, keepdim=True)
        best = torch.minimum(best, (codes * step + minimum - groups).square().mean(1))
    # An unbiased reading of squared error e has e / (1 - e) of what is read with the least error e.
    unbiased = float((best / (1 - best)).mean())
    assert squared_error(x, quantize(x, bits, fit="least_squares", symmetric=symmetric)) < 1.08 * unbiased


@pytest.mark.parametrize("bits", WIDTHS)
def test_reading_is_unbiased_and_closer_than_min_max(bits: int) -> None:
    x = torch.randn(2000, 1, 128, generator=torch.Generator().manual_seed(2))
    fitted, plain = (quantize(x, bits, fit=fit) for fit in ("least_squares", "minmax"))
    assert squared_error(x, fitted) < {2: 0.55, 3: 0.8, 4: 0.9}[bits] * squared_error(x, plain)
    centred = x - x.mean(-1, keepdim=True)
    projection = (fitted.dequantize() * centred).sum(-1) / centred.square().sum(-1)
    # Of the integers of 8 bits; fp16 rounds a scale by 2**-11 at most.
    assert (projection - 1).abs().max() < 2**-8


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_group_that_is_not_finite_is_poisoned_as_ever(poison: float) -> None:
    x = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(3))
    x[1, 1, 40] = poison
    fitted, plain = (quantize(x, 2, 32, fit=fit) for fit in ("least_squares", "minmax"))
    for name in ("codes", "scale", "minimum"):
        assert torch.equal(getattr(fitted, name)[1, 1, -1:].view(-1), getattr(plain, name)[1, 1, -1:].view(-1)) or (
            name == "minimum"
        )
    assert fitted.codes[1, 1, 32:].tolist() == [0] * 32
    assert fitted.minimum[1, 1, 1].view(torch.int16) == 0x7E00
    assert fitted.dequantize().isnan().sum() == 32


def test_eight_bits_are_min_max_and_widths_share_nothing_that_changes_codes() -> None:
    x = hostile_groups(64)
    together = quantize_widths(x, PACKED_BITS, 32, fit="least_squares")
    for quantized, bits in zip(together, PACKED_BITS, strict=True):
        alone = quantize(x, bits, 32, fit="minmax" if bits == 8 else "least_squares")
        for name in ("codes", "scale", "minimum"):
            assert torch.equal(getattr(quantized, name), getattr(alone, name)), (bits, name)


def test_symmetric_grid_keeps_zero() -> None:
    x = torch.randn(50, 1, 64, generator=torch.Generator().manual_seed(4))
    for bits in WIDTHS:
        quantized = quantize(x, bits, fit="least_squares", symmetric=True)
        for scale, minimum in zip(
            quantized.scale.flatten().tolist(), quantized.minimum.flatten().tolist(), strict=True
        ):
            assert Fraction(minimum) == -(2 ** (bits - 1)) * Fraction(scale)


def test_group_that_is_too_wide_for_exact_sums_is_refused() -> None:
    quantize(torch.randn(1, 1, 256), 4, fit="least_squares")
    with pytest.raises(
        PrecisionError, match="at most 256 channels, not 512; use a smaller group size, or --fit minmax"
    ):
        quantize(torch.randn(1, 1, 512), 4, fit="least_squares")
