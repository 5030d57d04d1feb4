"""The kernel that quantizes tokens of several layers into staged rows by one launch.

Device pools of different layers are memory of its own each, so that a table says how far they lie from the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.storing.store_rows import store_side


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def store_layers(
    spans_ptr, k_ptr, k_stride_t, k_stride_h, k_rows_ptr, k_mu_ptr, k_inverse_ptr,
    v_ptr, v_stride_t, v_stride_h, v_rows_ptr, slots_ptr, num_tokens,
    HEADS: tl.constexpr, TOKENS: tl.constexpr,
    K_ROW: tl.constexpr, K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_GROUPS: tl.constexpr, K_STEPS: tl.constexpr,
    K_SYMMETRIC: tl.constexpr, K_FITTED: tl.constexpr, K_PADDED: tl.constexpr, K_WORD: tl.constexpr,
    V_ROW: tl.constexpr, V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_GROUPS: tl.constexpr, V_STEPS: tl.constexpr,
    V_SYMMETRIC: tl.constexpr, V_FITTED: tl.constexpr, V_PADDED: tl.constexpr, V_WORD: tl.constexpr,
    UNIT: tl.constexpr, K_UNIT: tl.constexpr, V_UNIT: tl.constexpr,
):  # fmt: skip
    """Store keys or values, by the third axis of the grid, of one layer, one head and a block of device slots.

    Row t of a layer's staged rows is that of slot t. `spans_ptr` has four distances of each layer, in 16 bytes: of its
    keys, its values and their rows from the pointers given; UNIT, K_UNIT and V_UNIT are the elements of 16 bytes of the
    pools and of the rows.
    """
    layer, head = tl.program_id(2) // 2, tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    mask_tokens = tokens < num_tokens  # [TOKENS]
    slots = tl.load(slots_ptr + tokens, mask=mask_tokens, other=0).to(tl.int64)  # [TOKENS]
    spans_ptr += 4 * layer
    if tl.program_id(2) % 2 == 0:
        constants = layer * HEADS * K_DIM
        store_side(
            k_ptr + UNIT * tl.load(spans_ptr), k_stride_t, k_stride_h, k_rows_ptr + K_UNIT * tl.load(spans_ptr + 2),
            k_mu_ptr + constants, k_inverse_ptr + constants, slots, tokens, mask_tokens, head,
            K_ROW, HEADS, K_DIM, K_BITS, K_GROUPS, K_STEPS, K_SYMMETRIC, K_FITTED, K_PADDED, K_WORD, TOKENS,
        )  # fmt: skip
    else:
        # Values have no constants, for which any pointer stands.
        store_side(
            v_ptr + UNIT * tl.load(spans_ptr + 1), v_stride_t, v_stride_h,
            v_rows_ptr + V_UNIT * tl.load(spans_ptr + 3), v_ptr, v_ptr, slots, tokens, mask_tokens, head,
            V_ROW, HEADS, V_DIM, V_BITS, V_GROUPS, V_STEPS, V_SYMMETRIC, V_FITTED, V_PADDED, V_WORD, TOKENS,
        )  # fmt: skip
