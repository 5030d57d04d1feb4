"""The parts of an output beside `decode_split`'s: what new tokens read of one another, and the merge of all parts."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.queries import (
    is_in_window,
    positions_of_queries,
    queries_of,
    softcap,
    tokens_of_split,
    wait_for_kernel_before,
)
from kvtuner.runtime_loader.kernels.transform_steps import invert_steps
from kvtuner.runtime_loader.kernels.unpack_codes import fp16_saturated


@triton.jit
def load_queries(q_ptr, q_stride_t, q_stride_h, queries, heads, mask_pairs, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Queries [TILE, PADDED] of pairs of query and head; a tile has a power of two of channels."""
    channel = tl.arange(0, PADDED)  # [PADDED]
    q_ptrs = q_ptr + queries[:, None] * q_stride_t + heads[:, None] * q_stride_h + channel[None, :]  # [TILE, PADDED]
    return tl.load(q_ptrs, mask=mask_pairs[:, None] & (channel < DIM)[None, :], other=0.0)


@triton.jit
def rotary_products(rotary_q, rotary_ptrs, mask, TILE: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """The products [TILE, TOKENS] with rotary channels [ROTARY_PADDED, TOKENS] beside keys; zeros without any."""
    products = tl.zeros([TILE, mask.shape[1]], tl.float32)  # [TILE, TOKENS]
    if ROTARY_DIM > 0:
        rotary = tl.load(rotary_ptrs, mask=mask, other=0.0)  # [ROTARY_PADDED, TOKENS]
        products = tl.dot(rotary_q, rotary.to(rotary_q.dtype), products, input_precision="ieee")
    return products


@triton.jit
def add_block(q, keys, values, products, read, acc, top, total, scale, cap, CAPPED: tl.constexpr):
    """Sums, maxima and totals of an online softmax with a block of keys [K_PADDED, TOKENS] and values of model space.

    `products` [TILE, TOKENS] are those with what lies beside keys; `read`, likewise, says which tokens queries read.
    """
    scores = tl.dot(q, keys.to(q.dtype), products, input_precision="ieee") * scale  # [TILE, TOKENS]
    if CAPPED:
        scores = softcap(scores, cap)
    scores = tl.where(read, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))  # [TILE]
    shrink = tl.exp2(top - new_top)  # [TILE]
    weights = tl.exp2(scores - new_top[:, None])  # [TILE, TOKENS]
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def store_part(
    partial_ptr, lse_ptr, pairs, num_splits, acc, top, total, mask_pairs,
    EXACT_PARTS: tl.constexpr, PART: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Store a part of model space behind the splits of the rows; without tokens its weight is -inf."""
    channel = tl.arange(0, PADDED)  # [PADDED]
    place = pairs * (num_splits + EXACT_PARTS) + num_splits + PART  # [TILE]
    out = partial_ptr + place[:, None] * DIM + channel[None, :]  # [TILE, PADDED]
    tl.store(out, acc / total[:, None], mask=mask_pairs[:, None] & (channel < DIM)[None, :])
    tl.store(lse_ptr + place, top + tl.log2(total), mask=mask_pairs)


@triton.jit(do_not_specialize=["num_splits", "num_requests"])
def attend_fresh(
    q_ptr, q_stride_t, q_stride_h, k_ptr, k_stride_t, k_stride_h, v_ptr, v_stride_t, v_stride_h, rotary_ptr,
    rotary_stride_t, q_indptr_ptr, indptr_ptr, mask_ptr, mask_starts_ptr, partial_ptr, lse_ptr, scale, cap, num_splits,
    num_requests,
    HEADS: tl.constexpr, GQA: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    K_DIM: tl.constexpr, K_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr,
    ROTARY_DIM: tl.constexpr, ROTARY_PADDED: tl.constexpr, CAPPED: tl.constexpr, RESIDUAL: tl.constexpr,
    SINKS: tl.constexpr, EXACT_PARTS: tl.constexpr, PART: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    """Attention of one request's new tokens over one another, as part PART beside `decode_split`'s.

    READS is "all", causally, or what queries read of tokens as they are given: those "inside" of their exact window,
    or "outside", or those that a "masked" chunk's bytes are not 0 for. Queries, keys, values and partial outputs are
    those of model space. Latents are keys and values, and have ROTARY_DIM channels beside them, as queries do.
    """
    # Queries, heads and their mask are [TILE].
    request, kv_head, queries, heads, mask_pairs, any_pair = queries_of(
        q_indptr_ptr, num_requests, HEADS, 1, GQA, TILE, True
    )
    if not any_pair:
        return
    first = tl.load(q_indptr_ptr + request).to(tl.int64)
    last = tl.load(q_indptr_ptr + request + 1).to(tl.int64)
    length, query_positions = positions_of_queries(queries, request, q_indptr_ptr, indptr_ptr, True)
    q = load_queries(q_ptr, q_stride_t, q_stride_h, queries, heads, mask_pairs, K_DIM, K_PADDED)  # [TILE, K_PADDED]
    rotary_q = load_queries(
        q_ptr + K_DIM, q_stride_t, q_stride_h, queries, heads, mask_pairs, ROTARY_DIM, ROTARY_PADDED
    )  # [TILE, ROTARY_PADDED]
    k_channel = tl.arange(0, K_PADDED)  # [K_PADDED]
    v_channel = tl.arange(0, V_PADDED)  # [V_PADDED]
    rotary_channel = tl.arange(0, ROTARY_PADDED)  # [ROTARY_PADDED]
    mask_k = k_channel < K_DIM  # [K_PADDED]
    mask_v = v_channel < V_DIM  # [V_PADDED]
    acc = tl.zeros([TILE, V_PADDED], tl.float32)  # [TILE, V_PADDED]
    # Not -inf: where no score is finite yet, exp2(-inf - -inf) would be NaN.
    top = tl.full([TILE], -1e30, tl.float32)  # [TILE]
    total = tl.zeros([TILE], tl.float32)  # [TILE]
    # No further than the tile's last query, which sees no later token; but a mask may have later ones.
    end = last if READS == "masked" else tl.minimum(last, tl.max(queries, 0) + 1)
    for start in tl.range(first, end, TOKENS):
        tokens = start + tl.arange(0, TOKENS)  # [TOKENS]
        mask_tokens = tokens < last  # [TOKENS]
        keys = tl.load(
            k_ptr + tokens[None, :] * k_stride_t + kv_head * k_stride_h + k_channel[:, None],
            mask=mask_tokens[None, :] & mask_k[:, None], other=0.0,
        )  # fmt: skip  # [K_PADDED, TOKENS]
        values = tl.load(
            v_ptr + tokens[:, None] * v_stride_t + kv_head * v_stride_h + v_channel[None, :],
            mask=mask_tokens[:, None] & mask_v[None, :], other=0.0,
        )  # fmt: skip  # [TOKENS, V_PADDED]
        products = rotary_products(
            rotary_q, rotary_ptr + tokens[None, :] * rotary_stride_t + rotary_channel[:, None],
            mask_tokens[None, :] & (rotary_channel < ROTARY_DIM)[:, None], TILE, ROTARY_DIM,
        )  # fmt: skip  # [TILE, TOKENS]
        read = tokens[None, :] <= queries[:, None]  # [TILE, TOKENS]
        if READS == "masked":
            row = (queries - first)[:, None] * (length + last - first) + length  # [TILE, 1]
            byte_ptrs = mask_ptr + tl.load(mask_starts_ptr + request) + row + (tokens - first)[None, :]
            mask_bytes = mask_pairs[:, None] & mask_tokens[None, :]  # [TILE, TOKENS]
            read = tl.load(byte_ptrs, mask=mask_bytes, other=0) != 0  # [TILE, TOKENS]
        elif READS != "all":
            positions = length + (tokens - first).to(tl.int32)  # [TOKENS]
            inside = is_in_window(query_positions[:, None], positions[None, :], RESIDUAL, SINKS)  # [TILE, TOKENS]
            read = read & (inside if READS == "inside" else ~inside)
        acc, top, total = add_block(q, keys, values, products, read, acc, top, total, scale, cap, CAPPED)
    store_part(
        partial_ptr, lse_ptr, queries * (HEADS * GQA) + heads, num_splits, acc, top, total, mask_pairs,
        EXACT_PARTS, PART, V_DIM, V_PADDED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_splits", "num_requests"])
def merge_splits(
    partial_ptr, lse_ptr, q_indptr_ptr, out_ptr, out_stride_t, out_stride_h, num_splits, num_requests,
    DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, MOST_SPLITS: tl.constexpr, STEPS: tl.constexpr,
    EXTEND: tl.constexpr, EXACT_PARTS: tl.constexpr, MIN_SPLIT: tl.constexpr, TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr, sink_ptr=None, mu_ptr=None, lam_ptr=None,
):  # fmt: skip
    """Merge one head of one query: weight its splits, undo the values' transform, once, and add its exact parts.

    Latents have the constants of their transform, mu and lambda [DIM], which all heads share. Attention sinks
    [num_heads], where there are any, are the scores of one more token for each head, without a value.
    SPLITS partial outputs are read at once, of at most MOST_SPLITS. Where requests have one query, the splits of a
    request without tokens are not read: which these are follows from its rows, that `q_indptr_ptr` then counts.
    """
    wait_for_kernel_before(DEPENDENT)
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    parts = num_splits + EXACT_PARTS
    # Splits of a query and head lie side by side, [queries, num_heads, parts].
    place = (query * tl.num_programs(1) + head) * parts
    channels = tl.arange(0, PADDED)  # [PADDED]
    mask_channels = channels < DIM  # [PADDED]
    num_queries = tl.num_programs(0)
    used = num_splits
    if EXTEND:
        num_queries = tl.load(q_indptr_ptr + num_requests).to(tl.int32)  # the others are padding: nothing was written
    else:
        length = (tl.load(q_indptr_ptr + query + 1) - tl.load(q_indptr_ptr + query)).to(tl.int32)
        used = tl.cdiv(length, tokens_of_split(length, num_splits, MIN_SPLIT, TOKENS))
    # All weights at once: partial outputs are then summed as they are, and no load of them waits for another.
    weighed = tl.arange(0, MOST_SPLITS)  # [MOST_SPLITS]
    mask_weighed = (weighed < used) & (query < num_queries)  # [MOST_SPLITS]
    weights = tl.load(lse_ptr + place + weighed, mask=mask_weighed, other=float("-inf"))  # [MOST_SPLITS], as log2
    top = tl.max(tl.where(weights > float("-inf"), weights, -1e30), 0) + tl.zeros([1], tl.float32)  # [1]
    total = tl.sum(tl.where(weights != float("-inf"), tl.exp2(weights - top), 0.0), 0) + tl.zeros(
        [1], tl.float32
    )  # [1]
    out = tl.zeros([1, PADDED], tl.float32)  # [1, PADDED]
    for first in tl.range(0, used, SPLITS):
        split = first + tl.arange(0, SPLITS)  # [SPLITS]
        mask_splits = (split < used) & (query < num_queries)  # [SPLITS]
        # Read once more, from the nearest cache by then.
        of_block = tl.load(lse_ptr + place + split, mask=mask_splits, other=float("-inf"))  # [SPLITS]
        # A split without tokens has a weight of -inf, and nothing was written for it; NaN must be seen.
        mask_written = of_block != float("-inf")  # [SPLITS]
        shares = tl.where(mask_written, tl.exp2(of_block - top), 0.0)  # [SPLITS]
        partials = tl.load(
            partial_ptr + (place + split[:, None]) * DIM + channels[None, :],
            mask=mask_written[:, None] & mask_channels[None, :], other=0.0,
        )  # fmt: skip  # [SPLITS, PADDED]
        out += tl.sum(partials * shares[:, None], 0)[None, :]
    if mu_ptr is not None:
        # A mean counts once for each share of the output, of which the shares of splits are `total`.
        shares = tl.where(total == 0.0, 1.0, total)[:, None]  # [1, 1]
        out = invert_steps(out / shares, 0, channels, mask_channels, mu_ptr, lam_ptr, STEPS, DIM) * total[:, None]
    else:
        # Values beside keys have no constants, for which any pointer stands.
        out = invert_steps(out, head, channels, mask_channels, out_ptr, out_ptr, STEPS, DIM)
    for part in tl.static_range(EXACT_PARTS):
        # Exact parts are in model space, so they are added after the transform of the rows' part is undone.
        at = place + num_splits + part + tl.arange(0, 1)  # [1]
        lse = tl.load(lse_ptr + at, mask=(query < num_queries) & (at >= 0), other=float("-inf"))  # [1]
        is_written = lse != float("-inf")  # [1]; NaN must be seen
        exact_ptrs = partial_ptr + at[:, None] * DIM + channels[None, :]  # [1, PADDED]
        exact = tl.load(exact_ptrs, mask=is_written[:, None] & mask_channels[None, :], other=0.0)  # [1, PADDED]
        new_top = tl.where(is_written, tl.maximum(top, lse), top)  # [1]
        shrink = tl.exp2(top - new_top)  # [1]
        share = tl.where(is_written, tl.exp2(lse - new_top), 0.0)  # [1]
        total = total * shrink + share
        out = out * shrink[:, None] + exact * share[:, None]
        top = new_top
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head + tl.zeros([1], tl.int32)) * 1.4426950408889634  # [1], as log2
        new_top = tl.maximum(top, sink)  # [1]
        shrink = tl.exp2(top - new_top)  # [1]
        total = total * shrink + tl.exp2(sink - new_top)
        out = out * shrink[:, None]
    # A request without tokens has a total of 0, and reads zeros.
    out = tl.reshape(out / tl.where(total == 0.0, 1.0, total)[:, None], (PADDED,))  # [PADDED]
    if out_ptr.dtype.element_ty == tl.float16:
        out = fp16_saturated(out)
    out_ptrs = out_ptr + query * out_stride_t + head * out_stride_h + channels  # [PADDED]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_channels)
