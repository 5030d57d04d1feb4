"""Rows written in kernels from keys and values, each token by itself.

Codes and scale words that are written equal those of `quant.py` for the same input. So nothing that computes may be
contracted (`enable_fp_fusion` is off at launch), division is IEEE's, and the Hadamard adds in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.storing.fitted_grid import fit_grid, fit_zero_point_grid
from kvtuner.runtime_loader.kernels.transform_steps import (
    INNER,
    apply_steps,
    lanes_of,
    load_spread,
    mixes_channels,
    spread_of,
)
from kvtuner.runtime_loader.kernels.unpack_codes import (
    power_of_two,
    slots_of,
    third_bytes,
    words_at,
)


@triton.jit
def _fp16_down(x):
    """Largest fp16 at or below float32 x, as its bits."""
    nearest = x.to(tl.float16)  # the shape of x
    # The next fp16 below is one bit pattern lower, or higher where the sign bit is set.
    word = nearest.to(tl.int16, bitcast=True)  # the shape of x
    step = tl.where(word < 0, 1, -1).to(tl.int16)  # the shape of x
    return tl.where(nearest.to(tl.float32) > x, word + step, word)


@triton.jit
def _saturated(x):
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0)


@triton.jit
def _load_transformed(
    x_ptr, x_stride_t, mu_ptr, inverse_ptr, tokens, mask_tokens, head,
    STEPS: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr, SPREAD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Keys or values of one head in stored space, [SLOTS * places, TOKENS, SPREAD] as `store_side` has them."""
    if power_of_two(DIM) != DIM:
        x_ptrs = x_ptr + tokens[:, None] * x_stride_t + tl.arange(0, SPREAD)[None, :]  # [TOKENS, SPREAD]
        y = load_spread(x_ptrs, mask_tokens[:, None], head, mu_ptr, inverse_ptr, STEPS, DIM, SLOTS)
    elif mixes_channels(STEPS):
        # Slower axes lie in registers, faster ones in lanes, and the fastest is one piece of memory: by Triton's own
        # choice, which a Hadamard that needs no other keeps.
        LANES: tl.constexpr = lanes_of(DIM)
        OUTER: tl.constexpr = DIM // (LANES * INNER)
        outer = tl.arange(0, OUTER)[:, None, None, None] * (LANES * INNER)
        channels = outer + tl.arange(0, LANES)[None, None, :, None] * INNER + tl.arange(0, INNER)[None, None, None, :]
        mask = channels < DIM  # [OUTER, 1, LANES, INNER]
        x_ptrs = x_ptr + tokens[None, :, None, None] * x_stride_t + channels  # [OUTER, TOKENS, LANES, INNER]
        x = tl.load(x_ptrs, mask=mask_tokens[None, :, None, None] & mask, other=0.0)
        y = apply_steps(x, head, channels, mask, mu_ptr, inverse_ptr, STEPS, DIM)  # [OUTER, TOKENS, LANES, INNER]
        y = tl.reshape(tl.permute(y, (1, 0, 2, 3)), (TOKENS, SLOTS, SPREAD))  # [TOKENS, SLOTS, SPREAD]
        y = tl.permute(y, (1, 0, 2))  # [SLOTS, TOKENS, SPREAD]
    else:
        channel = (
            tl.arange(0, SLOTS)[:, None, None] * SPREAD + tl.arange(0, SPREAD)[None, None, :]
        )  # [SLOTS, 1, SPREAD]
        mask = channel < DIM  # [SLOTS, 1, SPREAD]
        x_ptrs = x_ptr + tokens[None, :, None] * x_stride_t + channel  # [SLOTS, TOKENS, SPREAD]
        x = tl.load(x_ptrs, mask=mask_tokens[None, :, None], other=0.0)
        y = apply_steps(x, head, channel, mask, mu_ptr, inverse_ptr, STEPS, DIM)
    return y


@triton.jit
def _range_of(y, mask_units, IS_PADDED: tl.constexpr):
    """The least and the largest of groups [GROUPS, slots, TOKENS, SPREAD], and whether one held NaN or infinity.

    All are [GROUPS, TOKENS], and the range is 0 to 0 of a group that did.
    """
    # Padding must neither be the least nor the largest; y - y is 0, but for NaN and infinity.
    lowest, highest, nan_probe = y, y, y - y  # [GROUPS, slots, TOKENS, SPREAD] each
    if IS_PADDED:
        lowest = tl.where(mask_units, y, 65504.0)
        highest = tl.where(mask_units, y, -65504.0)
        nan_probe = tl.where(mask_units, nan_probe, 0.0)
    not_finite = tl.sum(tl.sum(nan_probe, 1), 2) != 0.0  # [GROUPS, TOKENS]; NaN and infinity minus themselves are NaN
    low, high = saturated_range(tl.min(tl.min(lowest, 1), 2), tl.max(tl.max(highest, 1), 2), not_finite)
    return low, high, not_finite


