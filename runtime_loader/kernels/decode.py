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
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.queries import (
    have_copies,
    is_in_window,
    positions_of_queries,
    queries_of,
    softcap,
)
from kvtuner.runtime_loader.kernels.stored_grids import stored_grids
from kvtuner.runtime_loader.kernels.unpack_codes import (
    ONE,
    codes_of,
    factor_of,
    for_each,
    fp16_saturated,
    load_thirds,
    log2_and_inverse,
    offset_step,
    slots_of,
)


@triton.jit
def _zeros(_, SHAPE: tl.constexpr):
    return tl.zeros(SHAPE, tl.float32)


@triton.jit
def _split_of(indptr_ptr, request, split, num_splits, MIN_SPLIT: tl.constexpr, TOKENS: tl.constexpr):
    """Return the start of a request's slots, and the first and last of its tokens that a split reads."""
    begin = tl.load(indptr_ptr + request).to(tl.int64)
    length = (tl.load(indptr_ptr + request + 1) - begin).to(tl.int32)
    # Whole blocks, and none shorter than MIN_SPLIT: a short request leaves its later splits empty.
    per_split = tl.cdiv(tl.cdiv(tl.maximum(length, MIN_SPLIT * num_splits), num_splits), TOKENS) * TOKENS
    first = split * per_split
    return begin, first, tl.minimum(first + per_split, length)


@triton.jit
def _sliced_query(slot, q_base, mask, BITS: tl.constexpr, WIDE: tl.constexpr):
    """Queries [TILE, K_UNITS] at the channels of a slot, divided by the factor of its codes."""
    q = tl.load(q_base + slot * WIDE, mask=mask, other=0.0)  # [TILE, K_UNITS]
    if BITS != 16:
        # Here, once, where it costs nothing in the loop.
        q = fp16_saturated(q.to(tl.float32) * (1 / factor_of(slot, BITS)))
    return q


@triton.jit
def _query_sum(group, q, TILE: tl.constexpr, BITS: tl.constexpr, IN_GROUP: tl.constexpr, WORD: tl.constexpr):
    """The sum of queries over the channels of a group, times the step of a zero point if words are short, [TILE]."""
    q_sum = tl.zeros([TILE], tl.float32)  # [TILE]
    if BITS != 16:
        for slot in tl.static_range(IN_GROUP):
            # Summed after the rounding, so that the minimum is weighted by the queries that the codes meet.
            part = q[group * IN_GROUP + slot].to(tl.float32)  # [TILE, K_UNITS]
            q_sum += tl.sum(part, 1) * factor_of(group * IN_GROUP + slot, BITS)
    return q_sum * offset_step(BITS, WORD)


