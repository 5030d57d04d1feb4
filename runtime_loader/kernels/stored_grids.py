"""The grids of a block of tokens inside kernels: scale words as scales and offsets. Knows nothing of codes."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.unpack_codes import (
    for_each,
    log2_and_inverse,
    row_offsets,
    scale_and_minimum,
    scale_and_zero_point,
    words_at,
)


@triton.jit
def to_columns(x, TILE: tl.constexpr):
    """What is known of a token and each of its heads [TOKENS, JOINED], for the columns of a product that read them."""
    if x.shape[1] > 1:
        PER_HEAD: tl.constexpr = TILE // x.shape[1]
        spread = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], PER_HEAD))  # [TOKENS, JOINED, PER_HEAD]
        x = tl.reshape(spread, (x.shape[0], TILE))
    return x


@triton.jit
def _loaded_words(index, words_ptr, slots, first, ROW: tl.constexpr, ASM: tl.constexpr):
    """A word of 32 bits of each token and head, or two short ones, [TOKENS, JOINED].

    The first word of each head is `first`, [JOINED].
    """
    rows = row_offsets(slots[:, None], ROW // 2, [slots.shape[0], first.shape[0]], ASM)  # [TOKENS, JOINED]
    return tl.load(words_ptr + (first[None, :] + index) + rows)


@triton.jit
def _grid_of(group, words, shifts, PAIRED: tl.constexpr, WORD: tl.constexpr, ASM: tl.constexpr):
    """The scale and the offset of a group of a head, [TOKENS, JOINED] each."""
    if WORD == 32:
        grid = scale_and_minimum(words[group], ASM)
    elif PAIRED:
        grid = scale_and_zero_point(words[group // 2], group % 2)
    else:
        grid = scale_and_zero_point(words[group] >> shifts[group][None, :], 0)
    return grid


@triton.jit
def _shift_of(group, first):
    """The place of each head's short word of a group in the 32 bits that hold it, [JOINED]."""
    return (first + group) % 2 * 16


@triton.jit
def _loaded_half(group, words_ptr, slots, first, ROW: tl.constexpr, ASM: tl.constexpr):
    """The 32 bits of each token and head that hold the short word of a group, [TOKENS, JOINED]."""
    return _loaded_words(0, words_ptr, slots, (first + group) // 2, ROW, ASM)


@triton.constexpr_function
def _are_paired(heads, units, bits, groups):
    """Return whether the short words of a head fill whole words of 32 bits."""
    return groups % 2 == 0 and words_at(heads, units, bits, 16) % 2 == 0


@triton.jit
def loaded_words(
    words_ptr, slots, kv_head, HEADS: tl.constexpr, JOINED: tl.constexpr, WIDE: tl.constexpr,
    ROW: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, WORD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The words of JOINED heads as `grids_of_words` takes them, [TOKENS, JOINED] each; ROW is in units of 16 bits.

    Short words are loaded two at a time: fewer than four bytes are not copied ahead of the loop.
    """
    first = words_at(HEADS, WIDE, BITS, WORD) + (kv_head + tl.arange(0, JOINED)) * GROUPS  # [JOINED]
    if WORD == 32:
        words = for_each(_loaded_words, GROUPS, (words_ptr, slots, first, ROW, ASM))
    elif _are_paired(HEADS, WIDE, BITS, GROUPS):
        words = for_each(_loaded_words, GROUPS // 2, (words_ptr, slots, first // 2, ROW, ASM))
    else:
        words = for_each(_loaded_half, GROUPS, (words_ptr, slots, first, ROW, ASM))
    return words


@triton.jit
def grids_of_words(
    words, kv_head, HEADS: tl.constexpr, JOINED: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr,
    GROUPS: tl.constexpr, WORD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The scale and the offset of each group of JOINED heads, pairs of [TOKENS, JOINED].

    The offset is the minimum or, of short words, `ONE` times the zero point.
    """
    first = words_at(HEADS, WIDE, BITS, WORD) + (kv_head + tl.arange(0, JOINED)) * GROUPS  # [JOINED]
    PAIRED: tl.constexpr = _are_paired(HEADS, WIDE, BITS, GROUPS)
    shifts = ()
    if WORD == 16 and not PAIRED:
        shifts = for_each(_shift_of, GROUPS, (first,))
    return for_each(_grid_of, GROUPS, (words, shifts, PAIRED, WORD, ASM))


@triton.jit
def stored_grids(
    words_ptr, slots, kv_head, HEADS: tl.constexpr, JOINED: tl.constexpr, WIDE: tl.constexpr,
    ROW: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, WORD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The grids of `grids_of_words`, loaded as `loaded_words` does."""
    words = loaded_words(words_ptr, slots, kv_head, HEADS, JOINED, WIDE, ROW, BITS, GROUPS, WORD, ASM)
    return grids_of_words(words, kv_head, HEADS, JOINED, WIDE, BITS, GROUPS, WORD, ASM)


@triton.jit
def largest_scale(grids, mask_tokens, TOKENS: tl.constexpr, JOINED: tl.constexpr, ASM: tl.constexpr):
    """The log2 and the inverse of the largest scale of a head's grids, [TOKENS, JOINED] each.

    The log2 is -inf where there is no token: added to scores, it hides what was read there.
    """
    log2 = tl.zeros([TOKENS, JOINED], tl.float32)  # [TOKENS, JOINED]
    inverse = tl.full([TOKENS, JOINED], 1.0, tl.float32)  # [TOKENS, JOINED]
    if len(grids) > 0:
        largest = tl.full([TOKENS, JOINED], 2.0**-24, tl.float32)  # [TOKENS, JOINED]
        for group in tl.static_range(len(grids)):
            largest = tl.maximum(largest, grids[group][0])
        log2, inverse = log2_and_inverse(largest, ASM)  # [TOKENS, JOINED] each
    return tl.where(mask_tokens[:, None], log2, float("-inf")), inverse


@triton.jit
def value_grids(
    words_ptr, slots, mask_tokens, kv_head,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, JOINED: tl.constexpr, WIDE: tl.constexpr, ROW: tl.constexpr,
    BITS: tl.constexpr, GROUPS: tl.constexpr, WORD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grids of values, a pair of [TOKENS, JOINED] for each group, and the log2 and inverse of the largest scale."""
    grids = ()  # a pair of [TOKENS, JOINED] for each group
    if BITS != 16:
        grids = stored_grids(words_ptr, slots, kv_head, HEADS, JOINED, WIDE, ROW, BITS, GROUPS, WORD, ASM)
    log2_v_scale, inverse = largest_scale(grids, mask_tokens, TOKENS, JOINED, ASM)  # [TOKENS, JOINED] each
    return grids, log2_v_scale, inverse