@triton.jit
def saturated_range(lowest, highest, not_finite):
    """The least and the largest number of groups as fp16 holds them, 0 to 0 of a group with NaN or infinity."""
    # Adding 0 makes a minimum of -0 the 0 that `quant.py` stores.
    low = tl.where(not_finite, 0.0, _saturated(lowest)) + 0.0  # the shape of lowest
    high = tl.where(not_finite, 0.0, _saturated(highest)) + 0.0  # the shape of lowest
    return low, high


@triton.jit
def grid_of_range(low, high, BITS: tl.constexpr, SYMMETRIC: tl.constexpr):
    """The scale, as the bits of an fp16, and the minimum, fp16, of ranges [GROUPS, TOKENS] or of another shape."""
    if SYMMETRIC:
        # The scale is rounded up, so that the largest value stays inside the grid; its half must be an fp16 too.
        HALF: tl.constexpr = 1 << (BITS - 1)
        largest = tl.maximum(tl.abs(low), tl.abs(high))  # [GROUPS, TOKENS]
        wanted = tl.minimum(tl.div_rn(largest, tl.full(largest.shape, HALF - 1, tl.float32)), 65504.0 / HALF)
        scale = (-_fp16_down(-wanted).to(tl.float16, bitcast=True)).to(tl.int16, bitcast=True)
        minimum = (scale.to(tl.float16, bitcast=True).to(tl.float32) * (-HALF)).to(tl.float16)
    else:
        # Rounded down, and the scale up where the range would fall short: every value lies inside the grid.
        LEVELS: tl.constexpr = (1 << BITS) - 1
        minimum = _fp16_down(low).to(tl.float16, bitcast=True)  # [GROUPS, TOKENS]
        span = high - minimum.to(tl.float32)  # [GROUPS, TOKENS]
        nearest = tl.div_rn(span, tl.full(span.shape, LEVELS, tl.float32)).to(tl.float16)  # [GROUPS, TOKENS]
        short = nearest.to(tl.float32) * LEVELS < span  # [GROUPS, TOKENS]
        scale = nearest.to(tl.int16, bitcast=True)  # [GROUPS, TOKENS]
        scale = tl.where(short, scale + 1, scale)
    return scale, minimum


@triton.jit
def _zero_point_grid(low, high, BITS: tl.constexpr, SYMMETRIC: tl.constexpr):
    """The scale, as the bits of an fp16, and the zero point, int32, of ranges [GROUPS, TOKENS]."""
    if SYMMETRIC:
        HALF: tl.constexpr = 1 << (BITS - 1)
        largest = tl.maximum(tl.abs(low), tl.abs(high))  # [GROUPS, TOKENS]
        wanted = tl.minimum(tl.div_rn(largest, tl.full(largest.shape, HALF - 1, tl.float32)), 65024.0 / HALF)
    else:
        low = tl.minimum(low, 0.0)
        span = tl.maximum(high, 0.0) - low  # [GROUPS, TOKENS]
        wanted = tl.div_rn(span, tl.full(span.shape, (1 << BITS) - 1, tl.float32))
    above = (-_fp16_down(-wanted).to(tl.float16, bitcast=True)).to(tl.int16, bitcast=True).to(tl.int32)
    scale = ((above + 15) >> 4) << 4  # [GROUPS, TOKENS]
    if SYMMETRIC:
        zero_point = tl.where(scale == 0, 0, 16)
    else:
        places = -low * inverse_of(scale) * (2.0 ** (5 - BITS))  # [GROUPS, TOKENS]
        zero_point = (tl.minimum(tl.maximum(places, 0.0), 31.0) + 8388608.0).to(tl.int32, bitcast=True) & 31
    return scale, zero_point


@triton.jit
def inverse_of(scale):
    """The inverse of scales, given as the bits of fp16; 0 of 0."""
    step = scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # the shape of scale
    return tl.where(step == 0.0, 0.0, tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step))


@triton.jit
def _minimum_of(scale, zero_point, BITS: tl.constexpr):
    """The minimum, float32, of scales, given as the bits of fp16, and zero points."""
    step = scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # the shape of scale
    return zero_point.to(tl.float32) * (-(2.0 ** (BITS - 5))) * step


@triton.jit
def _codes_of(y, scale, minimum, BITS: tl.constexpr):
    """The codes of groups [GROUPS, slots, TOKENS, SPREAD] with grids [GROUPS, TOKENS], int32 of which 23 bits count."""
    inverse = inverse_of(scale)  # [GROUPS, TOKENS]
    return codes_on_grids(y, inverse[:, None, :, None], minimum.to(tl.float32)[:, None, :, None], BITS)


