"""An exact window in kernels: copies in places by request slot, written, attended to, and hidden among the rows.

A request slot has PLACES = SINKS + RESIDUAL places; beside each lies the position of the token that it has a copy of,
or a negative one. A query reads a copy where it is at hand and inside its window, and otherwise the token's row, so
that what one part of the output reads another must not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.extend_and_merge import (
    add_block,
    load_queries,
    rotary_products,
    store_part,
)
from kvtuner.runtime_loader.kernels.queries import is_in_window, positions_of_queries, queries_of


@triton.jit
def store_copies(
    k_ptr, k_stride_t, k_stride_h, v_ptr, v_stride_t, v_stride_h, keys_ptr, values_ptr, positions_ptr,
    request_slots_ptr, q_indptr_ptr, indptr_ptr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, K_DIM: tl.constexpr, K_PADDED: tl.constexpr, V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr, EXTEND: tl.constexpr, RESIDUAL: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Copy one head of a request's new tokens to a block of its places, at most the newest token of each place.

    Where requests have one new token, BLOCK is 1 and that token's place is taken; `indptr_ptr` then counts it too.
    """
    PLACES: tl.constexpr = RESIDUAL + SINKS
    LAST: tl.constexpr = max(RESIDUAL, 1)
    request = tl.program_id(0)
    head = tl.program_id(2)
    row = tl.load(request_slots_ptr + request).to(tl.int64) * PLACES
    length = (tl.load(indptr_ptr + request + 1) - tl.load(indptr_ptr + request)).to(tl.int32)
    if EXTEND:
        first = tl.load(q_indptr_ptr + request).to(tl.int32)
        end = length + tl.load(q_indptr_ptr + request + 1).to(tl.int32) - first
        places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        # The newest token of a place behind the sinks; one more residual length keeps the modulus positive.
        newest = end - 1 - (end - 1 - (places - SINKS) + LAST) % LAST  # [BLOCK]
        is_sink = places < SINKS  # [BLOCK]
        positions = tl.where(is_sink, places, newest)  # [BLOCK]
        mask = (places < PLACES) & (positions >= length) & (positions < end)  # [BLOCK]
        mask &= is_sink | (positions >= SINKS)
        tokens = (first + positions - length).to(tl.int64)  # [BLOCK]
    else:
        positions = length - 1 + tl.arange(0, BLOCK)  # [1]
        places = tl.where(positions < SINKS, positions, SINKS + positions % LAST)  # [1]
        mask = (positions >= 0) & (places < PLACES)  # [1]
        tokens = request.to(tl.int64) + tl.arange(0, BLOCK)  # [1]
    if tl.max(mask.to(tl.int32), 0) == 0:
        return
    targets = row + places  # [BLOCK]
    k_channel = tl.arange(0, K_PADDED)  # [K_PADDED]
    mask_k = mask[:, None] & (k_channel < K_DIM)[None, :]  # [BLOCK, K_PADDED]
    k = tl.load(k_ptr + tokens[:, None] * k_stride_t + head * k_stride_h + k_channel[None, :], mask=mask_k, other=0.0)
    k_targets = keys_ptr + (targets[:, None] * HEADS + head) * K_DIM + k_channel[None, :]  # [BLOCK, K_PADDED]
    tl.store(k_targets, k.to(keys_ptr.dtype.element_ty), mask=mask_k)
    v_channel = tl.arange(0, V_PADDED)  # [V_PADDED]
    mask_v = mask[:, None] & (v_channel < V_DIM)[None, :]  # [BLOCK, V_PADDED]
    v = tl.load(v_ptr + tokens[:, None] * v_stride_t + head * v_stride_h + v_channel[None, :], mask=mask_v, other=0.0)
    v_targets = values_ptr + (targets[:, None] * HEADS + head) * V_DIM + v_channel[None, :]  # [BLOCK, V_PADDED]
    tl.store(v_targets, v.to(values_ptr.dtype.element_ty), mask=mask_v)
    if head == 0:
        tl.store(positions_ptr + targets, positions, mask=mask)


