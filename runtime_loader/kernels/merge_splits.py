"""The launch after `decode_split`: the splits of a request become one output."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.arithmetic import fp16_saturated, hadamard


@triton.jit(do_not_specialize=["num_splits", "num_requests"])
def merge_splits(
    partial_ptr, lse_ptr, q_indptr_ptr, out_ptr, out_stride_t, out_stride_h, num_splits, num_requests,
    DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, EXTEND: tl.constexpr,
):  # fmt: skip
    """Merge one head of one query: weight its splits, undo the values' Hadamard, once, and add its fresh part."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    parts = num_splits + 1 if EXTEND else num_splits
    # Splits of a query and head lie side by side, [queries, num_heads, parts].
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
        split = first + tl.arange(0, SPLITS)  # [SPLITS]
        mask = (split < num_splits) & (query < num_queries)
        lse = tl.load(lse_ptr + place + split, mask=mask, other=float("-inf"))
        some = mask & (lse != float("-inf"))  # NaN is some: it must be seen
        # A split without tokens has a weight of -inf, and nothing was written for it.
        new_top = tl.maximum(top, tl.max(tl.where(lse > float("-inf"), lse, -1e30), 0))
        share = tl.where(some, tl.exp2(lse - new_top), 0.0)
        of_split = tl.load(
            partial_ptr + (place + split[:, None]) * DIM + channels[None, :],
            mask=some[:, None] & real[None, :], other=0.0,
        )  # fmt: skip  # [SPLITS, PADDED]
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(share, 0)
        out = out * shrink[:, None] + tl.sum(of_split * share[:, None], 0)[None, :]
        top = new_top
    if STAGES > 0:
        out = hadamard(out, 1, PADDED, STAGES)
    if EXTEND:
        # The fresh part is in model space, so it is added after the Hadamard of the rows' part is undone.
        mask = query < num_queries
        lse = tl.load(lse_ptr + place + num_splits, mask=mask, other=0.0)
        fresh = tl.load(partial_ptr + (place + num_splits) * DIM + channels, mask=mask & real, other=0.0)
        new_top = tl.maximum(top, lse)
        shrink = tl.exp2(top - new_top)
        share = tl.exp2(lse - new_top)
        total = total * shrink + share
        out = out * shrink[:, None] + fresh[None, :] * share[:, None]
    # A request without tokens has a total of 0, and reads zeros.
    out = tl.reshape(out / tl.where(total == 0.0, 1.0, total)[:, None], (PADDED,))
    if out_ptr.dtype.element_ty == tl.float16:
        out = fp16_saturated(out)
    tl.store(
        out_ptr + query * out_stride_t + head * out_stride_h + channels,
        out.to(out_ptr.dtype.element_ty), mask=real,
    )  # fmt: skip