@triton.jit
def codes_on_grids(y, inverse, minimum, BITS: tl.constexpr):
    """The codes of numbers with the grids of inverse scales and minima, broadcast to them, as `_codes_of`."""
    y = (y - minimum) * inverse  # the shape of y
    # Half to even; the low bits of a float32 from 2**23 on are those of the integer that it is.
    return (tl.minimum(tl.maximum(y, 0.0), (1 << BITS) - 1) + 8388608.0).to(tl.int32, bitcast=True)


@triton.jit
def _units_of(codes, not_finite, BITS: tl.constexpr, PLACES: tl.constexpr):
    """The units [PLACES, TOKENS, SPREAD] of codes of groups, int32 of which 24 bits count."""
    GROUPS: tl.constexpr = codes.shape[0]
    SLOTS: tl.constexpr = codes.shape[1] // PLACES  # of a group
    # The sum of codes in their places is their union; each group's slots first, [GROUPS, PLACES, TOKENS, SPREAD].
    codes = tl.reshape(codes, (GROUPS, SLOTS, PLACES, codes.shape[2], codes.shape[3]))
    shifts = tl.reshape(tl.arange(0, GROUPS * SLOTS) * BITS, (GROUPS, SLOTS, 1, 1, 1))
    codes = tl.sum(codes << shifts, 1)
    return tl.sum(tl.where(not_finite[:, None, :, None], 0, codes), 0)


