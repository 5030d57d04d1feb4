"""Split-KV flash decoding over packed latents (MLA): absorbed queries read a latent as key and as value.

The arithmetic is that of `decode`, of one KV head for all query heads, with the product of rotary channels in every
score. A block's units and scale words are loaded once. Tokens are the rows of a product of keys, as there, and query
heads those of a product of values, so that both take the units as they lie: [TOKENS, UNITS].
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.keys.scores_of_keys import scores_of_codes
from kvtuner.runtime_loader.kernels.queries import (
    have_copies,
    is_in_window,
    positions_of_queries,
    queries_of,
    query_sum,
    sliced_query,
    slots_of_block,
    softcap,
    split_of,
    wait_for_kernel_before,
)
from kvtuner.runtime_loader.kernels.stored_grids import grids_of_words, largest_scale, loaded_words
from kvtuner.runtime_loader.kernels.unpack_codes import (
    ONE,
    codes_of,
    factor_of,
    for_each,
    load_thirds,
    offset_step,
    row_offsets,
    slots_of,
    third_selectors,
    zeros,
)


@triton.jit
def _sum_in_lanes(x, WARPS: tl.constexpr):
    """The sums [WARPS, 8, TILE] over the tokens of [TOKENS, TILE] of one lane: of its warp's 16, those 8 apart."""
    apart = tl.reshape(x, (x.shape[0] // (16 * WARPS), WARPS, 2, 8, x.shape[1]))
    return tl.sum(tl.sum(apart, 2), 0)


@triton.jit
def _of_lanes(sums):
    """The sums [TILE] of those of lanes."""
    return tl.sum(tl.sum(sums, 1), 0)


@triton.jit
def _words_of_block(
    words_ptr, slots, WIDE: tl.constexpr, ROW: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    WORD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The scale words of a block of tokens, [TOKENS, 1] each."""
    words = ()
    if BITS != 16:
        words = loaded_words(words_ptr, slots, 0, 1, 1, WIDE, ROW, BITS, GROUPS, WORD, ASM)
    return words


@triton.jit
def _group_weights(group, scaled_weights, unscaled, grids, GROUPS: tl.constexpr):
    """The weights of a group's codes, [TOKENS, TILE]: of several groups each has a scale of its own."""
    if GROUPS > 1:
        scaled_weights = unscaled * grids[group][0]  # [TOKENS, TILE]
    return scaled_weights


@triton.jit
def _shrunk_offset_sum(group, unscaled, weights, grids, sums, shrink, WARPS: tl.constexpr, WORD: tl.constexpr):
    """The sums of weights times offsets of a group, [WARPS, 8, TILE], with those of a block."""
    if WORD == 16:  # zero points are counted in steps, as codes are
        products = weights[group] * grids[group][1]  # [TOKENS, TILE]
    else:
        products = unscaled * grids[group][1]  # [TOKENS, TILE]
    return sums[group] * shrink[None, None, :] + _sum_in_lanes(products, WARPS)


@triton.jit
def _rounded_rows(group, weights, units, BITS: tl.constexpr):
    """The weights of a group as the rows of a product with units, [TILE, TOKENS]."""
    return tl.trans(weights[group].to(units.dtype if BITS == 16 else tl.float16))


@triton.jit
def _shrunk_value_sum(
    slot, weights, units, thirds, acc, shrink, BITS: tl.constexpr, GROUPS: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The sum of weights times a slot of a block's units, [TILE, UNITS], with those of the blocks before."""
    # As in `decode`, a block's sum starts at zero and is added by an instruction that rounds.
    shrink = tl.broadcast_to(shrink[:, None], acc[slot].shape)  # [TILE, UNITS]
    added = tl.zeros(shrink.shape, tl.float32)  # [TILE, UNITS]
    if BITS == 16:
        added = tl.dot(_rounded_rows(0, weights, units, BITS), units, added, input_precision="ieee")
    else:
        codes = codes_of(slot, units, thirds, BITS, ASM)  # [TOKENS, UNITS]
        rounded = _rounded_rows(slot // (slots_of(BITS) // GROUPS), weights, units, BITS)  # [TILE, TOKENS]
        added = tl.dot(rounded, codes, added)
    return tl.fma(acc[slot], shrink, added)


@triton.jit(do_not_specialize=["num_splits", "num_requests"])
def decode_latents(
    q_ptr, q_stride_t, q_stride_h, rotary_q_ptr, rotary_q_stride_t, rotary_q_stride_h, q_indptr_ptr, rows_ptr,
    words_ptr, rotary_ptr, bias_ptr, indptr_ptr, slots_ptr, request_slots_ptr, positions_ptr, partial_ptr, lse_ptr,
    scale, cap, num_splits, num_requests,
    HEADS: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, MIN_SPLIT: tl.constexpr, WARPS: tl.constexpr,
    ROW: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, UNITS: tl.constexpr,
    WORD: tl.constexpr, ROTARY_ROW: tl.constexpr, ROTARY_DIM: tl.constexpr, ROTARY_PADDED: tl.constexpr,
    EXTEND: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr, ASM: tl.constexpr, RESIDUAL: tl.constexpr,
    SINKS: tl.constexpr, EXACT_PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One split of one request's latents: TILE pairs of query and head, as `decode_split` has them of one KV head.

    A query is [HEADS, DIM] in the space of stored latents and [HEADS, ROTARY_DIM] of rotary channels; a bias is its
    product with mu. UNITS and ROTARY_PADDED are padded to a power of two, at least 16; TOKENS is 16 for each of WARPS,
    or a multiple. Requests, splits, parts and an exact window are those of `decode_split`, and partial outputs
    [queries, HEADS, parts, DIM].
    """
    SLOTS: tl.constexpr = slots_of(BITS)
    WIDE: tl.constexpr = DIM // SLOTS
    WINDOWED: tl.constexpr = RESIDUAL + SINKS > 0
    PLACED: tl.constexpr = ASM and BITS != 3  # of 3 bits the loop would keep a register in memory on sm_120
    wait_for_kernel_before(DEPENDENT)
    split = tl.program_id(1)
    request, _, queries, heads, mask_heads, any_pair = queries_of(
        q_indptr_ptr, num_requests, 1, 1, HEADS, TILE, EXTEND
    )  # [TILE] each
    if not any_pair:
        return
    begin, first, last = split_of(indptr_ptr, request, split, num_splits, MIN_SPLIT, TOKENS)
    pairs = queries * HEADS + heads  # [TILE]
    place = pairs * (num_splits + EXACT_PARTS) + split  # [TILE]
    if last <= first:
        tl.store(lse_ptr + place, tl.full([TILE], float("-inf"), tl.float32), mask=mask_heads)
        return
    unit = tl.arange(0, UNITS)  # [UNITS]
    channel = tl.arange(0, ROTARY_PADDED)  # [ROTARY_PADDED]
    mask_units = unit < WIDE  # [UNITS]
    mask_channels = channel < ROTARY_DIM  # [ROTARY_PADDED]
    q_base = q_ptr + queries[None, :] * q_stride_t + heads[None, :] * q_stride_h + unit[:, None]  # [UNITS, TILE]
    mask_q = mask_heads[None, :] & mask_units[:, None]  # [UNITS, TILE]
    q = for_each(sliced_query, SLOTS, (q_base, mask_q, BITS, WIDE))  # [UNITS, TILE] for each slot
    q_sums = for_each(query_sum, GROUPS, (q, 1.0, TILE, BITS, SLOTS // GROUPS, WORD))  # [TILE] for each group
    rotary_q_ptrs = rotary_q_ptr + queries[None, :] * rotary_q_stride_t + heads[None, :] * rotary_q_stride_h
    mask_rotary_q = mask_heads[None, :] & mask_channels[:, None]  # [ROTARY_PADDED, TILE]
    rotary_q = tl.load(rotary_q_ptrs + channel[:, None], mask=mask_rotary_q, other=0.0)  # [ROTARY_PADDED, TILE]
    bias = tl.zeros([TILE], tl.float32)  # [TILE]
    if BIASED:
        bias = scale * tl.load(bias_ptr + pairs, mask=mask_heads, other=0.0)
    acc = for_each(zeros, SLOTS, ([TILE, UNITS],))  # sums of weights times codes, for each slot
    offset_sums = for_each(zeros, GROUPS, ([WARPS, 8, TILE],))  # sums of weights times offsets, for each group
    if WINDOWED:
        length, query_positions = positions_of_queries(queries, request, q_indptr_ptr, indptr_ptr, EXTEND)  # [TILE]
        first_query = length if EXTEND else length - 1
        places_row = tl.load(request_slots_ptr + request).to(tl.int64) * (RESIDUAL + SINKS)
    # Not -inf: where no score is finite yet, exp2(-inf - -inf) would be NaN.
    top = tl.full([TILE], -1e30, tl.float32)  # [TILE]
    total = tl.zeros([WARPS, 8, TILE], tl.float32)  # [WARPS, 8, TILE]
    slots_ptr += begin
    # A block's slots and words are carried over from the blocks before: rows alone take stages of the pipeline.
    tokens = first + tl.arange(0, TOKENS)  # [TOKENS]
    next_slots = slots_of_block(slots_ptr, tokens, last, PLACED)  # [TOKENS]
    next_words = _words_of_block(words_ptr, next_slots, WIDE, ROW, BITS, GROUPS, WORD, ASM)
    selectors = third_selectors(rows_ptr, unit[None, :], num_splits < 0, BITS, WIDE)  # [1, UNITS]
    for start in tl.range(first, last, TOKENS):
        tokens = start + tl.arange(0, TOKENS)  # [TOKENS]
        mask_tokens = tokens < last  # [TOKENS]
        slots = next_slots
        next_slots = slots_of_block(slots_ptr, tokens + TOKENS, last, PLACED)  # [TOKENS]
        grids = ()
        if BITS != 16:
            grids = grids_of_words(next_words, 0, 1, 1, WIDE, BITS, GROUPS, WORD, ASM)  # pairs of [TOKENS, 1]
        log2_scale, inverse = largest_scale(grids, mask_tokens, TOKENS, 1, ASM)  # [TOKENS, 1] each
        rows = row_offsets(slots[:, None], ROW, [TOKENS, UNITS], ASM)  # [TOKENS, UNITS]
        row_ptrs = rows_ptr + unit[None, :] + rows  # [TOKENS, UNITS]
        rotary_ptrs = (
            rotary_ptr + channel[None, :] + row_offsets(slots[:, None], ROTARY_ROW, [TOKENS, ROTARY_PADDED], ASM)
        )
        rotary = tl.load(rotary_ptrs, mask=mask_channels[None, :], other=0.0)  # [TOKENS, ROTARY_PADDED]
        thirds = ()
        if BITS == 16:
            units = tl.load(row_ptrs, mask=mask_units[None, :], other=0.0)  # [TOKENS, UNITS]
            products = tl.dot(units.to(q[0].dtype), q[0], input_precision="ieee")  # [TOKENS, TILE]
        else:
            units = tl.load(row_ptrs, mask=mask_units[None, :], other=0)  # [TOKENS, UNITS]
            if BITS == 3:
                thirds = load_thirds(rows_ptr, rows, 0, unit[None, :], mask_units[None, :], selectors, 1, WIDE)
            products = scores_of_codes(
                q, q_sums, units, thirds, grids, log2_scale, 1.0, TILE, TOKENS, BITS, GROUPS, WORD, True, ASM
            )  # [TOKENS, TILE]
        # Onto the products of codes, which saves a sum.
        products = tl.dot(rotary.to(rotary_q.dtype), rotary_q, products, input_precision="ieee")  # [TOKENS, TILE]
        if CAPPED:
            scores = softcap(products * scale + bias[None, :], cap) + log2_scale  # [TOKENS, TILE]
        else:
            scores = products * scale + log2_scale  # [TOKENS, TILE]
        if WINDOWED:  # a constant, apart from what is known on the device alone
            if (start + TOKENS > first_query - RESIDUAL) | (start < SINKS):  # few blocks: all others skip this
                read = tl.minimum(tokens, last - 1)  # [TOKENS]: past the end rows are those of the last token
                copied = have_copies(read, first_query, positions_ptr, places_row, RESIDUAL, SINKS)
                exact = is_in_window(query_positions[None, :], read[:, None], RESIDUAL, SINKS)  # [TOKENS, TILE]
                scores = tl.where(copied[:, None] & exact, float("-inf"), scores)
        # The online softmax: what was summed shrinks to the new maximum.
        new_top = tl.maximum(top, tl.max(scores, 0))  # [TILE]
        shrink = tl.exp2(top - new_top)  # [TILE]
        top = new_top
        scaled_weights = tl.exp2(scores - top[None, :])  # [TOKENS, TILE]: weights times the largest scale, at most 1
        unscaled = scaled_weights * inverse  # [TOKENS, TILE]
        total = total * shrink[None, None, :] + _sum_in_lanes(unscaled, WARPS)
        weights = (scaled_weights,)
        if BITS != 16:
            weights = for_each(_group_weights, GROUPS, (scaled_weights, unscaled, grids, GROUPS))  # [TOKENS, TILE] each
            offset_sums = for_each(
                _shrunk_offset_sum, GROUPS, (unscaled, weights, grids, offset_sums, shrink, WARPS, WORD)
            )
        # Always: Triton gives products in one block of code the same warps, which those of keys have along tokens and
        # those of values along units.
        if start < last:
            acc = for_each(_shrunk_value_sum, SLOTS, (weights, units, thirds, acc, shrink, BITS, GROUPS, ASM))
        next_words = _words_of_block(words_ptr, next_slots, WIDE, ROW, BITS, GROUPS, WORD, ASM)
    total = _of_lanes(total)  # [TILE]
    out = partial_ptr + place[:, None] * DIM + unit[None, :]  # [TILE, UNITS]
    for slot in tl.static_range(SLOTS):
        output = acc[slot]  # [TILE, UNITS]
        if BITS != 16:
            low = _of_lanes(offset_sums[slot // (SLOTS // GROUPS)])[:, None]  # [TILE, 1]
            if WORD == 16:
                low *= offset_step(BITS, WORD) / ONE
            output = output * (1 / (ONE * factor_of(slot, BITS))) + low
        # Slot j of unit u is channel j * WIDE + u.
        tl.store(out + slot * WIDE, output / total[:, None], mask=mask_heads[:, None] & mask_units[None, :])
    if not CAPPED:
        top += bias  # what every score of this split has more
    tl.store(lse_ptr + place, top + tl.log2(total), mask=mask_heads)
