"""Split-KV flash decoding over packed rows: one query per request, or several behind a prefix; every pair of widths.

Scale and minimum are folded. With code c, key = s * c + m, and codes unpacked as f * c, f a power of two,

    q . key   = s * (q / f . f * c) + m * sum(q)
    sum p * v = sum w * (f * c) / f + sum p * m          with w = p * s, rounded once

or, of short words with m = -z * s for a zero point z,

    q . key   = s * (q / f . f * c - z * sum(q))
    sum p * v = sum w * (f * c) / f - sum w * z

so that codes enter the tensor cores exactly. The exponent of w is that of a softmax whose scores are those of p plus
log2(s): the running maximum of those keeps w at most 1, whatever the scales are, and fp16 holds it. A group whose scale
is 0 has codes 0, so that any other scale gives the same: 2 ** -24 is taken.

Tokens, and channels of values, are the 16 rows of a tensor core's products; its 8 columns are pairs of query and head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.keys.scores_of_keys import scores_of_keys
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
from kvtuner.runtime_loader.kernels.stored_grids import to_columns, value_grids
from kvtuner.runtime_loader.kernels.unpack_codes import (
    ONE,
    codes_of,
    factor_of,
    for_each,
    load_thirds,
    masked_halves,
    offset_step,
    row_offsets,
    slots_of,
    third_selectors,
    zeros,
)


@triton.jit
def _sum_in_lanes(x, LANES: tl.constexpr):
    """The sums [LANES, TILE] over the tokens of [TOKENS, TILE] that one lane holds: those LANES apart."""
    return tl.sum(tl.reshape(x, (x.shape[0] // LANES, LANES, x.shape[1])), 0)


@triton.jit
def _are_tokens(count, TOKENS: tl.constexpr):
    """Whether each place of a block has a token, of so many that are left, [TOKENS]."""
    # A lane's places lie 8 apart: of each a comparison takes the constant part, and one sum serves all.
    places = tl.arange(0, TOKENS)  # [TOKENS]
    return (places & ~7) < count - (places & 7)


@triton.jit
def _group_weights(group, scaled_weights, grids, inverse, GROUPS: tl.constexpr):
    """The weights of a group's codes, [TOKENS, TILE]."""
    if GROUPS > 1:  # in them is the largest scale of the groups; this group's is at most that
        scaled_weights *= to_columns(grids[group][0] * inverse, scaled_weights.shape[1])  # [TOKENS, TILE]
    return scaled_weights


@triton.jit
def _rounded(group, weights):
    """The weights of a group as a tensor core takes them."""
    return weights[group].to(tl.float16)


@triton.jit
def _weights_of_head(group, weights, head, JOINED: tl.constexpr, ASM: tl.constexpr):
    """The weights of a group [TOKENS, TILE] in the columns of one of JOINED heads, and zeros in the others."""
    of_head = weights[group]  # [TOKENS, TILE]
    if JOINED > 1:
        columns = tl.arange(0, of_head.shape[1])[None, :] // (of_head.shape[1] // JOINED)  # [1, TILE]
        if ASM and of_head.dtype == tl.float16:  # two at once, where a choice would take them apart
            mask = tl.broadcast_to(tl.where(columns == head, -1, 0).to(tl.int16), of_head.shape)  # [TOKENS, TILE]
            of_head = masked_halves(of_head, mask)
        else:
            of_head = tl.where(columns == head, of_head, 0.0)
    return of_head


@triton.jit
def _shrunk_offset_sum(group, scaled_weights, weights, grids, inverse, offset_sums, shrink, WORD: tl.constexpr):
    """The sums of weights times offsets of a group, [LANES, TILE], with those of a block."""
    if WORD == 16:  # zero points are counted in steps, as codes are
        products = weights[group] * to_columns(grids[group][1], scaled_weights.shape[1])
    else:
        products = scaled_weights * to_columns(inverse * grids[group][1], scaled_weights.shape[1])
    return offset_sums[group] * shrink[None, :] + _sum_in_lanes(products, offset_sums[group].shape[0])


