"""Rows read back to model space in kernels: token by token, or to places among new tokens.

Every product and sum is one rounding, as in `quant.py`: `enable_fp_fusion` is off at launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.keys.channel_grids import channel_grids
from kvtuner.runtime_loader.kernels.transform_steps import invert_steps
from kvtuner.runtime_loader.kernels.unpack_codes import (
    ONE,
    fp16_saturated,
    offset_step,
    scale_and_minimum,
    scale_and_zero_point,
    slots_of,
    third_bytes,
    words_at,
)


@triton.jit
def read_tile(
    rows_ptr, words_ptr, mu_ptr, lam_ptr, slots, out_ptr, out_stride_t, out_stride_h, places, mask_tokens, head,
    HEADS: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    STEPS: tl.constexpr, PADDED: tl.constexpr, WORD: tl.constexpr, TOKEN_GROUP: tl.constexpr,
):  # fmt: skip
    """Read one head of rows at slots [TOKENS] to places [TOKENS] of [tokens, heads, DIM], as `QuantSpec` rounds."""
    SLOTS: tl.constexpr = slots_of(BITS)
    UNITS: tl.constexpr = DIM // SLOTS
    channels = tl.arange(0, PADDED)  # [PADDED], a power of two
    mask_channels = channels < DIM  # [PADDED]
    mask = mask_tokens[:, None] & mask_channels[None, :]  # [TOKENS, PADDED]
    if BITS == 16:
        # As all tiles of both branches, [TOKENS, PADDED].
        y = tl.load(rows_ptr + slots[:, None] * ROW + head * DIM + channels[None, :], mask=mask, other=0.0)
    else:
        # A unit is loaded once for every slot: rows lie in the nearest cache by then.
        unit = channels % UNITS  # [PADDED]
        units = tl.load(rows_ptr + slots[:, None] * ROW + head * UNITS + unit[None, :], mask=mask, other=0)
        if BITS == 3:
            thirds = third_bytes(rows_ptr + slots[:, None] * ROW, head, unit[None, :], HEADS, UNITS)
            units = (units.to(tl.int32) & 0xFFFF) | (tl.load(thirds, mask=mask, other=0).to(tl.int32) << 16)
        # Slot j of unit u is channel j * UNITS + u.
        codes = (units.to(tl.int32) >> (channels // UNITS * BITS)[None, :]) & ((1 << BITS) - 1)  # [TOKENS, PADDED]
        group = channels // (DIM // GROUPS)  # [PADDED]
        first_word = words_at(HEADS, UNITS, BITS, WORD) + head * GROUPS
        place = slots[:, None] * (ROW // (WORD // 16)) + first_word + group[None, :]  # [TOKENS, PADDED]
        if TOKEN_GROUP > 1:
            first_slot = (slots // TOKEN_GROUP * TOKEN_GROUP)[:, None]  # [TOKENS, 1]
            scale, minimum = channel_grids(
                rows_ptr, first_slot, (head * DIM + channels)[None, :], mask, ROW, HEADS, DIM, BITS, TOKEN_GROUP
            )  # [TOKENS, PADDED] each
        elif WORD == 16:
            words = tl.load(rows_ptr + place, mask=mask, other=0).to(tl.int32)  # [TOKENS, PADDED]
            scale, zero_point = scale_and_zero_point(words, 0)  # [TOKENS, PADDED] each
            minimum = zero_point * (offset_step(BITS, WORD) / ONE) * scale  # [TOKENS, PADDED]; exact
        else:
            words = tl.load(words_ptr + place, mask=mask, other=0)  # [TOKENS, PADDED]
            scale, minimum = scale_and_minimum(words)  # [TOKENS, PADDED] each
        # Zeros in padding, which steps that mix channels need.
        y = tl.where(mask, codes.to(tl.float32) * scale + minimum, 0.0)
        y = invert_steps(y, head, channels, mask_channels, mu_ptr, lam_ptr, STEPS, DIM)
    out = out_ptr + places[:, None] * out_stride_t + head * out_stride_h + channels[None, :]  # [TOKENS, PADDED]
    if BITS != 16 and out_ptr.dtype.element_ty == tl.float16:
        y = fp16_saturated(y)  # half a step above the largest key, or a Hadamard of such
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["count_ptr"])
def read_side(
    rows_ptr, words_ptr, mu_ptr, lam_ptr, slots_ptr, out_ptr, out_stride_t, out_stride_h, count_ptr,
    HEADS: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    STEPS: tl.constexpr, PADDED: tl.constexpr, WORD: tl.constexpr, TOKEN_GROUP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Read one head of the first `count` tokens back to [tokens, heads, DIM]."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    mask_tokens = tokens < tl.load(count_ptr)  # [TOKENS]
    slots = tl.load(slots_ptr + tokens, mask=mask_tokens, other=0).to(tl.int64)  # [TOKENS]
    read_tile(
        rows_ptr, words_ptr, mu_ptr, lam_ptr, slots, out_ptr, out_stride_t, out_stride_h, tokens, mask_tokens,
        tl.program_id(1), HEADS, ROW, DIM, BITS, GROUPS, STEPS, PADDED, WORD, TOKEN_GROUP,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["count_ptr", "slots_ptr", "place_slots_ptr"])
def read_joined(
    k_rows_ptr, k_words_ptr, k_mu_ptr, k_lam_ptr, k_ptr, k_stride_t, k_stride_h,
    v_rows_ptr, v_words_ptr, v_ptr, v_stride_t, v_stride_h, slots_ptr, place_slots_ptr, count_ptr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr,
    K_ROW: tl.constexpr, K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_GROUPS: tl.constexpr, K_STEPS: tl.constexpr,
    K_PADDED: tl.constexpr, K_WORD: tl.constexpr, K_TOKEN_GROUP: tl.constexpr,
    V_ROW: tl.constexpr, V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_GROUPS: tl.constexpr, V_STEPS: tl.constexpr,
    V_PADDED: tl.constexpr, V_WORD: tl.constexpr, V_TOKEN_GROUP: tl.constexpr,
):  # fmt: skip
    """Read keys or values, by the third axis of the grid, of one head of the first `count` token slots to places."""
    head = tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    mask_tokens = tokens < tl.load(count_ptr)  # [TOKENS]
    slots = tl.load(slots_ptr + tokens, mask=mask_tokens, other=0).to(tl.int64)  # [TOKENS]
    places = tl.load(place_slots_ptr + tokens, mask=mask_tokens, other=0).to(tl.int64)  # [TOKENS]
    if tl.program_id(2) == 0:
        read_tile(
            k_rows_ptr, k_words_ptr, k_mu_ptr, k_lam_ptr, slots, k_ptr, k_stride_t, k_stride_h, places, mask_tokens,
            head, HEADS, K_ROW, K_DIM, K_BITS, K_GROUPS, K_STEPS, K_PADDED, K_WORD, K_TOKEN_GROUP,
        )  # fmt: skip
    else:
        read_tile(
            v_rows_ptr, v_words_ptr, v_ptr, v_ptr, slots, v_ptr, v_stride_t, v_stride_h, places, mask_tokens,
            head, HEADS, V_ROW, V_DIM, V_BITS, V_GROUPS, V_STEPS, V_PADDED, V_WORD, V_TOKEN_GROUP,
        )  # fmt: skip
