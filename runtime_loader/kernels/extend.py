"""What new tokens read of one another: the part of an extend that no row holds yet."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.queries import queries_of, softcap


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
    request, kv_head, queries, heads, mine, any_mine = queries_of(q_indptr_ptr, num_requests, HEADS, GQA, TILE, True)
    if not any_mine:
        return
    first = tl.load(q_indptr_ptr + request).to(tl.int64)
    last = tl.load(q_indptr_ptr + request + 1).to(tl.int64)
    # Channels are padded to a power of two, which a tile must be.
    k_channel = tl.arange(0, K_PADDED)
    v_channel = tl.arange(0, V_PADDED)
    k_real = k_channel < K_DIM
    v_real = v_channel < V_DIM
    q = tl.load(
        q_ptr + queries[:, None] * q_stride_t + heads[:, None] * q_stride_h + k_channel[None, :],
        mask=mine[:, None] & k_real[None, :], other=0.0,
    )  # fmt: skip  # [TILE, K_PADDED]
    acc = tl.zeros([TILE, V_PADDED], tl.float32)
    # Not -inf: where no score is finite yet, exp2(-inf - -inf) would be NaN.
    top = tl.full([TILE], -1e30, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    # No further than the tile's last query, which sees no later token.
    for start in tl.range(first, tl.minimum(last, tl.max(queries, 0) + 1), TOKENS):
        tokens = start + tl.arange(0, TOKENS)  # [TOKENS]
        live = tokens < last
        keys = tl.load(
            k_ptr + tokens[None, :] * k_stride_t + kv_head * k_stride_h + k_channel[:, None],
            mask=live[None, :] & k_real[:, None], other=0.0,
        )  # fmt: skip  # [K_PADDED, TOKENS]
        values = tl.load(
            v_ptr + tokens[:, None] * v_stride_t + kv_head * v_stride_h + v_channel[None, :],
            mask=live[:, None] & v_real[None, :], other=0.0,
        )  # fmt: skip  # [TOKENS, V_PADDED]
        scores = tl.dot(q, keys.to(q.dtype), input_precision="ieee") * scale  # [TILE, TOKENS]
        if CAPPED:
            scores = softcap(scores, cap)
        scores = tl.where(tokens[None, :] <= queries[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        top = new_top
        p = tl.exp2(scores - top[:, None])  # [TILE, TOKENS]
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    # Behind the splits of the rows, [TILE].
    place = (queries * (HEADS * GQA) + heads) * (num_splits + 1) + num_splits
    out = partial_ptr + place[:, None] * V_DIM + v_channel[None, :]
    tl.store(out, acc / total[:, None], mask=mine[:, None] & v_real[None, :])
    tl.store(lse_ptr + place, top + tl.log2(total), mask=mine)
