"""Scores of a block of keys: native ones, codes with grids of each token, or codes with grids of each channel."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.keys.channel_grids import scores_per_channel
from kvtuner.runtime_loader.kernels.stored_grids import stored_grids, to_columns
from kvtuner.runtime_loader.kernels.unpack_codes import ONE, codes_of, load_thirds, row_offsets, slots_of


@triton.jit
def scores_of_codes(
    q, q_sums, units, thirds, grids, log2_v_scale, scale, TILE: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr,
    GROUPS: tl.constexpr, WORD: tl.constexpr, CAPPED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Scores [TOKENS, TILE] of units [TOKENS, K_UNITS] and their grids; without a cap `log2_v_scale` is in them."""
    IN_GROUP: tl.constexpr = slots_of(BITS) // GROUPS
    scores = tl.zeros([TOKENS, TILE], tl.float32)  # [TOKENS, TILE]
    for group in tl.static_range(GROUPS):
        # Slots of a group share a scale, so that their codes add up before it is applied.
        products = tl.zeros([TOKENS, TILE], tl.float32)  # [TOKENS, TILE]
        for slot in tl.static_range(IN_GROUP):
            codes = codes_of(group * IN_GROUP + slot, units, thirds, BITS, ASM)  # [TOKENS, K_UNITS]
            products = tl.dot(codes, q[group * IN_GROUP + slot], products)
        k_scale = to_columns(grids[group][0] * (scale / ONE), TILE)  # [TOKENS, 1 or TILE], as the offset
        offset = to_columns(grids[group][1], TILE)
        # A tensor core's products come first in every sum: of others Triton 3.8 makes a tile in another layout.
        if WORD == 16:
            products += q_sums[group][None, :] * offset
        if group > 0:
            scores += products * k_scale
        elif CAPPED:
            scores = products * k_scale
        else:
            scores = products * k_scale + to_columns(log2_v_scale, TILE)  # in a sum that is made anyway
        if WORD == 32:
            scores += q_sums[group][None, :] * offset
    return scores


@triton.jit
def scores_of_keys(
    q, q_sums, rows_ptr, words_ptr, slots, first_slot, log2_v_scale, kv_head, unit, mask_units, selectors,
    scale, TILE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, JOINED: tl.constexpr, ROW: tl.constexpr,
    DIM: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, WORD: tl.constexpr, TOKEN_GROUP: tl.constexpr,
    CAPPED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Scores [TOKENS, TILE] of a block of keys; of codes, and without a cap, `log2_v_scale` is in them already.

    With a TOKEN_GROUP above 1 codes have grids per channel, of the group of tokens that begins at `first_slot`.
    """
    WIDE: tl.constexpr = DIM // slots_of(BITS)
    rows = row_offsets(slots[:, None], ROW, [TOKENS, unit.shape[0]], ASM)  # [TOKENS, K_UNITS]
    key_ptrs = (rows_ptr + (kv_head * WIDE + unit))[None, :] + rows  # [TOKENS, K_UNITS]
    if BITS == 16:
        keys = tl.load(key_ptrs, mask=mask_units[None, :], other=0.0)  # [TOKENS, K_UNITS]
        scores = tl.dot(keys.to(q[0].dtype), q[0], input_precision="ieee") * scale  # [TOKENS, TILE]
    else:
        units = tl.load(key_ptrs, mask=mask_units[None, :], other=0)  # [TOKENS, K_UNITS]
        thirds = ()
        if BITS == 3:
            thirds = load_thirds(rows_ptr, rows, kv_head, unit[None, :], mask_units[None, :], selectors, HEADS, WIDE)
        if TOKEN_GROUP > 1:
            scores = scores_per_channel(
                q, units, thirds, rows_ptr, first_slot, kv_head, unit, mask_units, scale, TILE, TOKENS, HEADS, ROW,
                DIM, BITS, TOKEN_GROUP, ASM,
            )  # fmt: skip  # [TOKENS, TILE]
            if not CAPPED:
                scores += to_columns(log2_v_scale, TILE)
        else:
            grids = stored_grids(words_ptr, slots, kv_head, HEADS, JOINED, WIDE, ROW, BITS, GROUPS, WORD, ASM)
            scores = scores_of_codes(
                q, q_sums, units, thirds, grids, log2_v_scale, scale, TILE, TOKENS, BITS, GROUPS, WORD, CAPPED, ASM
            )
    return scores
