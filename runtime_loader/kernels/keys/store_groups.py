"""Keys per channel in kernels: a group of tokens is packed once new tokens fill it, from copies and from the chunk.

Codes and scale words equal those of `quant.py`, as in `store_rows`. Which groups are full is known on the
device alone, so that a decode step can be captured in a CUDA graph.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.keys.channel_grids import store_half
from kvtuner.runtime_loader.kernels.storing.store_rows import (
    codes_on_grids,
    grid_of_range,
    inverse_of,
    saturated_range,
)
from kvtuner.runtime_loader.kernels.unpack_codes import slots_of, third_bytes


@triton.jit
def store_groups(
    k_ptr, k_stride_t, k_stride_h, new_slots_ptr, tokens_ptr, copies_ptr, positions_ptr, requests_ptr, past_ptr,
    slots_ptr, rows_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr, RESIDUAL: tl.constexpr, SINKS: tl.constexpr, UNITS: tl.constexpr, EXTEND: tl.constexpr,
):  # fmt: skip
    """Pack UNITS units of one head of a group of one request, if new tokens fill it.

    Request r had ``past[r + 1] - past[r]`` tokens, at ``slots[past[r]]`` and on, before its new ones
    ``tokens[r]`` to ``tokens[r + 1]``; where each has one new token, that is among the former and its copy is made. The
    groups of a request are the second axis of the grid, from the one of its first new token on.
    """
    SLOTS: tl.constexpr = slots_of(BITS)
    WIDE: tl.constexpr = DIM // SLOTS
    BLOCKS: tl.constexpr = (WIDE + UNITS - 1) // UNITS
    request = tl.program_id(0)
    head = tl.program_id(2) // BLOCKS
    begin = tl.load(past_ptr + request).to(tl.int64)
    length = (tl.load(past_ptr + request + 1) - begin).to(tl.int32)
    if EXTEND:
        first_new = tl.load(tokens_ptr + request).to(tl.int64)
        total = length + (tl.load(tokens_ptr + request + 1) - first_new).to(tl.int32)
        num_copied = length
    else:
        total = length
        num_copied = length
        length -= 1
    start = (length // GROUP + tl.program_id(1)) * GROUP
    if start + GROUP > total:
        return
    unit = tl.program_id(2) % BLOCKS * UNITS + tl.arange(0, UNITS)[None, None, :]  # [1, 1, UNITS]
    mask_units = unit < WIDE  # [1, 1, UNITS]
    channel = tl.arange(0, SLOTS)[:, None, None] * WIDE + unit  # [SLOTS, 1, UNITS]
    positions = start + tl.arange(0, GROUP)[None, :, None]  # [1, GROUP, 1]
    copied = positions < num_copied  # [1, GROUP, 1]
    places = positions
    if RESIDUAL > 0:
        places = tl.where(positions < SINKS, positions, SINKS + positions % RESIDUAL)
    places += tl.load(requests_ptr + request).to(tl.int64) * (RESIDUAL + SINKS)  # [1, GROUP, 1]
    at_hand = tl.load(positions_ptr + places, mask=copied, other=-1) == positions  # [1, GROUP, 1]
    copy_ptrs = copies_ptr + (places * HEADS + head) * DIM + channel  # [SLOTS, GROUP, UNITS]
    y = tl.load(copy_ptrs, mask=at_hand & mask_units, other=0.0).to(tl.float32)  # [SLOTS, GROUP, UNITS]
    if EXTEND:
        new_ptrs = k_ptr + (first_new + positions - length) * k_stride_t + head * k_stride_h + channel
        fresh = tl.load(new_ptrs, mask=~copied & mask_units, other=0.0).to(copies_ptr.dtype.element_ty)
        y = tl.where(copied, y, fresh.to(tl.float32))
    # A copy that is not at hand is a fault, which a kernel cannot raise: what marks a NaN shows it in every answer.
    y = tl.where(copied & ~at_hand, float("nan"), y)
    not_finite = tl.sum(y - y, 1) != 0.0  # [SLOTS, UNITS]; NaN and infinity minus themselves are NaN
    low, high = saturated_range(tl.min(y, 1), tl.max(y, 1), not_finite)  # [SLOTS, UNITS] each
    scale, minimum = grid_of_range(low, high, BITS, SYMMETRIC)  # [SLOTS, UNITS] each
    codes = codes_on_grids(y, inverse_of(scale)[:, None, :], minimum.to(tl.float32)[:, None, :], BITS)
    # The sum of codes in their places is their union, [GROUP, UNITS].
    shifts = tl.arange(0, SLOTS)[:, None, None] * BITS  # [SLOTS, 1, 1]
    units = tl.sum(tl.where(not_finite[:, None, :], 0, codes << shifts), 0)[None, :, :]  # [1, GROUP, UNITS]
    if EXTEND:
        of_past = start < length
        first_slot = tl.load(slots_ptr + begin + start, mask=of_past, other=0).to(tl.int64)
        of_chunk = tl.load(new_slots_ptr + first_new + (start - length), mask=start >= length, other=0).to(tl.int64)
        first_slot = tl.where(of_past, first_slot, of_chunk)
    else:
        first_slot = tl.load(slots_ptr + begin + start).to(tl.int64)
    row_ptrs = rows_ptr + (first_slot + tl.arange(0, GROUP)[None, :, None]) * ROW  # [1, GROUP, 1]
    mask = mask_units & (positions < total)  # [1, GROUP, UNITS]
    tl.store(row_ptrs + head * WIDE + unit, units.to(tl.int16), mask=mask)
    if BITS == 3:
        tl.store(third_bytes(row_ptrs, head, unit, HEADS, WIDE), (units >> 16).to(tl.uint8), mask=mask)
    # The words of channels, of which NaN marks one that held it; its bits are torch's.
    byte = 4 * (head * DIM + tl.reshape(channel, (SLOTS, UNITS)))  # [SLOTS, UNITS]
    mask_words = tl.broadcast_to(tl.reshape(mask_units, (1, UNITS)), (SLOTS, UNITS))
    bits = tl.where(not_finite, 0x7E00, minimum.to(tl.int16, bitcast=True))
    store_half(rows_ptr, first_slot, byte, scale, mask_words, ROW, HEADS, DIM, BITS, GROUP)
    store_half(rows_ptr, first_slot, byte + 2, bits, mask_words, ROW, HEADS, DIM, BITS, GROUP)
