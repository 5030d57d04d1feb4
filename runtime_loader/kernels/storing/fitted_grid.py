"""The least-squares fit of grids inside kernels: codes, scales and minimums equal to those of `grid_fit`.

Codes and sums are integers, as there, so that lanes may share a group as they like. A tile of groups is
[GROUPS, slots, TOKENS, SPREAD], and what is one number of a group is [GROUPS, TOKENS].
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from kvtuner import grid_fit, precision, zero_points

_NUM_REFITS: Final = tl.constexpr(grid_fit.NUM_REFITS)
_UNITS: Final = tl.constexpr(grid_fit.UNITS)
_SYMMETRIC_UNITS: Final = tl.constexpr(grid_fit.SYMMETRIC_UNITS)
_MAX_GAIN: Final = tl.constexpr(grid_fit.MAX_GAIN)
_MAX_OFFSET: Final = tl.constexpr(grid_fit.MAX_OFFSET)
_MIN_SCALE: Final = tl.constexpr(grid_fit.MIN_SCALE)
_FRACTION: Final = tl.constexpr(grid_fit.FRACTION)
_FRACTION_BITS: Final = tl.constexpr(grid_fit.FRACTION.bit_length() - 1)
_FIRST_GRIDS: Final = tl.constexpr({
    (bits, symmetric): grid_fit.first_grid(bits, symmetric=symmetric)
    for bits in precision.FITTED_BITS for symmetric in (False, True)
})  # fmt: skip
_LARGEST_SCALE: Final = tl.constexpr(zero_points.LARGEST_SCALE)
_LAST_ZERO_POINT: Final = tl.constexpr(zero_points.LAST_ZERO_POINT)
_SYMMETRIC_ZERO_POINT: Final = tl.constexpr(zero_points.SYMMETRIC_ZERO_POINT)
_FP16_MAX: Final = tl.constexpr(precision.FP16_MAX)
# 1.625 * 2**23: a sum with it has no fraction, and its low bits are that sum.
_ROUNDER: Final = tl.constexpr(13631488.0)
_ROUNDER_BITS: Final = tl.constexpr(0x4B500000)  # its bits; the upper 12 are odd, so that they can be divided by
_ROUNDER_INVERSE: Final = tl.constexpr(pow(0x4B5, -1, 4096))


@triton.constexpr_function
def _first_of(grids, bits, symmetric):
    """Return the multiplier and the offset of the first pass."""
    return grids[bits, symmetric]


@triton.constexpr_function
def _as_int32(number):
    """Return what int32 holds of a number."""
    return (number + 2**31) % 2**32 - 2**31


@triton.jit
def _rounded(x):
    """The nearest int32, half to even, of numbers from -5 * 2**20 to 3 * 2**20."""
    return (x + _ROUNDER).to(tl.int32, bitcast=True) - _ROUNDER_BITS


@triton.jit
def _rounded_widely(x):
    """The nearest int32, half to even, of numbers from -2**22 to 2**22."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _sum_of_group(x):
    return tl.sum(tl.sum(x, 1), 2)


@triton.jit
def _to_channels(x):
    """One number of a group, for each of its channels."""
    return x[:, None, :, None]


@triton.jit
def _mean(total, CHANNELS: tl.constexpr):
    return tl.div_rn(total, tl.full(total.shape, CHANNELS, tl.float32))


