"""Split-KV flash decoding over packed rows: one query per request, or several behind a prefix; every pair of widths.

Scale and minimum are folded. With code c, key = s * c + m, and codes unpacked as f * c, f a power of two,

    q . key   = s * (q / f . f * c) + m * sum(q)
    sum p * v = sum w * (f * c) / f + sum p * m          with w = p * s, rounded once

so that codes enter the tensor cores exactly. The exponent of w is that of a softmax whose scores are those of p plus
log2(s): the running maximum of those keeps w at most 1, whatever the scales are, and fp16 holds it. A group whose scale
is 0 has codes 0, so that any other scale gives the same: 2 ** -24 is taken.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.queries import queries_of, softcap
from kvtuner.runtime_loader.kernels.unpack_codes import (
    ONE,
    codes_of,
    factor_of,
    fp16_saturated,
    log2_and_inverse,
    scale_and_minimum,
)


@triton.jit
def _zeros(COUNT: tl.constexpr, SHAPE: tl.constexpr):
    """COUNT float32 tensors of zeros."""
    # One for each slot or group, since Triton takes no slice of a tensor.
    tensors = ()
    for _ in tl.static_range(COUNT):
        tensors = tensors + (tl.zeros(SHAPE, tl.float32),)
    return tensors


@triton.jit
def _scales_of(words_ptr, slots, live, ROW: tl.constexpr, FIRST, GROUPS: tl.constexpr):
    """Scales and minima of the groups of a head, a tuple of [TOKENS] each, 0 where there is no token.

    FIRST is the head's first word in a row; ROW is in units, two to a word.
    """
    scales = ()
    minima = ()
    for group in tl.static_range(GROUPS):
        words = tl.load(words_ptr + (FIRST + group) + slots * (ROW // 2), mask=live, other=0)  # [TOKENS]
        scale, minimum = scale_and_minimum(words)
        scales = scales + (scale,)
        minima = minima + (minimum,)
    return scales, minima


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
def _sliced_queries(
    q_base, mine, k_real, TILE: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, IN_GROUP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Queries cut as codes lie, [TILE, K_UNITS] for each slot, and their sums over each group, [TILE]."""
    q = ()
    q_sums = ()
    for group in tl.static_range(GROUPS):
        q_sum = tl.zeros([TILE], tl.float32)
        for slot in tl.static_range(IN_GROUP):
            channels = q_base + (group * IN_GROUP + slot) * WIDE  # [TILE, K_UNITS]
            part = tl.load(channels, mask=mine[:, None] & k_real[None, :], other=0.0)
            if BITS != 16:
                # Divided by the factor of the slot's codes here, once, where it costs nothing in the loop.
                part = part.to(tl.float32) * (1 / factor_of(group * IN_GROUP + slot, BITS))
                part = fp16_saturated(part)
                # Summed after the rounding, so that the minimum is weighted by the queries that the codes meet.
                q_sum += tl.sum(part.to(tl.float32), 1) * factor_of(group * IN_GROUP + slot, BITS)
            q = q + (part,)
        q_sums = q_sums + (q_sum,)
    return q, q_sums