@triton.jit
def _scores_of(
    q, q_sums, rows_ptr, words_ptr, slots, mask_tokens, log2_v_scale, kv_head, unit, mask_units, scale,
    TILE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, ROW: tl.constexpr, WIDE: tl.constexpr,
    BITS: tl.constexpr, GROUPS: tl.constexpr, WORD: tl.constexpr, CAPPED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Scores [TILE, TOKENS] of a block of keys; of codes, and without a cap, `log2_v_scale` is in them already."""
    IN_GROUP: tl.constexpr = slots_of(BITS) // GROUPS
    key_ptrs = rows_ptr + slots[None, :] * ROW + kv_head * WIDE + unit[:, None]  # [K_UNITS, TOKENS]
    if BITS == 16:
        keys = tl.load(key_ptrs, mask=mask_tokens[None, :] & mask_units[:, None], other=0.0)  # [K_UNITS, TOKENS]
        scores = tl.dot(q[0], keys.to(q[0].dtype), input_precision="ieee") * scale  # [TILE, TOKENS]
    else:
        units = tl.load(key_ptrs, mask=mask_units[:, None], other=0)  # [K_UNITS, TOKENS]
        thirds = ()
        if BITS == 3:
            row_ptrs = rows_ptr + slots[None, :] * ROW  # [1, TOKENS]
            thirds = load_thirds(row_ptrs, kv_head, unit[:, None], mask_units[:, None], HEADS, WIDE)
        codes = codes_of(units, thirds, BITS, ASM)  # [K_UNITS, TOKENS] for each slot
        grids = stored_grids(words_ptr, slots, mask_tokens, kv_head, HEADS, WIDE, ROW, BITS, GROUPS, WORD)
        scores = tl.zeros([TILE, TOKENS], tl.float32)  # [TILE, TOKENS]
        if not CAPPED:
            scores += log2_v_scale[None, :]  # in a sum that is made anyway
        for group in tl.static_range(GROUPS):
            # Slots of a group share a scale, so that their codes add up before it is applied.
            products = tl.zeros([TILE, TOKENS], tl.float32)  # [TILE, TOKENS]
            for slot in tl.static_range(IN_GROUP):
                products = tl.dot(q[group * IN_GROUP + slot], codes[group * IN_GROUP + slot], products)
            k_scale, offset = grids[group]  # [TOKENS] each
            if WORD == 16:
                products += q_sums[group][:, None] * offset[None, :]
            else:
                scores += q_sums[group][:, None] * (offset * scale)[None, :]
            scores += products * (k_scale * (scale / ONE))[None, :]
    return scores


@triton.jit
def _value_grids(
    words_ptr, slots, mask_tokens, kv_head,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr, ROW: tl.constexpr, BITS: tl.constexpr,
    GROUPS: tl.constexpr, WORD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grids of values, a pair of [TOKENS] for each group, and the log2 and inverse of a token's largest scale."""
    grids = ()  # a pair of [TOKENS] for each group
    log2_v_scale = tl.zeros([TOKENS], tl.float32)  # [TOKENS]
    inverse = tl.full([TOKENS], 1.0, tl.float32)  # [TOKENS]
    if BITS != 16:
        grids = stored_grids(words_ptr, slots, mask_tokens, kv_head, HEADS, WIDE, ROW, BITS, GROUPS, WORD)
        largest = tl.full([TOKENS], 2.0**-24, tl.float32)  # [TOKENS]
        for group in tl.static_range(GROUPS):
            largest = tl.maximum(largest, grids[group][0])
        log2_v_scale, inverse = log2_and_inverse(largest, ASM)  # [TOKENS] each
    # Added to scores, it hides what was read where there is no token.
    return grids, tl.where(mask_tokens, log2_v_scale, float("-inf")), inverse


@triton.jit
def _group_weights(group, scaled_weights, grids, inverse, GROUPS: tl.constexpr):
    """The weights of a group's codes, [TILE, TOKENS]."""
    if GROUPS > 1:  # in them is the largest scale of the groups; this group's is at most that
        scaled_weights = scaled_weights * (grids[group][0] * inverse)[None, :]  # [TILE, TOKENS]
    return scaled_weights


@triton.jit
def _rounded(group, weights):
    """The weights of a group as a tensor core takes them."""
    return weights[group].to(tl.float16)


@triton.jit
def _shrunk_offset_sum(group, scaled_weights, weights, grids, inverse, offset_sums, shrink, WORD: tl.constexpr):
    """The sum of weights times offsets of a group, [TILE], with those of a block."""
    if WORD == 16:  # zero points are counted in steps, as codes are
        products = weights[group] * grids[group][1][None, :]
    else:
        products = scaled_weights * (inverse * grids[group][1])[None, :]
    return offset_sums[group] * shrink + tl.sum(products, 1)


@triton.jit
def _shrunk_code_sum(slot, weights, codes, acc, shrink, IN_GROUP: tl.constexpr):
    """The sum of weights times codes of a slot, [TILE, V_UNITS], with those of a block."""
    return tl.dot(weights[slot // IN_GROUP], codes[slot], acc[slot] * shrink[:, None])


@triton.jit
def _add_values(
    scaled_weights, acc, min_sums, shrink, grids, inverse, rows_ptr, slots, mask_tokens, kv_head, unit, mask_units,
    HEADS: tl.constexpr, ROW: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    WORD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The sums over tokens, shrunk to the new maximum, with a block of values by its weights [TILE, TOKENS].

    Returns sums over codes, [TILE, V_UNITS] for each slot, and over minima, [TILE] for each group.
    """
    value_ptrs = rows_ptr + slots[:, None] * ROW + kv_head * WIDE + unit[None, :]  # [TOKENS, V_UNITS]
    if BITS == 16:
        values = tl.load(value_ptrs, mask=mask_tokens[:, None] & mask_units[None, :], other=0.0)  # [TOKENS, V_UNITS]
        shrunk = acc[0] * shrink[:, None]  # [TILE, V_UNITS]
        acc = (tl.dot(scaled_weights.to(values.dtype), values, shrunk, input_precision="ieee"),)
    else:
        units = tl.load(value_ptrs, mask=mask_units[None, :], other=0)  # [TOKENS, V_UNITS]
        thirds = ()
        if BITS == 3:
            row_ptrs = rows_ptr + slots[:, None] * ROW  # [TOKENS, 1]
            thirds = load_thirds(row_ptrs, kv_head, unit[None, :], mask_units[None, :], HEADS, WIDE)
        codes = codes_of(units, thirds, BITS, ASM)  # [TOKENS, V_UNITS] for each slot
        weights = for_each(_group_weights, GROUPS, (scaled_weights, grids, inverse, GROUPS))  # [TILE, TOKENS]
        min_sums = for_each(
            _shrunk_offset_sum, GROUPS, (scaled_weights, weights, grids, inverse, min_sums, shrink, WORD)
        )
        weights = for_each(_rounded, GROUPS, (weights,))
        acc = for_each(_shrunk_code_sum, slots_of(BITS), (weights, codes, acc, shrink, slots_of(BITS) // GROUPS))
    return acc, min_sums


@triton.jit
def _store_partial(
    out, acc, min_sums, total, mask, DIM: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    WORD: tl.constexpr,
):  # fmt: skip
    """Store a partial output at the channels of the first slot, `out` [TILE, V_UNITS], and of the others."""
    SLOTS: tl.constexpr = slots_of(BITS)
    for slot in tl.static_range(SLOTS):
        output = acc[slot]  # [TILE, V_UNITS]
        if BITS != 16:
            low = min_sums[slot // (SLOTS // GROUPS)][:, None]  # [TILE, 1]
            if WORD == 16:
                low *= offset_step(BITS, WORD) / ONE
            output = output * (1 / (ONE * factor_of(slot, BITS))) + low
        # Slot j of unit u is channel j * DIM / SLOTS + u.
        tl.store(out + slot * (DIM // SLOTS), output / total[:, None], mask=mask)


@triton.jit(do_not_specialize=["num_splits", "num_requests"])
def decode_split(
    q_ptr, q_stride_t, q_stride_h, q_indptr_ptr, k_rows_ptr, k_words_ptr, v_rows_ptr, v_words_ptr, bias_ptr,
    indptr_ptr, slots_ptr, request_slots_ptr, positions_ptr, partial_ptr, lse_ptr, scale, cap, num_splits,
    num_requests,
    HEADS: tl.constexpr, GQA: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, MIN_SPLIT: tl.constexpr,
    K_ROW: tl.constexpr, K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_GROUPS: tl.constexpr, K_UNITS: tl.constexpr,
    K_WORD: tl.constexpr,
    V_ROW: tl.constexpr, V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_GROUPS: tl.constexpr, V_UNITS: tl.constexpr,
    V_WORD: tl.constexpr,
    EXTEND: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr, ASM: tl.constexpr, RESIDUAL: tl.constexpr,
    SINKS: tl.constexpr, EXACT_PARTS: tl.constexpr,
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
    split = tl.program_id(1)
    # Queries, heads and their mask are [TILE].
    request, kv_head, queries, heads, mask_pairs, any_pair = queries_of(
        q_indptr_ptr, num_requests, HEADS, GQA, TILE, EXTEND
    )
    if not any_pair:
        return
    begin, first, last = _split_of(indptr_ptr, request, split, num_splits, MIN_SPLIT, TOKENS)
    pairs = queries * (HEADS * GQA) + heads  # [TILE]
    place = pairs * (num_splits + EXACT_PARTS) + split  # [TILE]
    if last <= first:
        tl.store(lse_ptr + place, tl.full([TILE], float("-inf"), tl.float32), mask=mask_pairs)
        return
    k_unit = tl.arange(0, K_UNITS)  # [K_UNITS]
    v_unit = tl.arange(0, V_UNITS)  # [V_UNITS]
    mask_k = k_unit < K_WIDE  # [K_UNITS]
    mask_v = v_unit < V_WIDE  # [V_UNITS]
    q_base = q_ptr + queries[:, None] * q_stride_t + heads[:, None] * q_stride_h + k_unit[None, :]  # [TILE, K_UNITS]
    mask_q = mask_pairs[:, None] & mask_k[None, :]  # [TILE, K_UNITS]
    q = for_each(_sliced_query, K_SLOTS, (q_base, mask_q, K_BITS, K_WIDE))  # [TILE, K_UNITS] for each slot
    q_sums = for_each(_query_sum, K_GROUPS, (q, TILE, K_BITS, K_SLOTS // K_GROUPS, K_WORD))  # [TILE] for each group
    bias = tl.zeros([TILE], tl.float32)  # [TILE]
    if BIASED:
        bias = scale * tl.load(bias_ptr + pairs, mask=mask_pairs, other=0.0)
    acc = for_each(_zeros, V_SLOTS, ([TILE, V_UNITS],))  # sums of weights times codes, [TILE, V_UNITS] for each slot
    min_sums = for_each(_zeros, V_GROUPS, ([TILE],))  # sums of weights times minima, [TILE] for each group
    if WINDOWED:
        length, query_positions = positions_of_queries(queries, request, q_indptr_ptr, indptr_ptr, EXTEND)  # [TILE]
        first_query = length if EXTEND else length - 1
        places_row = tl.load(request_slots_ptr + request).to(tl.int64) * (RESIDUAL + SINKS)
    # Not -inf: where no score is finite yet, exp2(-inf - -inf) would be NaN.
    top = tl.full([TILE], -1e30, tl.float32)  # [TILE]
    total = tl.zeros([TILE], tl.float32)  # [TILE]
    for start in tl.range(first, last, TOKENS):
        tokens = start + tl.arange(0, TOKENS)  # [TOKENS]
        mask_tokens = tokens < last  # [TOKENS]
        # Past the end slot 0 is read, whatever it holds: the log2 hides it, so that codes need no mask of tokens.
        slots = tl.load(slots_ptr + begin + tokens, mask=mask_tokens, other=0).to(tl.int64)  # [TOKENS]
        v_grids, log2_v_scale, inverse = _value_grids(
            v_words_ptr, slots, mask_tokens, kv_head,
            TOKENS, HEADS, V_WIDE, V_ROW, V_BITS, V_GROUPS, V_WORD, ASM,
        )  # fmt: skip  # [TOKENS] each
        scores = _scores_of(
            q, q_sums, k_rows_ptr, k_words_ptr, slots, mask_tokens, log2_v_scale, kv_head, k_unit, mask_k, scale,
            TILE, TOKENS, HEADS, K_ROW, K_WIDE, K_BITS, K_GROUPS, K_WORD, CAPPED, ASM,
        )  # fmt: skip  # [TILE, TOKENS]
        if CAPPED:
            scores = softcap(scores + bias[:, None], cap)
        if CAPPED or K_BITS == 16:
            scores += log2_v_scale[None, :]
        if WINDOWED:  # a constant, apart from what is known on the device alone
            if (start + TOKENS > first_query - RESIDUAL) | (start < SINKS):  # few blocks: all others skip this
                copied = have_copies(tokens, mask_tokens, first_query, positions_ptr, places_row, RESIDUAL, SINKS)
                hidden = copied[None, :] & is_in_window(query_positions, tokens, RESIDUAL, SINKS)  # [TILE, TOKENS]
                scores = tl.where(hidden, float("-inf"), scores)
        # The online softmax: what was summed shrinks to the new maximum.
        new_top = tl.maximum(top, tl.max(scores, 1))  # [TILE]
        shrink = tl.exp2(top - new_top)  # [TILE]
        top = new_top
        scaled_weights = tl.exp2(scores - top[:, None])  # [TILE, TOKENS]: weights times the value's scale, at most 1
        total = total * shrink + tl.sum(scaled_weights * inverse[None, :], 1)
        acc, min_sums = _add_values(
            scaled_weights, acc, min_sums, shrink, v_grids, inverse, v_rows_ptr, slots, mask_tokens, kv_head, v_unit,
            mask_v, HEADS, V_ROW, V_WIDE, V_BITS, V_GROUPS, V_WORD, ASM,
        )  # fmt: skip
    out = partial_ptr + place[:, None] * V_DIM + v_unit[None, :]  # [TILE, V_UNITS]
    _store_partial(out, acc, min_sums, total, mask_pairs[:, None] & mask_v[None, :], V_DIM, V_BITS, V_GROUPS, V_WORD)
    if not CAPPED:
        top += bias  # what every score of this split has more
    tl.store(lse_ptr + place, top + tl.log2(total), mask=mask_pairs)
