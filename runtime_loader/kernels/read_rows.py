"""Rows gathered from their slots and read back to model space: what a long prefill attends to."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.transform import hadamard
from kvtuner.runtime_loader.kernels.unpack import fp16_saturated, scale_and_minimum


@triton.jit(do_not_specialize_on_alignment=["count_ptr"])
def read_side(
    rows_ptr, words_ptr, mu_ptr, lam_ptr, slots_ptr, out_ptr, out_stride_t, out_stride_h, count_ptr,
    HEADS: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    CENTERED: tl.constexpr, BALANCED: tl.constexpr, STAGES: tl.constexpr, PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Read one head of the first `count` tokens back to [tokens, heads, DIM], with the roundings of `QuantSpec`."""
    SLOTS: tl.constexpr = 16 // BITS
    UNITS: tl.constexpr = DIM // SLOTS
    head = tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    live = tokens < tl.load(count_ptr)
    slots = tl.load(slots_ptr + tokens, mask=live, other=0).to(tl.int64)
    channels = tl.arange(0, PADDED)  # [PADDED], a power of two
    real = channels < DIM
    mask = live[:, None] & real[None, :]
    if BITS == 16:
        y = tl.load(rows_ptr + slots[:, None] * ROW + head * DIM + channels[None, :], mask=mask, other=0.0)
    else:
        # A unit is loaded once for every slot: rows lie in the nearest cache by then.
        unit = channels % UNITS
        units = tl.load(rows_ptr + slots[:, None] * ROW + head * UNITS + unit[None, :], mask=mask, other=0)
        # Slot j of unit u is channel j * UNITS + u.
        codes = (units.to(tl.int32) >> (channels // UNITS * BITS)[None, :]) & ((1 << BITS) - 1)
        group = channels // (DIM // GROUPS)
        words = tl.load(
            words_ptr + slots[:, None] * (ROW // 2) + HEADS * UNITS // 2 + head * GROUPS + group[None, :],
            mask=mask, other=0,
        )  # fmt: skip
        step, minimum = scale_and_minimum(words)
        # Padding channels hold zeros, so that the Hadamard of those beside them adds nothing.
        y = tl.where(mask, codes.to(tl.float32) * step + minimum, 0.0)
        if STAGES > 0:
            y = hadamard(y, TOKENS, PADDED, STAGES)
        if BALANCED:
            y = y * tl.load(lam_ptr + head * DIM + channels, mask=real, other=0.0)[None, :]
        if CENTERED:
            y = y + tl.load(mu_ptr + head * DIM + channels, mask=real, other=0.0)[None, :]
    out = out_ptr + tokens[:, None] * out_stride_t + head * out_stride_h + channels[None, :]
    if BITS != 16 and out_ptr.dtype.element_ty == tl.float16:
        y = fp16_saturated(y)  # half a step above the largest key, or a Hadamard of such
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=mask)
