"""The parts of an output beside `decode_split`'s: what new tokens read of one another, and the merge of all parts."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.queries import queries_of, softcap
from kvtuner.runtime_loader.kernels.transform_steps import invert_steps
from kvtuner.runtime_loader.kernels.unpack_codes import fp16_saturated


@triton.jit(do_not_specialize=["num_splits", "num_requests"])
def attend_fresh(
    q_ptr, q_stride_t, q_stride_h, k_ptr, k_stride_t, k_stride_h, v_ptr, v_stride_t, v_stride_h, q_indptr_ptr,
    partial_ptr, lse_ptr, scale, cap, num_splits, num_requests,
    HEADS: tl.constexpr, GQA: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    K_DIM: tl.constexpr, K_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Causal attention of one request's new tokens over one another, as the last part beside `decode_split`'s.

    Queries, keys, values and partial outputs are those of model space.
    """
    # Queries, heads and their mask are [TILE].
    request, kv_head, queries, heads, mask_pairs, any_pair = queries_of(
        q_indptr_ptr, num_requests, HEADS, GQA, TILE, True
    )
    if not any_pair:
        return
    first = tl.load(q_indptr_ptr + request).to(tl.int64)
    last = tl.load(q_indptr_ptr + request + 1).to(tl.int64)
    # Channels are padded to a power of two, which a tile must be.
    k_channel = tl.arange(0, K_PADDED)  # [K_PADDED]
    v_channel = tl.arange(0, V_PADDED)  # [V_PADDED]
    mask_k = k_channel < K_DIM  # [K_PADDED]
    mask_v = v_channel < V_DIM  # [V_PADDED]
    q_ptrs = q_ptr + queries[:, None] * q_stride_t + heads[:, None] * q_stride_h + k_channel[None, :]
    q = tl.load(q_ptrs, mask=mask_pairs[:, None] & mask_k[None, :], other=0.0)  # [TILE, K_PADDED], as are q_ptrs
    acc = tl.zeros([TILE, V_PADDED], tl.float32)  # [TILE, V_PADDED]
    # Not -inf: where no score is finite yet, exp2(-inf - -inf) would be NaN.
    top = tl.full([TILE], -1e30, tl.float32)  # [TILE]
    total = tl.zeros([TILE], tl.float32)  # [TILE]
    # No further than the tile's last query, which sees no later token.
    for start in tl.range(first, tl.minimum(last, tl.max(queries, 0) + 1), TOKENS):
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
        scores = tl.dot(q, keys.to(q.dtype), input_precision="ieee") * scale  # [TILE, TOKENS]
        if CAPPED:
            scores = softcap(scores, cap)
        scores = tl.where(tokens[None, :] <= queries[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))  # [TILE]
        shrink = tl.exp2(top - new_top)  # [TILE]
        top = new_top
        weights = tl.exp2(scores - top[:, None])  # [TILE, TOKENS]
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    # Behind the splits of the rows.
    place = (queries * (HEADS * GQA) + heads) * (num_splits + 1) + num_splits  # [TILE]
    out = partial_ptr + place[:, None] * V_DIM + v_channel[None, :]  # [TILE, V_PADDED]
    tl.store(out, acc / total[:, None], mask=mask_pairs[:, None] & mask_v[None, :])
    tl.store(lse_ptr + place, top + tl.log2(total), mask=mask_pairs)


@triton.jit(do_not_specialize=["num_splits", "num_requests"])
def merge_splits(
    partial_ptr, lse_ptr, q_indptr_ptr, out_ptr, out_stride_t, out_stride_h, num_splits, num_requests,
    DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr, EXTEND: tl.constexpr,
):  # fmt: skip
    """Merge one head of one query: weight its splits, undo the values' transform, once, and add its fresh part."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    parts = num_splits + 1 if EXTEND else num_splits
    # Splits of a query and head lie side by side, [queries, num_heads, parts].
    place = (query * tl.num_programs(1) + head) * parts
    channels = tl.arange(0, PADDED)  # [PADDED]
    mask_channels = channels < DIM  # [PADDED]
    num_queries = tl.num_programs(0)
    if EXTEND:
        num_queries = tl.load(q_indptr_ptr + num_requests).to(tl.int32)  # the others are padding: nothing was written
    top = tl.full([1], -1e30, tl.float32)  # [1]
    total = tl.zeros([1], tl.float32)  # [1]
    out = tl.zeros([1, PADDED], tl.float32)  # [1, PADDED]
    for first in tl.range(0, num_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)  # [SPLITS]
        mask_splits = (split < num_splits) & (query < num_queries)  # [SPLITS]
        lse = tl.load(lse_ptr + place + split, mask=mask_splits, other=float("-inf"))  # [SPLITS]
        # A split without tokens has a weight of -inf, and nothing was written for it; NaN must be seen.
        mask_written = mask_splits & (lse != float("-inf"))  # [SPLITS]
        new_top = tl.maximum(top, tl.max(tl.where(lse > float("-inf"), lse, -1e30), 0))  # [1]
        share = tl.where(mask_written, tl.exp2(lse - new_top), 0.0)  # [SPLITS]
        partials = tl.load(
            partial_ptr + (place + split[:, None]) * DIM + channels[None, :],
            mask=mask_written[:, None] & mask_channels[None, :], other=0.0,
        )  # fmt: skip  # [SPLITS, PADDED]
        shrink = tl.exp2(top - new_top)  # [1]
        total = total * shrink + tl.sum(share, 0)
        out = out * shrink[:, None] + tl.sum(partials * share[:, None], 0)[None, :]
        top = new_top
    # Values have no constants, for which any pointer stands.
    out = invert_steps(out, head, channels, mask_channels, out_ptr, out_ptr, STEPS, DIM)
    if EXTEND:
        # The fresh part is in model space, so it is added after the transform of the rows' part is undone.
        is_query = query < num_queries
        fresh_lse = tl.load(lse_ptr + place + num_splits, mask=is_query, other=0.0)
        fresh_ptrs = partial_ptr + (place + num_splits) * DIM + channels  # [PADDED]
        fresh = tl.load(fresh_ptrs, mask=is_query & mask_channels, other=0.0)  # [PADDED]
        new_top = tl.maximum(top, fresh_lse)  # [1]
        shrink = tl.exp2(top - new_top)  # [1]
        share = tl.exp2(fresh_lse - new_top)  # [1]
        total = total * shrink + share
        out = out * shrink[:, None] + fresh[None, :] * share[:, None]
    # A request without tokens has a total of 0, and reads zeros.
    out = tl.reshape(out / tl.where(total == 0.0, 1.0, total)[:, None], (PADDED,))  # [PADDED]
    if out_ptr.dtype.element_ty == tl.float16:
        out = fp16_saturated(out)
    out_ptrs = out_ptr + query * out_stride_t + head * out_stride_h + channels  # [PADDED]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_channels)