@triton.jit
def _shrunk_code_sum(
    slot, weights, units, thirds, acc, shrink, JOINED: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The sum of weights times codes of a slot, [V_UNITS, TILE], with those of a block."""
    # A tensor core drops low bits of what it adds to, always towards zero. A block's sum therefore starts at zero, and
    # is added by an instruction that rounds, the one that shrinks what was summed; Triton leaves this one as it is.
    shrink = tl.broadcast_to(shrink[None, :], acc[slot].shape)  # [V_UNITS, TILE]
    added = tl.zeros(shrink.shape, tl.float32)  # [V_UNITS, TILE]
    for head in tl.static_range(JOINED):
        codes = codes_of(slot, units[head], thirds[head], BITS, ASM)  # [V_UNITS, TOKENS]
        added = tl.dot(codes, weights[head][slot // (slots_of(BITS) // GROUPS)], added)
    return tl.fma(acc[slot], shrink, added)


@triton.jit
def _add_values(
    scaled_weights, acc, min_sums, shrink, grids, inverse, rows_ptr, slots, kv_head, unit, mask_units,
    selectors,
    HEADS: tl.constexpr, JOINED: tl.constexpr, ROW: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr,
    GROUPS: tl.constexpr, WORD: tl.constexpr, K_UNITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The sums over tokens, shrunk to the new maximum, with a block of values by its weights [TOKENS, TILE].

    Returns sums over codes, [V_UNITS, TILE] for each slot, and over minima, [TILE] for each group.
    """
    if unit.shape[0] == K_UNITS:  # as keys lie, turned: slots move once to the lanes that copy both
        rows = tl.trans(row_offsets(slots[:, None], ROW, [slots.shape[0], K_UNITS], ASM))  # [V_UNITS, TOKENS]
    else:
        rows = row_offsets(slots[None, :], ROW, [unit.shape[0], slots.shape[0]], ASM)  # [V_UNITS, TOKENS]
    value_ptrs = (rows_ptr + (kv_head * WIDE + unit))[:, None] + rows  # [V_UNITS, TOKENS]
    if BITS == 16:
        added = tl.zeros(acc[0].shape, tl.float32)  # [V_UNITS, TILE]
        for head in tl.static_range(JOINED):
            values = tl.load(value_ptrs + head * WIDE, mask=mask_units[:, None], other=0.0)  # [V_UNITS, TOKENS]
            weights = _weights_of_head(0, (scaled_weights.to(values.dtype),), head, JOINED, ASM)  # [TOKENS, TILE]
            added = tl.dot(values, weights, added, input_precision="ieee")
        acc = (tl.fma(acc[0], tl.broadcast_to(shrink[None, :], added.shape), added),)
    else:
        units = ()
        thirds = ()
        rounded = ()
        weights = for_each(_group_weights, GROUPS, (scaled_weights, grids, inverse, GROUPS))  # [TOKENS, TILE]
        min_sums = for_each(
            _shrunk_offset_sum, GROUPS, (scaled_weights, weights, grids, inverse, min_sums, shrink, WORD)
        )
        weights = for_each(_rounded, GROUPS, (weights,))
        for head in tl.static_range(JOINED):
            units = units + (tl.load(value_ptrs + head * WIDE, mask=mask_units[:, None], other=0),)
            of_head = ()
            if BITS == 3:
                of_head = load_thirds(
                    rows_ptr, rows, kv_head + head, unit[:, None], mask_units[:, None], selectors, HEADS, WIDE
                )
            thirds = thirds + (of_head,)
            rounded = rounded + (for_each(_weights_of_head, GROUPS, (weights, head, JOINED, ASM)),)
        acc = for_each(
            _shrunk_code_sum, slots_of(BITS), (rounded, units, thirds, acc, shrink, JOINED, BITS, GROUPS, ASM)
        )
    return acc, min_sums


@triton.jit
def _store_partial(
    out, acc, min_sums, total, mask, DIM: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    WORD: tl.constexpr,
):  # fmt: skip
    """Store a partial output at the channels of the first slot, `out` [V_UNITS, TILE], and of the others."""
    SLOTS: tl.constexpr = slots_of(BITS)
    for slot in tl.static_range(SLOTS):
        output = acc[slot]  # [V_UNITS, TILE]
        if BITS != 16:
            low = tl.sum(min_sums[slot // (SLOTS // GROUPS)], 0)[None, :]  # [1, TILE]
            if WORD == 16:
                low *= offset_step(BITS, WORD) / ONE
            output = output * (1 / (ONE * factor_of(slot, BITS))) + low
        # Slot j of unit u is channel j * DIM / SLOTS + u.
        tl.store(out + slot * (DIM // SLOTS), output / total[None, :], mask=mask)


@triton.jit(do_not_specialize=["num_splits", "num_requests"])
def decode_split(
    q_ptr, q_stride_t, q_stride_h, q_indptr_ptr, k_rows_ptr, k_words_ptr, v_rows_ptr, v_words_ptr, bias_ptr,
    indptr_ptr, slots_ptr, request_slots_ptr, positions_ptr, partial_ptr, lse_ptr, scale, cap, num_splits,
    num_requests,
    HEADS: tl.constexpr, JOINED: tl.constexpr, GQA: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    K_ROW: tl.constexpr, K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_GROUPS: tl.constexpr, K_UNITS: tl.constexpr,
    K_WORD: tl.constexpr, K_TOKEN_GROUP: tl.constexpr,
    V_ROW: tl.constexpr, V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_GROUPS: tl.constexpr, V_UNITS: tl.constexpr,
    V_WORD: tl.constexpr,
    EXTEND: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr, ASM: tl.constexpr, RESIDUAL: tl.constexpr,
    SINKS: tl.constexpr, EXACT_PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One split of one request's rows: TILE pairs of query and head that read one KV head.

    Request r has the query r or, where it extends its rows, those from ``q_indptr[r]`` to ``q_indptr[r + 1]``. Queries
    are those of stored space; a bias is their product with mu. K_UNITS and V_UNITS are units of a head padded to a
    power of two, at least 16. Partial outputs are [queries, num_heads, parts, V_DIM] float32, in stored space, with the
    log2 of their weight; a split without tokens has -inf and nothing else. Parts are splits
    and, behind them, EXACT_PARTS of model space. Under an exact window, a query does not read the rows of tokens whose
    copies it reads, by the positions beside the places of its request's slot.
    """
    K_SLOTS: tl.constexpr = slots_of(K_BITS)
    V_SLOTS: tl.constexpr = slots_of(V_BITS)
    K_WIDE: tl.constexpr = K_DIM // K_SLOTS
    V_WIDE: tl.constexpr = V_DIM // V_SLOTS
    WINDOWED: tl.constexpr = RESIDUAL + SINKS > 0
    LANES: tl.constexpr = 8  # that share a column of a product
    wait_for_kernel_before(DEPENDENT)
    split = tl.program_id(1)
    # Queries, heads and their mask are [TILE].
    request, kv_head, queries, heads, mask_pairs, any_pair = queries_of(
        q_indptr_ptr, num_requests, HEADS, JOINED, GQA, TILE, EXTEND
    )
    if not any_pair:
        return
    begin, first, last = split_of(indptr_ptr, request, split, num_splits, MIN_SPLIT, TOKENS)
    pairs = queries * (HEADS * GQA) + heads  # [TILE]
    place = pairs * (num_splits + EXACT_PARTS) + split  # [TILE]
    if last <= first:
        tl.store(lse_ptr + place, tl.full([TILE], float("-inf"), tl.float32), mask=mask_pairs)
        return
    k_unit = tl.arange(0, K_UNITS)  # [K_UNITS]
    v_unit = tl.arange(0, V_UNITS)  # [V_UNITS]
    mask_k = k_unit < JOINED * K_WIDE  # [K_UNITS]
    mask_v = v_unit < V_WIDE  # [V_UNITS]
    q_base = q_ptr + queries[None, :] * q_stride_t + heads[None, :] * q_stride_h  # [1, TILE]
    q_base += (k_unit % K_WIDE)[:, None]  # [K_UNITS, TILE]
    # Keys of a program's heads lie side by side; a query meets zeros in the place of another head's.
    own_keys = (kv_head + k_unit // K_WIDE)[:, None] == (heads // GQA)[None, :]  # [K_UNITS, TILE]
    mask_q = mask_pairs[None, :] & mask_k[:, None] & own_keys  # [K_UNITS, TILE]
    q = for_each(sliced_query, K_SLOTS, (q_base, mask_q, K_BITS, K_WIDE))  # [K_UNITS, TILE] for each slot
    q_sums = for_each(
        query_sum, K_GROUPS, (q, scale, TILE, K_BITS, K_SLOTS // K_GROUPS, K_WORD)
    )  # [TILE] for each group
    bias = tl.zeros([TILE], tl.float32)  # [TILE]
    if BIASED:
        bias = scale * tl.load(bias_ptr + pairs, mask=mask_pairs, other=0.0)
    acc = for_each(zeros, V_SLOTS, ([V_UNITS, TILE],))  # sums of weights times codes, [V_UNITS, TILE] for each slot
    min_sums = for_each(zeros, V_GROUPS, ([LANES, TILE],))  # sums of weights times minima, for each group
    if WINDOWED:
        length, query_positions = positions_of_queries(queries, request, q_indptr_ptr, indptr_ptr, EXTEND)  # [TILE]
        first_query = length if EXTEND else length - 1
        places_row = tl.load(request_slots_ptr + request).to(tl.int64) * (RESIDUAL + SINKS)
    # Not -inf: where no score is finite yet, exp2(-inf - -inf) would be NaN.
    top = tl.full([TILE], -1e30, tl.float32)  # [TILE]
    total = tl.zeros([LANES, TILE], tl.float32)  # [LANES, TILE]
    slots_ptr += begin
    next_slots = slots_of_block(slots_ptr, first + tl.arange(0, TOKENS), last, ASM)  # [TOKENS]
    k_selectors = ()
    v_selectors = ()
    if K_UNITS == 16:  # codes of more units Triton lays out anew where selectors are in them
        k_selectors = third_selectors(k_rows_ptr, k_unit[None, :], num_splits < 0, K_BITS, K_WIDE)  # [1, K_UNITS]
    if V_UNITS == 16:
        v_selectors = third_selectors(v_rows_ptr, v_unit[:, None], num_splits < 0, V_BITS, V_WIDE)  # [V_UNITS, 1]
    for start in tl.range(first, last, TOKENS):
        tokens = start + tl.arange(0, TOKENS)  # [TOKENS]
        mask_tokens = _are_tokens(last - start, TOKENS)  # [TOKENS]
        slots = next_slots
        v_grids, log2_v_scale, inverse = value_grids(
            v_words_ptr, slots, mask_tokens, kv_head,
            TOKENS, HEADS, JOINED, V_WIDE, V_ROW, V_BITS, V_GROUPS, V_WORD, ASM,
        )  # fmt: skip  # [TOKENS, JOINED] each
        first_slot = start
        if K_TOKEN_GROUP > 1:  # blocks begin at multiples of their tokens, which groups are too: each is in one group
            first_slot = tl.load(slots_ptr + start).to(tl.int64) // K_TOKEN_GROUP * K_TOKEN_GROUP
        scores = scores_of_keys(
            q, q_sums, k_rows_ptr, k_words_ptr, slots, first_slot, log2_v_scale, kv_head, k_unit, mask_k,
            k_selectors, scale, TILE, TOKENS, HEADS, JOINED, K_ROW, K_DIM, K_BITS, K_GROUPS, K_WORD, K_TOKEN_GROUP,
            CAPPED, ASM,
        )  # fmt: skip  # [TOKENS, TILE]
        if CAPPED:
            scores = softcap(scores + bias[None, :], cap)
        if CAPPED or K_BITS == 16:
            scores += to_columns(log2_v_scale, TILE)
        if WINDOWED:  # a constant, apart from what is known on the device alone
            if (start + TOKENS > first_query - RESIDUAL) | (start < SINKS):  # few blocks: all others skip this
                read = tl.minimum(tokens, last - 1)  # [TOKENS]: past the end rows are those of the last token
                copied = have_copies(read, first_query, positions_ptr, places_row, RESIDUAL, SINKS)
                exact = is_in_window(query_positions[None, :], read[:, None], RESIDUAL, SINKS)  # [TOKENS, TILE]
                hidden = copied[:, None] & exact  # [TOKENS, TILE]
                scores = tl.where(hidden, float("-inf"), scores)
        # The online softmax: what was summed shrinks to the new maximum.
        new_top = tl.maximum(top, tl.max(scores, 0))  # [TILE]
        shrink = tl.exp2(top - new_top)  # [TILE]
        top = new_top
        scaled_weights = tl.exp2(scores - top[None, :])  # [TOKENS, TILE]: weights times the value's scale, at most 1
        total = total * shrink[None, :] + _sum_in_lanes(scaled_weights * to_columns(inverse, TILE), LANES)
        acc, min_sums = _add_values(
            scaled_weights, acc, min_sums, shrink, v_grids, inverse, v_rows_ptr, slots, kv_head, v_unit,
            mask_v, v_selectors, HEADS, JOINED, V_ROW, V_WIDE, V_BITS, V_GROUPS, V_WORD, K_UNITS, ASM,
        )  # fmt: skip
        # The next block's, carried over in registers: loaded by the block that needs them, they would take up one of
        # the pipeline's stages, and rows would have one buffer where they have two.
        next_slots = slots_of_block(slots_ptr, tokens + TOKENS, last, ASM)  # [TOKENS]
    total = tl.sum(total, 0)  # [TILE]
    out = partial_ptr + place[None, :] * V_DIM + v_unit[:, None]  # [V_UNITS, TILE]
    _store_partial(out, acc, min_sums, total, mask_pairs[None, :] & mask_v[:, None], V_DIM, V_BITS, V_GROUPS, V_WORD)
    if not CAPPED:
        top += bias  # what every score of this split has more
    tl.store(lse_ptr + place, top + tl.log2(total), mask=mask_pairs)
