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

from kvtuner.runtime_loader.kernels.transform import hadamard
from kvtuner.runtime_loader.kernels.unpack import (
    ONE,
    codes_of,
    factor_of,
    fp16_saturated,
    log2_and_inverse,
    scale_and_minimum,
)


@triton.jit
def _first_tile(request, q_indptr_ptr, GQA: tl.constexpr, TILE: tl.constexpr):
    """Where the tiles of a request begin, counted without those before it: at most one of each is left empty."""
    return (tl.load(q_indptr_ptr + request) * GQA // TILE).to(tl.int32) + request


@triton.jit
def queries_of(
    q_indptr_ptr, num_requests, HEADS: tl.constexpr, GQA: tl.constexpr, TILE: tl.constexpr, EXTEND: tl.constexpr
):
    """What a program attends with: its request, KV head, TILE queries and heads, which are real, and whether any is.

    The first axis of the grid is KV heads, and tiles of each; where requests have one query, the third axis is
    requests. Heads of a query lie side by side, so that a tile is full where many queries share a KV head.
    """
    tiles = tl.num_programs(0) // HEADS
    kv_head = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if EXTEND:
        low = 0
        high = num_requests
        while low < high:  # the last request whose tiles begin no later than this one
            middle = (low + high + 1) // 2
            later = _first_tile(middle, q_indptr_ptr, GQA, TILE) > tile
            low = tl.where(later, low, middle)
            high = tl.where(later, middle - 1, high)
        any_mine = low < num_requests
        request = tl.minimum(low, num_requests - 1).to(tl.int64)
        tile -= _first_tile(request.to(tl.int32), q_indptr_ptr, GQA, TILE)
        first = tl.load(q_indptr_ptr + request).to(tl.int64)
        num_queries = (tl.load(q_indptr_ptr + request + 1) - first).to(tl.int32)
        pairs = tile * TILE + tl.arange(0, TILE)
        queries = first + pairs // GQA
        any_mine = any_mine & (tile * TILE < num_queries * GQA)
    else:
        request = tl.program_id(2).to(tl.int64)
        num_queries = 1
        pairs = tile * TILE + tl.arange(0, TILE)
        queries = request + tl.zeros([TILE], tl.int64)
        any_mine = tile * TILE < GQA
    return request, kv_head, queries, kv_head * GQA + pairs % GQA, pairs < num_queries * GQA, any_mine


@triton.jit
def softcap(x, cap):
    """Cap * tanh(x / cap) of scores in units of log2."""
    y = tl.exp2(-2.0 * tl.abs(x) / cap * 1.4426950408889634)
    z = cap * (1.0 - y) / (1.0 + y)
    return tl.where(x < 0, -z, z)


@triton.jit
def scales_of(words_ptr, slots, live, ROW: tl.constexpr):
    """Scales and minima of one group of tokens, 0 where there is none; ROW is in units."""
    return scale_and_minimum(tl.load(words_ptr + slots * (ROW // 2), mask=live, other=0))


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
    begin = tl.load(indptr_ptr + request).to(tl.int64)
    length = (tl.load(indptr_ptr + request + 1) - begin).to(tl.int32)
    per_split = tl.cdiv(tl.cdiv(tl.maximum(length, MIN_SPLIT * num_splits), num_splits), TOKENS) * TOKENS
    first = split * per_split
    last = tl.minimum(first + per_split, length)
    of_head = queries * (HEADS * GQA) + heads
    place = of_head * (num_splits + 1 if EXTEND else num_splits) + split
    if last <= first:
        tl.store(lse_ptr + place, tl.full([TILE], float("-inf"), tl.float32), mask=mine)
        return
    k_unit = tl.arange(0, K_UNITS)
    v_unit = tl.arange(0, V_UNITS)
    k_real = k_unit < K_WIDE
    v_real = v_unit < V_WIDE
    q_base = q_ptr + queries[:, None] * q_stride_t + heads[:, None] * q_stride_h + k_unit[None, :]
    q = ()
    q_sums = ()
    for group in tl.static_range(K_GROUPS):
        q_sum = tl.zeros([TILE], tl.float32)
        for slot in tl.static_range(K_IN_GROUP):
            channels = q_base + (group * K_IN_GROUP + slot) * K_WIDE
            part = tl.load(channels, mask=mine[:, None] & k_real[None, :], other=0.0)
            if K_BITS != 16:
                part = part.to(tl.float32) * (1 / factor_of(group * K_IN_GROUP + slot, K_BITS))
                part = fp16_saturated(part)
                q_sum += tl.sum(part.to(tl.float32), 1) * factor_of(group * K_IN_GROUP + slot, K_BITS)
            q = q + (part,)
        q_sums = q_sums + (q_sum,)
    bias = tl.zeros([TILE], tl.float32)
    if BIASED:
        bias = scale * tl.load(bias_ptr + of_head, mask=mine, other=0.0)
    acc = ()
    for _ in tl.static_range(V_SLOTS):
        acc = acc + (tl.zeros([TILE, V_UNITS], tl.float32),)
    lows = ()
    for _ in tl.static_range(V_GROUPS):
        lows = lows + (tl.zeros([TILE], tl.float32),)
    top = tl.full([TILE], -1e30, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for start in tl.range(first, last, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        live = tokens < last
        slots = tl.load(slots_ptr + begin + tokens, mask=live, other=0).to(tl.int64)
        # Added to scores in units of log2: the value's scale, and whether there is a token at all.
        louder = tl.zeros([TOKENS], tl.float32)
        inverse = tl.full([TOKENS], 1.0, tl.float32)
        steps = ()
        minima = ()
        if V_BITS != 16:
            largest = tl.full([TOKENS], 2.0**-24, tl.float32)
            for group in tl.static_range(V_GROUPS):
                place_in_row = HEADS * V_WIDE // 2 + kv_head * V_GROUPS + group
                step, minimum = scales_of(v_words_ptr + place_in_row, slots, live, V_ROW)
                steps = steps + (step,)
                minima = minima + (minimum,)
                largest = tl.maximum(largest, step)
            louder, inverse = log2_and_inverse(largest, ASM)
        louder = tl.where(live, louder, float("-inf"))
        if K_BITS == 16:
            keys = tl.load(
                k_rows_ptr + slots[None, :] * K_ROW + kv_head * K_DIM + k_unit[:, None],
                mask=live[None, :] & k_real[:, None], other=0.0,
            )  # fmt: skip
            scores = tl.dot(q[0], keys.to(q[0].dtype), input_precision="ieee") * scale
        else:
            units = tl.load(
                k_rows_ptr + slots[None, :] * K_ROW + kv_head * K_WIDE + k_unit[:, None], mask=k_real[:, None], other=0
            )
            codes = codes_of(units, K_BITS, ASM)
            scores = tl.zeros([TILE, TOKENS], tl.float32)
            for group in tl.static_range(K_GROUPS):
                place_in_row = HEADS * K_WIDE // 2 + kv_head * K_GROUPS + group
                step, minimum = scales_of(k_words_ptr + place_in_row, slots, live, K_ROW)
                products = tl.zeros([TILE, TOKENS], tl.float32)
                for slot in tl.static_range(K_IN_GROUP):
                    products = tl.dot(q[group * K_IN_GROUP + slot], codes[group * K_IN_GROUP + slot], products)
                low = q_sums[group][:, None] * (minimum * scale)[None, :]
                if group == 0 and not CAPPED:
                    low += louder[None, :]
                scores += products * (step * (scale / ONE))[None, :] + low
        if CAPPED:
            scores = softcap(scores + bias[:, None], cap)
        if CAPPED or K_BITS == 16:
            scores += louder[None, :]
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        top = new_top
        u = tl.exp2(scores - top[:, None])
        total = total * shrink + tl.sum(u * inverse[None, :], 1)
        new_acc = ()
        if V_BITS == 16:
            values = tl.load(
                v_rows_ptr + slots[:, None] * V_ROW + kv_head * V_DIM + v_unit[None, :],
                mask=live[:, None] & v_real[None, :], other=0.0,
            )  # fmt: skip
            new_acc = (tl.dot(u.to(values.dtype), values, acc[0] * shrink[:, None], input_precision="ieee"),)
        else:
            units = tl.load(
                v_rows_ptr + slots[:, None] * V_ROW + kv_head * V_WIDE + v_unit[None, :], mask=v_real[None, :], other=0
            )
            codes = codes_of(units, V_BITS, ASM)
            new_lows = ()
            for group in tl.static_range(V_GROUPS):
                if V_GROUPS == 1:
                    w = u.to(tl.float16)
                else:
                    w = (u * (steps[group] * inverse)[None, :]).to(tl.float16)
                new_lows = new_lows + (lows[group] * shrink + tl.sum(u * (inverse * minima[group])[None, :], 1),)
                for slot in tl.static_range(V_IN_GROUP):
                    shrunk = acc[group * V_IN_GROUP + slot] * shrink[:, None]
                    new_acc = new_acc + (tl.dot(w, codes[group * V_IN_GROUP + slot], shrunk),)
            lows = new_lows
        acc = new_acc
    out = partial_ptr + place[:, None] * V_DIM + v_unit[None, :]
    for slot in tl.static_range(V_SLOTS):
        outcome = acc[slot]
        if V_BITS != 16:
            outcome = outcome * (1 / (ONE * factor_of(slot, V_BITS))) + lows[slot // V_IN_GROUP][:, None]
        tl.store(out + slot * V_WIDE, outcome / total[:, None], mask=mine[:, None] & v_real[None, :])
    if not CAPPED:
        top += bias  # what every score of this split has more
    tl.store(lse_ptr + place, top + tl.log2(total), mask=mine)


@triton.jit
def prepare_queries(
    q_ptr, q_stride_t, q_stride_h, lam_ptr, mu_ptr, out_ptr, bias_ptr,
    HEADS: tl.constexpr, GQA: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BALANCED: tl.constexpr,
    STAGES: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Queries of one KV head in the space of its keys, [queries, num_heads, DIM]; with BIASED also q . mu."""
    TILE: tl.constexpr = triton.next_power_of_2(GQA)
    query = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    in_group = tl.arange(0, TILE)
    channels = tl.arange(0, PADDED)[None, :]
    heads = kv_head * GQA + in_group[:, None]
    mask = (in_group[:, None] < GQA) & (channels < DIM)
    q = tl.load(q_ptr + query * q_stride_t + heads * q_stride_h + channels, mask=mask, other=0.0).to(tl.float32)
    constants = kv_head * DIM + channels
    if BIASED:
        mu = tl.load(mu_ptr + constants, mask=channels < DIM, other=0.0)
        bias = tl.sum(q * mu, 1)
        tl.store(bias_ptr + query * (HEADS * GQA) + kv_head * GQA + in_group, bias, mask=in_group < GQA)
    if BALANCED:
        q = q * tl.load(lam_ptr + constants, mask=channels < DIM, other=0.0)
    if STAGES > 0:
        q = hadamard(q, TILE, PADDED, STAGES)
    if out_ptr.dtype.element_ty == tl.float16:
        q = fp16_saturated(q)
    tl.store(out_ptr + (query * (HEADS * GQA) + heads) * DIM + channels, q.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits", "num_requests"])
def merge_splits(
    partial_ptr, lse_ptr, q_indptr_ptr, out_ptr, out_stride_t, out_stride_h, num_splits, num_requests,
    DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, EXTEND: tl.constexpr,
):  # fmt: skip
    """One head of one query: its splits weighted, the values' Hadamard undone, once, and its fresh part added."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    parts = num_splits + 1 if EXTEND else num_splits
    place = (query * tl.num_programs(1) + head) * parts
    channels = tl.arange(0, PADDED)
    real = channels < DIM
    num_queries = tl.num_programs(0)
    if EXTEND:
        num_queries = tl.load(q_indptr_ptr + num_requests).to(tl.int32)  # the others are padding: nothing was written
    top = tl.full([1], -1e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    out = tl.zeros([1, PADDED], tl.float32)
    for first in tl.range(0, num_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        mask = (split < num_splits) & (query < num_queries)
        lse = tl.load(lse_ptr + place + split, mask=mask, other=float("-inf"))
        some = mask & (lse != float("-inf"))  # NaN is some: it must be seen
        new_top = tl.maximum(top, tl.max(tl.where(lse > float("-inf"), lse, -1e30), 0))
        share = tl.where(some, tl.exp2(lse - new_top), 0.0)
        of_split = tl.load(
            partial_ptr + (place + split[:, None]) * DIM + channels[None, :],
            mask=some[:, None] & real[None, :], other=0.0,
        )  # fmt: skip
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(share, 0)
        out = out * shrink[:, None] + tl.sum(of_split * share[:, None], 0)[None, :]
        top = new_top
    if STAGES > 0:
        out = hadamard(out, 1, PADDED, STAGES)
    if EXTEND:
        mask = query < num_queries
        lse = tl.load(lse_ptr + place + num_splits, mask=mask, other=0.0)
        fresh = tl.load(partial_ptr + (place + num_splits) * DIM + channels, mask=mask & real, other=0.0)
        new_top = tl.maximum(top, lse)
        shrink = tl.exp2(top - new_top)
        share = tl.exp2(lse - new_top)
        total = total * shrink + share
        out = out * shrink[:, None] + fresh[None, :] * share[:, None]
    out = tl.reshape(out / tl.where(total == 0.0, 1.0, total)[:, None], (PADDED,))
    if out_ptr.dtype.element_ty == tl.float16:
        out = fp16_saturated(out)
    tl.store(
        out_ptr + query * out_stride_t + head * out_stride_h + channels,
        out.to(out_ptr.dtype.element_ty), mask=real,
    )  # fmt: skip