@triton.jit
def _scores_of(
    q, q_sums, rows_ptr, words_ptr, slots, live, louder, kv_head, unit, real, scale,
    TILE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, ROW: tl.constexpr, WIDE: tl.constexpr,
    BITS: tl.constexpr, GROUPS: tl.constexpr, CAPPED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Scores [TILE, TOKENS] of a block of keys; of codes, and without a cap, `louder` is in them already."""
    IN_GROUP: tl.constexpr = 16 // BITS // GROUPS
    if BITS == 16:
        keys = tl.load(
            rows_ptr + slots[None, :] * ROW + kv_head * WIDE + unit[:, None],
            mask=live[None, :] & real[:, None], other=0.0,
        )  # fmt: skip  # [K_UNITS, TOKENS]
        scores = tl.dot(q[0], keys.to(q[0].dtype), input_precision="ieee") * scale
    else:
        units = tl.load(
            rows_ptr + slots[None, :] * ROW + kv_head * WIDE + unit[:, None], mask=real[:, None], other=0
        )  # [K_UNITS, TOKENS]
        codes = codes_of(units, BITS, ASM)  # [K_UNITS, TOKENS] for each slot
        steps, minima = _scales_of(words_ptr, slots, live, ROW, HEADS * WIDE // 2 + kv_head * GROUPS, GROUPS)
        scores = tl.zeros([TILE, TOKENS], tl.float32)
        for group in tl.static_range(GROUPS):
            # Slots of a group share a scale, so that their codes add up before it is applied.
            products = tl.zeros([TILE, TOKENS], tl.float32)
            for slot in tl.static_range(IN_GROUP):
                products = tl.dot(q[group * IN_GROUP + slot], codes[group * IN_GROUP + slot], products)
            low = q_sums[group][:, None] * (minima[group] * scale)[None, :]
            if group == 0 and not CAPPED:
                low += louder[None, :]  # in a sum that is made anyway
            scores += products * (steps[group] * (scale / ONE))[None, :] + low
    return scores


@triton.jit
def _weighted(
    u, acc, lows, shrink, steps, minima, inverse, rows_ptr, slots, live, kv_head, unit, real,
    ROW: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The sums over tokens, shrunk to the new maximum, with a block of values by its weights [TILE, TOKENS].

    Returns sums over codes, [TILE, V_UNITS] for each slot, and over minima, [TILE] for each group.
    """
    IN_GROUP: tl.constexpr = 16 // BITS // GROUPS
    new_acc = ()
    new_lows = ()
    if BITS == 16:
        values = tl.load(
            rows_ptr + slots[:, None] * ROW + kv_head * WIDE + unit[None, :],
            mask=live[:, None] & real[None, :], other=0.0,
        )  # fmt: skip  # [TOKENS, V_UNITS]
        new_acc = (tl.dot(u.to(values.dtype), values, acc[0] * shrink[:, None], input_precision="ieee"),)
        new_lows = lows
    else:
        units = tl.load(
            rows_ptr + slots[:, None] * ROW + kv_head * WIDE + unit[None, :], mask=real[None, :], other=0
        )  # [TOKENS, V_UNITS]
        codes = codes_of(units, BITS, ASM)  # [TOKENS, V_UNITS] for each slot
        for group in tl.static_range(GROUPS):
            if GROUPS == 1:
                w = u.to(tl.float16)  # [TILE, TOKENS]
            else:  # u has the largest scale of the groups in it; this group's is at most that
                w = (u * (steps[group] * inverse)[None, :]).to(tl.float16)
            new_lows = new_lows + (lows[group] * shrink + tl.sum(u * (inverse * minima[group])[None, :], 1),)
            for slot in tl.static_range(IN_GROUP):
                shrunk = acc[group * IN_GROUP + slot] * shrink[:, None]
                new_acc = new_acc + (tl.dot(w, codes[group * IN_GROUP + slot], shrunk),)
    return new_acc, new_lows


@triton.jit(do_not_specialize=["num_splits", "num_requests"])
def decode_split(
    q_ptr, q_stride_t, q_stride_h, q_indptr_ptr, k_rows_ptr, k_words_ptr, v_rows_ptr, v_words_ptr, bias_ptr,
    indptr_ptr, slots_ptr, partial_ptr, lse_ptr, scale, cap, num_splits, num_requests,
    HEADS: tl.constexpr, GQA: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, MIN_SPLIT: tl.constexpr,
    K_ROW: tl.constexpr, K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_GROUPS: tl.constexpr, K_UNITS: tl.constexpr,
    V_ROW: tl.constexpr, V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_GROUPS: tl.constexpr, V_UNITS: tl.constexpr,
    EXTEND: tl.constexpr, CAPPED: tl.constexpr, BIASED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One split of one request's rows: TILE pairs of query and head that read one KV head.

    Request r has the query r or, where it extends its rows, those from ``q_indptr[r]`` to ``q_indptr[r + 1]``. Queries
    are those of stored space; a bias is their product with mu. K_UNITS and V_UNITS are units of a head padded to a
    power of two, at least 16. Partial outputs are [queries, num_heads, parts, V_DIM] float32, in stored space, with the
    log2 of their weight; a split without tokens has -inf and nothing else. Parts are splits and, where requests
    extend, one more for what `attend_fresh` adds.
    """
    K_SLOTS: tl.constexpr = 16 // K_BITS
    V_SLOTS: tl.constexpr = 16 // V_BITS
    K_IN_GROUP: tl.constexpr = K_SLOTS // K_GROUPS
    V_IN_GROUP: tl.constexpr = V_SLOTS // V_GROUPS
    K_WIDE: tl.constexpr = K_DIM // K_SLOTS
    V_WIDE: tl.constexpr = V_DIM // V_SLOTS
    split = tl.program_id(1)
    request, kv_head, queries, heads, mine, any_mine = queries_of(q_indptr_ptr, num_requests, HEADS, GQA, TILE, EXTEND)
    if not any_mine:
        return
    begin, first, last = _split_of(indptr_ptr, request, split, num_splits, MIN_SPLIT, TOKENS)
    of_head = queries * (HEADS * GQA) + heads  # [TILE]
    place = of_head * (num_splits + 1 if EXTEND else num_splits) + split  # [TILE]
    if last <= first:
        tl.store(lse_ptr + place, tl.full([TILE], float("-inf"), tl.float32), mask=mine)
        return
    k_unit = tl.arange(0, K_UNITS)
    v_unit = tl.arange(0, V_UNITS)
    k_real = k_unit < K_WIDE
    v_real = v_unit < V_WIDE
    # [TILE, K_UNITS]
    q_base = q_ptr + queries[:, None] * q_stride_t + heads[:, None] * q_stride_h + k_unit[None, :]
    q, q_sums = _sliced_queries(q_base, mine, k_real, TILE, K_BITS, K_GROUPS, K_IN_GROUP, K_WIDE)
    bias = tl.zeros([TILE], tl.float32)
    if BIASED:
        bias = scale * tl.load(bias_ptr + of_head, mask=mine, other=0.0)
    acc = _zeros(V_SLOTS, [TILE, V_UNITS])  # sums of weights times codes, by slot
    lows = _zeros(V_GROUPS, [TILE])  # sums of weights times minima, by group
    # Not -inf: where no score is finite yet, exp2(-inf - -inf) would be NaN.
    top = tl.full([TILE], -1e30, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for start in tl.range(first, last, TOKENS):
        tokens = start + tl.arange(0, TOKENS)  # [TOKENS]
        live = tokens < last
        # Past the end slot 0 is read, whatever it holds: `louder` hides it, so that codes need no mask of tokens.
        slots = tl.load(slots_ptr + begin + tokens, mask=live, other=0).to(tl.int64)
        # Added to scores in units of log2: the value's scale, and whether there is a token at all.
        louder = tl.zeros([TOKENS], tl.float32)
        inverse = tl.full([TOKENS], 1.0, tl.float32)
        steps = ()
        minima = ()
        if V_BITS != 16:
            steps, minima = _scales_of(
                v_words_ptr, slots, live, V_ROW, HEADS * V_WIDE // 2 + kv_head * V_GROUPS, V_GROUPS
            )
            largest = tl.full([TOKENS], 2.0**-24, tl.float32)
            for group in tl.static_range(V_GROUPS):
                largest = tl.maximum(largest, steps[group])
            louder, inverse = log2_and_inverse(largest, ASM)
        louder = tl.where(live, louder, float("-inf"))
        scores = _scores_of(
            q, q_sums, k_rows_ptr, k_words_ptr, slots, live, louder, kv_head, k_unit, k_real, scale,
            TILE, TOKENS, HEADS, K_ROW, K_WIDE, K_BITS, K_GROUPS, CAPPED, ASM,
        )  # fmt: skip  # [TILE, TOKENS]
        if CAPPED:
            scores = softcap(scores + bias[:, None], cap)
        if CAPPED or K_BITS == 16:
            scores += louder[None, :]
        # The online softmax: what was summed shrinks to the new maximum.
        new_top = tl.maximum(top, tl.max(scores, 1))  # [TILE]
        shrink = tl.exp2(top - new_top)
        top = new_top
        u = tl.exp2(scores - top[:, None])  # [TILE, TOKENS]: weights times the value's scale, at most 1
        total = total * shrink + tl.sum(u * inverse[None, :], 1)
        acc, lows = _weighted(
            u, acc, lows, shrink, steps, minima, inverse, v_rows_ptr, slots, live, kv_head, v_unit, v_real,
            V_ROW, V_WIDE, V_BITS, V_GROUPS, ASM,
        )  # fmt: skip
    # Slot j of unit u is channel j * V_WIDE + u.
    out = partial_ptr + place[:, None] * V_DIM + v_unit[None, :]  # [TILE, V_UNITS]
    for slot in tl.static_range(V_SLOTS):
        outcome = acc[slot]
        if V_BITS != 16:
            outcome = outcome * (1 / (ONE * factor_of(slot, V_BITS))) + lows[slot // V_IN_GROUP][:, None]
        tl.store(out + slot * V_WIDE, outcome / total[:, None], mask=mine[:, None] & v_real[None, :])
    if not CAPPED:
        top += bias  # what every score of this split has more
    tl.store(lse_ptr + place, top + tl.log2(total), mask=mine)
