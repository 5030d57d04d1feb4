"""The grids of keys per channel inside kernels: words that the tokens of a group share, spread over their rows.

A group is GROUP slots in a row. Its words, a scale and a minimum in fp16 for each channel of each head, are cut into
shares of as many bytes for each row, which lie behind the row's codes (docs/format.md, "Keys per channel").
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.unpack_codes import ONE, codes_of, factor_of, slots_of


@triton.constexpr_function
def share_of(heads, channels, group):
    """Return the bytes of a group's words in each of its rows."""
    return (4 * heads * channels + group - 1) // group


@triton.jit
def _byte_ptrs(
    rows_ptr, first_slot, byte, ROW: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Pointers to bytes of a group's words; ROW is in units of 16 bits."""
    SHARE: tl.constexpr = share_of(HEADS, DIM, GROUP)
    byte_ptrs = rows_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    return byte_ptrs + (first_slot + byte // SHARE) * (2 * ROW) + (HEADS * DIM * BITS // 8 + byte % SHARE)


@triton.jit
def store_half(
    rows_ptr, first_slot, byte, value, mask, ROW: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write 16 bits of a group's words from an even byte on, which shares of odd length cut between two rows."""
    low_ptrs = _byte_ptrs(rows_ptr, first_slot, byte, ROW, HEADS, DIM, BITS, GROUP)
    if share_of(HEADS, DIM, GROUP) % 2 == 0:
        tl.store(low_ptrs.to(tl.pointer_type(tl.int16), bitcast=True), value.to(tl.int16), mask=mask)
    else:
        high_ptrs = _byte_ptrs(rows_ptr, first_slot, byte + 1, ROW, HEADS, DIM, BITS, GROUP)
        tl.store(low_ptrs, value.to(tl.uint8), mask=mask)
        tl.store(high_ptrs, (value >> 8).to(tl.uint8), mask=mask)


@triton.jit
def _loaded_half(
    rows_ptr, first_slot, byte, mask, ROW: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The fp16 numbers that `store_half` wrote, float32, 0 where the mask is not."""
    low_ptrs = _byte_ptrs(rows_ptr, first_slot, byte, ROW, HEADS, DIM, BITS, GROUP)
    if share_of(HEADS, DIM, GROUP) % 2 == 0:
        half = tl.load(low_ptrs.to(tl.pointer_type(tl.int16), bitcast=True), mask=mask, other=0)
    else:
        high_ptrs = _byte_ptrs(rows_ptr, first_slot, byte + 1, ROW, HEADS, DIM, BITS, GROUP)
        low = tl.load(low_ptrs, mask=mask, other=0).to(tl.int32)
        half = (low | (tl.load(high_ptrs, mask=mask, other=0).to(tl.int32) << 8)).to(tl.int16)
    return half.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def channel_grids(
    rows_ptr, first_slot, channel, mask, ROW: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The scales and the minima, float32, of channels of groups that begin at slots; all heads' channels are counted.

    `first_slot`, of 64 bits, is broadcast to the channels' shape. Those that the mask does not have are 0.
    """
    scale = _loaded_half(rows_ptr, first_slot, 4 * channel, mask, ROW, HEADS, DIM, BITS, GROUP)
    minimum = _loaded_half(rows_ptr, first_slot, 4 * channel + 2, mask, ROW, HEADS, DIM, BITS, GROUP)
    return scale, minimum


@triton.jit
def scores_per_channel(
    q, units, thirds, rows_ptr, first_slot, kv_head, unit, mask_units, scale, TILE: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Scores [TOKENS, TILE] of units [TOKENS, K_UNITS] of one group, whose first slot is given.

    Scales are folded into queries, once for a block: with code c and channel i, q . key = sum q_i s_i c_i + q . m. The
    products q_i s_i are divided by their largest, so that fp16 holds them whatever the scales are.
    """
    WIDE: tl.constexpr = DIM // slots_of(BITS)
    scaled = ()  # [K_UNITS, TILE] for each slot
    offset = tl.zeros([TILE], tl.float32)  # [TILE]
    largest = tl.full([TILE], 2.0**-100, tl.float32)  # [TILE]
    for slot in tl.static_range(slots_of(BITS)):
        channel = kv_head * DIM + slot * WIDE + unit  # [K_UNITS]
        step, minimum = channel_grids(rows_ptr, first_slot, channel, mask_units, ROW, HEADS, DIM, BITS, GROUP)
        of_slot = q[slot].to(tl.float32)  # [K_UNITS, TILE]
        scaled = scaled + (of_slot * step[:, None],)
        offset += tl.sum(of_slot * minimum[:, None], 0) * factor_of(slot, BITS)
        largest = tl.maximum(largest, tl.max(tl.abs(scaled[slot]), 0))
    products = tl.zeros([TOKENS, TILE], tl.float32)  # [TOKENS, TILE]
    for slot in tl.static_range(slots_of(BITS)):
        codes = codes_of(slot, units, thirds, BITS, ASM)  # [TOKENS, K_UNITS]
        products = tl.dot(codes, (scaled[slot] * (1.0 / largest)[None, :]).to(tl.float16), products)
    return products * (largest * (scale / ONE))[None, :] + (offset * scale)[None, :]
