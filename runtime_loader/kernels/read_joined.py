"""The kernel that reads stored prefixes back to places among new tokens, for attention of variable lengths."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.store_and_read_rows import read_tile


@triton.jit(do_not_specialize_on_alignment=["count_ptr", "slots_ptr", "place_slots_ptr"])
def read_joined(
    k_rows_ptr, k_words_ptr, k_mu_ptr, k_lam_ptr, k_ptr, k_stride_t, k_stride_h,
    v_rows_ptr, v_words_ptr, v_ptr, v_stride_t, v_stride_h, slots_ptr, place_slots_ptr, count_ptr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr,
    K_ROW: tl.constexpr, K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_GROUPS: tl.constexpr, K_STEPS: tl.constexpr,
    K_PADDED: tl.constexpr, K_WORD: tl.constexpr,
    V_ROW: tl.constexpr, V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_GROUPS: tl.constexpr, V_STEPS: tl.constexpr,
    V_PADDED: tl.constexpr, V_WORD: tl.constexpr,
):  # fmt: skip
    """Read keys or values, by the third axis of the grid, of one head of the first `count` token slots to places."""
    head = tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    mask_tokens = tokens < tl.load(count_ptr)  # [TOKENS]
    slots = tl.load(slots_ptr + tokens, mask=mask_tokens, other=0).to(tl.int64)  # [TOKENS]
    places = tl.load(place_slots_ptr + tokens, mask=mask_tokens, other=0).to(tl.int64)  # [TOKENS]
    if tl.program_id(2) == 0:
        read_tile(
            k_rows_ptr, k_words_ptr, k_mu_ptr, k_lam_ptr, slots, k_ptr, k_stride_t, k_stride_h, places, mask_tokens,
            head, HEADS, K_ROW, K_DIM, K_BITS, K_GROUPS, K_STEPS, K_PADDED, K_WORD,
        )  # fmt: skip
    else:
        read_tile(
            v_rows_ptr, v_words_ptr, v_ptr, v_ptr, slots, v_ptr, v_stride_t, v_stride_h, places, mask_tokens,
            head, HEADS, V_ROW, V_DIM, V_BITS, V_GROUPS, V_STEPS, V_PADDED, V_WORD,
        )  # fmt: skip
