"""The straightforward decode kernel over the same rows, as a baseline: codes to float32, to bf16, then the product."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dequantized(
    rows_ptr, words_ptr, slots, channels, kv_head,
    HEADS: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Keys or values of token slots and channels, of shapes that broadcast, in bf16."""
    UNITS: tl.constexpr = DIM * BITS // 16
    units = tl.load(rows_ptr + slots * ROW + kv_head * UNITS + channels % UNITS)
    codes = (units >> (channels // UNITS * BITS).to(tl.int16)) & ((1 << BITS) - 1)
    words_ptr += HEADS * UNITS // 2 + kv_head * GROUPS
    if GROUPS == 1:
        words = tl.load(words_ptr + slots * (ROW // 2))
    else:
        words = tl.load(words_ptr + slots * (ROW // 2) + channels // (DIM // GROUPS))
    step = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    minimum = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (codes.to(tl.float32) * step + minimum).to(tl.bfloat16)


@triton.jit
def decode_split(
    q_ptr, q_stride_b, q_stride_h, k_rows_ptr, k_words_ptr, v_rows_ptr, v_words_ptr, indptr_ptr, slots_ptr,
    partial_ptr, lse_ptr, scale, num_splits,
    HEADS: tl.constexpr, GQA: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    K_ROW: tl.constexpr, K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_GROUPS: tl.constexpr,
    V_ROW: tl.constexpr, V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_GROUPS: tl.constexpr,
):  # fmt: skip
    """One split of one request, without caps or padding of channels."""
    kv_head, split, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    in_group = tl.arange(0, TILE)
    heads, mine = kv_head * GQA + in_group, in_group < GQA
    begin = tl.load(indptr_ptr + request)
    length = tl.load(indptr_ptr + request + 1) - begin
    per_split = tl.cdiv(tl.cdiv(length, num_splits), TOKENS) * TOKENS
    first = split * per_split
    last = tl.minimum(first + per_split, length)
    k_channels, v_channels = tl.arange(0, K_DIM), tl.arange(0, V_DIM)
    q = tl.load(
        q_ptr + request * q_stride_b + heads[:, None] * q_stride_h + k_channels[None, :], mask=mine[:, None], other=0.0
    ).to(tl.bfloat16)
    acc = tl.zeros([TILE, V_DIM], tl.float32)
    top = tl.full([TILE], -1e30, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for start in tl.range(first, last, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        live = tokens < last
        slots = tl.load(slots_ptr + begin + tokens, mask=live, other=0).to(tl.int64)
        keys = dequantized(
            k_rows_ptr, k_words_ptr, slots[None, :], k_channels[:, None], kv_head, HEADS, K_ROW, K_DIM, K_BITS, K_GROUPS
        )
        scores = tl.where(live[None, :], tl.dot(q, keys) * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(p, 1)
        top = new_top
        values = dequantized(
            v_rows_ptr, v_words_ptr, slots[:, None], v_channels[None, :], kv_head, HEADS, V_ROW, V_DIM, V_BITS, V_GROUPS
        )
        acc = tl.dot(p.to(tl.bfloat16), values, acc * shrink[:, None])
    place = (request * (HEADS * GQA) + heads) * num_splits + split
    tl.store(partial_ptr + place[:, None] * V_DIM + v_channels[None, :], acc / total[:, None], mask=mine[:, None])
    tl.store(lse_ptr + place, top + tl.log2(total), mask=mine)