@triton.jit
def store_side(
    x_ptr, x_stride_t, x_stride_h, rows_ptr, mu_ptr, inverse_ptr, tokens, slots, mask_tokens, head,
    ROW: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    STEPS: tl.constexpr, SYMMETRIC: tl.constexpr, FITTED: tl.constexpr, PADDED: tl.constexpr, WORD: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Store one head's keys or values of TOKENS tokens; ROW is the stride of a row in elements of `rows_ptr`."""
    x_ptr += head * x_stride_h
    if BITS == 16:
        channels = tl.arange(0, PADDED)[None, :]  # [1, PADDED]
        mask = mask_tokens[:, None] & (channels < DIM)  # [TOKENS, PADDED]
        x = tl.load(x_ptr + tokens[:, None] * x_stride_t + channels, mask=mask, other=0.0)  # [TOKENS, PADDED]
        tl.store(rows_ptr + slots[:, None] * ROW + head * DIM + channels, x, mask=mask)
    else:
        # Slot j of unit u is channel j * UNITS + u. Slots come first, so that a thread holds all of a unit's, and lanes
        # are spread over tokens. Unit u is at place u // SPREAD of a lane; places are padded to a power of two.
        SLOTS: tl.constexpr = slots_of(BITS)
        UNITS: tl.constexpr = DIM // SLOTS
        SPREAD: tl.constexpr = UNITS if PADDED == DIM else spread_of(UNITS)
        PLACES: tl.constexpr = power_of_two(UNITS // SPREAD)
        y = _load_transformed(
            x_ptr, x_stride_t, mu_ptr, inverse_ptr, tokens, mask_tokens, head, STEPS, DIM, SLOTS, SPREAD, TOKENS
        )  # [SLOTS * PLACES, TOKENS, SPREAD]
        # A group is whole slots.
        y = tl.reshape(y, (GROUPS, SLOTS * PLACES // GROUPS, TOKENS, SPREAD))  # [GROUPS, slots, TOKENS, SPREAD]
        mask_groups = tl.arange(0, SLOTS * PLACES // GROUPS)[None, :, None, None] % PLACES < UNITS // SPREAD
        low, high, not_finite = _range_of(y, mask_groups, PADDED != DIM)
        if WORD == 16:
            scale, zero_point = _zero_point_grid(low, high, BITS, SYMMETRIC)  # [GROUPS, TOKENS] each
            minimum = _minimum_of(scale, zero_point, BITS)  # [GROUPS, TOKENS]
            if FITTED:
                codes, fitted_scale, fitted_point, usable = fit_zero_point_grid(
                    y, low, high, not_finite, mask_groups, BITS, DIM // GROUPS, SYMMETRIC, PADDED != DIM
                )
                if tl.min(tl.min(usable.to(tl.int32), 1), 0) == 0:
                    codes = tl.where(usable[:, None, :, None], codes, _codes_of(y, scale, minimum, BITS))
                scale = tl.where(usable, fitted_scale, scale)
                zero_point = tl.where(usable, fitted_point, zero_point)
            else:
                codes = _codes_of(y, scale, minimum, BITS)  # the shape of y
        elif FITTED:
            scale, minimum = grid_of_range(low, high, BITS, SYMMETRIC)  # [GROUPS, TOKENS] each
            codes, fitted_scale, fitted_minimum, usable = fit_grid(
                y, low, high, not_finite, mask_groups, BITS, DIM // GROUPS, SYMMETRIC, PADDED != DIM
            )
            if tl.min(tl.min(usable.to(tl.int32), 1), 0) == 0:
                codes = tl.where(usable[:, None, :, None], codes, _codes_of(y, scale, minimum, BITS))
            scale = tl.where(usable, fitted_scale, scale)
            minimum = tl.where(usable, fitted_minimum, minimum.to(tl.int16, bitcast=True))
        else:
            scale, minimum = grid_of_range(low, high, BITS, SYMMETRIC)  # [GROUPS, TOKENS] each
            codes = _codes_of(y, scale, minimum, BITS)  # the shape of y
            minimum = minimum.to(tl.int16, bitcast=True)
        units = _units_of(codes, not_finite, BITS, PLACES)  # [PLACES, TOKENS, SPREAD]
        row = rows_ptr + slots * ROW  # [TOKENS]
        place = tl.arange(0, PLACES)[:, None, None]  # [PLACES, 1, 1]
        unit = place * SPREAD + tl.arange(0, SPREAD)[None, None, :]  # [PLACES, 1, SPREAD]
        mask = mask_tokens[None, :, None] & (place < UNITS // SPREAD)  # [PLACES, TOKENS, 1]
        tl.store(row[None, :, None] + head * UNITS + unit, units.to(tl.int16), mask=mask)
        if BITS == 3:
            thirds = third_bytes(row[None, :, None], head, unit, HEADS, UNITS)
            tl.store(thirds, (units >> 16).to(tl.uint8), mask=mask)
        group = tl.arange(0, GROUPS)[:, None]  # [GROUPS, 1]
        place = words_at(HEADS, UNITS, BITS, WORD) + head * GROUPS + group  # [GROUPS, 1]
        words = row[None, :] + WORD // 16 * place  # [GROUPS, TOKENS]
        # NaN marks a group that held one; its bits are torch's.
        if WORD == 16:
            word = tl.where(not_finite, 0xFFE0, (scale << 1) | zero_point)  # [GROUPS, TOKENS]
            tl.store(words, word.to(tl.int16), mask=mask_tokens[None, :])
        else:
            minimum = tl.where(not_finite, 0x7E00, minimum).to(tl.int16)
            tl.store(words, scale.to(tl.int16), mask=mask_tokens[None, :])
            tl.store(words + 1, minimum, mask=mask_tokens[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def store_rows(
    k_ptr, k_stride_t, k_stride_h, k_rows_ptr, k_mu_ptr, k_inverse_ptr,
    v_ptr, v_stride_t, v_stride_h, v_rows_ptr, slots_ptr, num_tokens,
    HEADS: tl.constexpr, TOKENS: tl.constexpr,
    K_ROW: tl.constexpr, K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_GROUPS: tl.constexpr, K_STEPS: tl.constexpr,
    K_SYMMETRIC: tl.constexpr, K_FITTED: tl.constexpr, K_PADDED: tl.constexpr, K_WORD: tl.constexpr,
    V_ROW: tl.constexpr, V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_GROUPS: tl.constexpr, V_STEPS: tl.constexpr,
    V_SYMMETRIC: tl.constexpr, V_FITTED: tl.constexpr, V_PADDED: tl.constexpr, V_WORD: tl.constexpr,
):  # fmt: skip
    """Store the keys or the values, by the third axis of the grid, of one head and a block of tokens."""
    head = tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    mask_tokens = tokens < num_tokens  # [TOKENS]
    slots = tl.load(slots_ptr + tokens, mask=mask_tokens, other=0).to(tl.int64)  # [TOKENS]
    if tl.program_id(2) == 0:
        store_side(
            k_ptr, k_stride_t, k_stride_h, k_rows_ptr, k_mu_ptr, k_inverse_ptr, tokens, slots, mask_tokens, head,
            K_ROW, HEADS, K_DIM, K_BITS, K_GROUPS, K_STEPS, K_SYMMETRIC, K_FITTED, K_PADDED,
            K_WORD, TOKENS,
        )  # fmt: skip
    else:
        # Values have no constants, for which any pointer stands.
        store_side(
            v_ptr, v_stride_t, v_stride_h, v_rows_ptr, v_ptr, v_ptr, tokens, slots, mask_tokens, head,
            V_ROW, HEADS, V_DIM, V_BITS, V_GROUPS, V_STEPS, V_SYMMETRIC, V_FITTED, V_PADDED,
            V_WORD, TOKENS,
        )  # fmt: skip