@triton.jit
def _fit_codes(
    y, low, high, not_finite, mask, BITS: tl.constexpr, CHANNELS: tl.constexpr, SYMMETRIC: tl.constexpr,
    IS_PADDED: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """Fit lines to groups with their range; `mask` can be broadcast to `y` and hides padding.

    Returns int32 codes and, of each group: scale and mean, float32; the sum of codes and the zero point of words of 16
    bits, int32; and whether it can be fitted.
    """
    ZERO: tl.constexpr = 1 << (BITS - 1)  # the code of zero in a symmetric grid
    UNIT: tl.constexpr = _FRACTION >> (5 - BITS)  # of zero points
    COUNT: tl.constexpr = _SYMMETRIC_UNITS if SYMMETRIC else _UNITS
    largest = tl.maximum(tl.abs(low), tl.abs(high))  # [GROUPS, TOKENS], as all that is not said to have channels
    if SYMMETRIC:
        span = largest
        origin = tl.zeros_like(low)
    else:
        span = high - low
        origin = low
    counts = tl.full(span.shape, COUNT, tl.float32)
    ratio = tl.where(span < _MIN_SCALE, 0.0, tl.div_rn(counts, tl.maximum(span, _MIN_SCALE)))
    unit = tl.div_rn(span, counts)
    # Integers u stay u + _ROUNDER_BITS, as they come; sums and products wrap around, to what is below 2**31.
    units = ((y - _to_channels(origin)) * _to_channels(ratio) + _ROUNDER).to(tl.int32, bitcast=True)  # the shape of y
    if IS_PADDED:
        units = tl.where(mask, units, 0)
    ROUNDERS: tl.constexpr = _as_int32(CHANNELS * _ROUNDER_BITS)  # what they add to a sum
    total_units = _sum_of_group(units) - ROUNDERS
    spread = _sum_of_group(units * units) - (total_units * 2 + ROUNDERS) * _ROUNDER_BITS
    if not SYMMETRIC:
        spread = spread * CHANNELS - total_units * total_units
    multiplier = tl.full(span.shape, _first_of(_FIRST_GRIDS, BITS, SYMMETRIC)[0], tl.int32)
    offset = tl.full(span.shape, _first_of(_FIRST_GRIDS, BITS, SYMMETRIC)[1], tl.int32)
    codes = units
    total = total_units
    covariance = span
    variance = span
    zero_point = tl.full(span.shape, _SYMMETRIC_ZERO_POINT, tl.int32)
    for index in tl.static_range(_NUM_REFITS + 1):
        if WORD == 16 and not SYMMETRIC and index == _NUM_REFITS:
            zero = tl.minimum(tl.maximum(-origin * ratio, 0.0), COUNT)  # the place of zero among the integers
            place = _rounded_widely(zero * multiplier.to(tl.float32))
            position = (place + offset - _FRACTION // 2).to(tl.float32)
            zero_point = tl.minimum(tl.maximum(_rounded(position * (1 / UNIT)), 0), _LAST_ZERO_POINT)
            offset = zero_point * UNIT + (_FRACTION // 2 - place)
        start = offset - multiplier * _ROUNDER_BITS
        codes = (units * _to_channels(multiplier) + _to_channels(start)) >> _FRACTION_BITS  # the shape of y
        codes = tl.minimum(tl.maximum(codes, 0), (1 << BITS) - 1)
        if IS_PADDED:
            codes = tl.where(mask, codes, 0)
        squares = _sum_of_group(codes * codes)
        # One sum is two: 20 bits of the products, and above them the sum of codes times what the rounder has there.
        both = _sum_of_group(codes * units)
        products = (both << 12) >> 12 if SYMMETRIC else both & 0xFFFFF
        total = (((both - products) >> 20) * _ROUNDER_INVERSE) & 0xFFF
        if SYMMETRIC:
            products = products - total_units * ZERO
            squares = squares - total * (2 * ZERO) + ZERO * ZERO * CHANNELS
        else:
            products = products * CHANNELS - total * total_units
            squares = squares * CHANNELS - total * total
        covariance = products.to(tl.float32)
        variance = squares.to(tl.float32)
        if index < _NUM_REFITS:
            inverse = tl.minimum(tl.div_rn(variance, tl.maximum(covariance, 1.0)), 1.0)
            multiplier = _rounded(inverse * _FRACTION)
            if not SYMMETRIC:
                lowest = (total * _FRACTION - total_units * multiplier).to(tl.float32)
                offset = _rounded(_mean(lowest, CHANNELS)) + _FRACTION // 2
    slope = tl.minimum(
        tl.div_rn(spread.to(tl.float32), tl.maximum(covariance, 1.0)),
        tl.div_rn(covariance, tl.maximum(variance, 1.0)) * _MAX_GAIN,
    )
    usable = (covariance > 0.0) & (largest < _FP16_MAX) & (not_finite == 0)
    if WORD == 16 and not SYMMETRIC:
        usable = usable & (low <= 0.0) & (high >= 0.0)
    mean = origin + _mean(total_units.to(tl.float32), CHANNELS) * unit
    return codes, slope * unit, mean, total, zero_point, usable


@triton.jit
def fit_zero_point_grid(
    y, low, high, not_finite, mask, BITS: tl.constexpr, CHANNELS: tl.constexpr, SYMMETRIC: tl.constexpr,
    IS_PADDED: tl.constexpr,
):  # fmt: skip
    """Fit grids that words of 16 bits can hold, as `fit_grid` does.

    Returns int32 codes; the bits of fp16 scales and zero points, int32; and whether each group can have them.
    """
    CAP: tl.constexpr = _LARGEST_SCALE / (1 << (BITS - 1)) if SYMMETRIC else _LARGEST_SCALE
    codes, scale, _, _, zero_point, usable = _fit_codes(
        y, low, high, not_finite, mask, BITS, CHANNELS, SYMMETRIC, IS_PADDED, 16
    )
    half = tl.minimum(scale, CAP).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)  # [GROUPS, TOKENS]
    half = ((half + 8) >> 4) << 4
    exact = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return codes, half, zero_point, usable & (exact >= _MIN_SCALE)


@triton.jit
def fit_grid(
    y, low, high, not_finite, mask, BITS: tl.constexpr, CHANNELS: tl.constexpr, SYMMETRIC: tl.constexpr,
    IS_PADDED: tl.constexpr,
):  # fmt: skip
    """Fit grids to groups with their range; `mask` can be broadcast to `y` and hides padding.

    Returns int32 codes; the bits of scales and of minimums, int16; and whether each group can have them.
    """
    ZERO: tl.constexpr = 1 << (BITS - 1)  # the code of zero in a symmetric grid
    codes, wanted, mean, total, _, usable = _fit_codes(
        y, low, high, not_finite, mask, BITS, CHANNELS, SYMMETRIC, IS_PADDED, 32
    )
    if SYMMETRIC:
        scale = tl.minimum(wanted, _FP16_MAX / ZERO).to(tl.float16)
        exact = scale.to(tl.float32)
        minimum = exact * -ZERO
    else:
        scale = tl.minimum(wanted, _FP16_MAX).to(tl.float16)
        exact = scale.to(tl.float32)
        minimum = mean - exact * _mean(total.to(tl.float32), CHANNELS)
        minimum = tl.minimum(tl.maximum(minimum, -_FP16_MAX), _FP16_MAX)
        usable = usable & (tl.abs(minimum) <= exact * _MAX_OFFSET)
    usable = usable & (exact >= _MIN_SCALE)
    return codes, scale.to(tl.int16, bitcast=True), minimum.to(tl.float16).to(tl.int16, bitcast=True), usable