@triton.jit(do_not_specialize=["num_splits", "num_requests"])
def attend_copies(
    q_ptr, q_stride_t, q_stride_h, keys_ptr, values_ptr, rotary_ptr, positions_ptr, request_slots_ptr, q_indptr_ptr,
    indptr_ptr, partial_ptr, lse_ptr, scale, cap, num_splits, num_requests,
    HEADS: tl.constexpr, GQA: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, K_DIM: tl.constexpr,
    K_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr, ROTARY_DIM: tl.constexpr,
    ROTARY_PADDED: tl.constexpr, EXTEND: tl.constexpr, CAPPED: tl.constexpr, RESIDUAL: tl.constexpr,
    SINKS: tl.constexpr, EXACT_PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Attention of a request's queries over the copies that they read of its tokens in rows, as part PART.

    Queries, copies and partial outputs are those of model space, and latents as in `attend_fresh`.
    """
    PLACES: tl.constexpr = RESIDUAL + SINKS
    request, kv_head, queries, heads, mask_pairs, any_pair = queries_of(
        q_indptr_ptr, num_requests, HEADS, 1, GQA, TILE, EXTEND
    )
    if not any_pair:
        return
    length, query_positions = positions_of_queries(queries, request, q_indptr_ptr, indptr_ptr, EXTEND)
    row = tl.load(request_slots_ptr + request).to(tl.int64) * PLACES
    q = load_queries(q_ptr, q_stride_t, q_stride_h, queries, heads, mask_pairs, K_DIM, K_PADDED)  # [TILE, K_PADDED]
    rotary_q = load_queries(
        q_ptr + K_DIM, q_stride_t, q_stride_h, queries, heads, mask_pairs, ROTARY_DIM, ROTARY_PADDED
    )  # [TILE, ROTARY_PADDED]
    k_channel = tl.arange(0, K_PADDED)  # [K_PADDED]
    v_channel = tl.arange(0, V_PADDED)  # [V_PADDED]
    rotary_channel = tl.arange(0, ROTARY_PADDED)  # [ROTARY_PADDED]
    acc = tl.zeros([TILE, V_PADDED], tl.float32)  # [TILE, V_PADDED]
    top = tl.full([TILE], -1e30, tl.float32)  # [TILE]
    total = tl.zeros([TILE], tl.float32)  # [TILE]
    for start in tl.range(0, PLACES, TOKENS):
        places = start + tl.arange(0, TOKENS)  # [TOKENS]
        positions = tl.load(positions_ptr + row + places, mask=places < PLACES, other=-1)  # [TOKENS]
        at_hand = (positions >= 0) & (positions < length)  # [TOKENS]
        copies = (row + places) * HEADS + kv_head  # [TOKENS]
        keys = tl.load(
            keys_ptr + copies[None, :] * K_DIM + k_channel[:, None],
            mask=at_hand[None, :] & (k_channel < K_DIM)[:, None], other=0.0,
        )  # fmt: skip  # [K_PADDED, TOKENS]
        values = tl.load(
            values_ptr + copies[:, None] * V_DIM + v_channel[None, :],
            mask=at_hand[:, None] & (v_channel < V_DIM)[None, :], other=0.0,
        )  # fmt: skip  # [TOKENS, V_PADDED]
        products = rotary_products(
            rotary_q, rotary_ptr + copies[None, :] * ROTARY_DIM + rotary_channel[:, None],
            at_hand[None, :] & (rotary_channel < ROTARY_DIM)[:, None], TILE, ROTARY_DIM,
        )  # fmt: skip  # [TILE, TOKENS]
        read = at_hand[None, :] & is_in_window(query_positions[:, None], positions[None, :], RESIDUAL, SINKS)
        acc, top, total = add_block(q, keys, values, products, read, acc, top, total, scale, cap, CAPPED)
    store_part(
        partial_ptr, lse_ptr, queries * (HEADS * GQA) + heads, num_splits, acc, top, total, mask_pairs,
        EXACT_PARTS, PART, V_DIM, V_PADDED,
    )  # fmt: skip
