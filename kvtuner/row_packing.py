"""The packing of codes and scale words into rows of bytes, and back. Knows nothing of how codes were chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtuner.errors import PrecisionError
from kvtuner.precision import (
    SHORT_WORD_BITS,
    THREE_BITS,
    WIDE_WORD_BITS,
    WordBits,
    num_slots,
    row_bytes,
    used_word_bits,
    words_offset,
)
from kvtuner.quant import Quantized
from kvtuner.zero_points import from_words, to_words


def pack_rows(quantized: Quantized) -> Tensor:
    """Lay tokens out as rows: sliced codes of every head, then the scale words, padded to 16 bytes.

    Per head there are ``head_dim / slots`` little-endian units of 16 bits (at 3 bits: 24) with ``slots`` codes; slot j
    of unit u holds channel ``j * (head_dim / slots) + u`` in bits ``[j * bits, (j + 1) * bits)``. At 3 bits the first
    two bytes of all heads' units come first, then the third bytes, for every head those of units 0, U / 2, 1, U / 2 + 1
    and so on, then zeros up to a multiple of the word's bytes. A scale word, one per (head, group), is little-endian
    uint32: fp16 scale | fp16 minimum << 16; or uint16: zero point | scale << 5, as `zero_points` has them.

    Returns:
        uint8 [..., row_bytes].
    """
    bits, slots, word_bits = quantized.bits, num_slots(quantized.bits), quantized.word_bits
    num_heads, head_dim = quantized.codes.shape[-2:]
    lead = quantized.codes.shape[:-2]
    sliced = quantized.codes.to(torch.int32).unflatten(-1, (slots, head_dim // slots))
    shifts = torch.arange(slots, dtype=torch.int32, device=sliced.device) * bits
    units = (sliced << shifts.unsqueeze(-1)).sum(dim=-2, dtype=torch.int32)
    parts = [torch.stack((units & 0xFF, units >> 8 & 0xFF), dim=-1).to(torch.uint8).flatten(-3)]
    if bits == THREE_BITS:
        parts.append((units >> 16).to(torch.uint8).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-3))
    num_code_bytes, first_word = num_heads * head_dim * bits // 8, words_offset(num_heads, head_dim, bits, word_bits)
    parts.append(units.new_zeros(*lead, first_word - num_code_bytes, dtype=torch.uint8))
    if word_bits == SHORT_WORD_BITS:
        words = to_words(quantized.scale, quantized.minimum, bits).unsqueeze(-1)
    else:
        words = torch.stack((quantized.scale, quantized.minimum), dim=-1).contiguous()
    parts.append(words.view(torch.uint8).flatten(-3))
    group_size = head_dim // quantized.scale.shape[-1]
    padding = row_bytes(num_heads, head_dim, bits, group_size, word_bits=word_bits) - first_word - parts[-1].shape[-1]
    parts.append(units.new_zeros(*lead, padding, dtype=torch.uint8))
    return torch.cat(parts, dim=-1)


def unpack_rows(
    rows: Tensor, bits: int, num_heads: int, head_dim: int, group_size: int | None = None,
    *, word_bits: WordBits = WIDE_WORD_BITS,
) -> Quantized:  # fmt: skip
    """Read rows that `pack_rows` wrote, uint8 [..., row_bytes]; `group_size` is head_dim by default.

    Raises:
        PrecisionError: A row of another length, or what `check_group_size` refuses.
    """
    group_size = head_dim if group_size is None else group_size
    expected = row_bytes(num_heads, head_dim, bits, group_size, word_bits=word_bits)
    if rows.shape[-1] != expected or rows.dtype != torch.uint8:
        raise PrecisionError(f"a row is uint8 [..., {expected}], not {rows.dtype} [..., {rows.shape[-1]}]")
    codes = codes_of_rows(rows, bits, num_heads, head_dim).to(torch.uint8)
    scale, minimum = words_of_rows(rows, bits, num_heads, head_dim, group_size, word_bits=word_bits)
    return Quantized(codes, scale, minimum, bits, used_word_bits(bits, word_bits))


def codes_of_rows(rows: Tensor, bits: int, num_heads: int, head_dim: int) -> Tensor:
    """The codes of rows [..., row_bytes], small integers [..., num_heads, head_dim] of int16, or int32 at 3 bits."""
    slots = num_slots(bits)
    num_units = num_heads * (head_dim // slots)
    halves = _as(torch.int16, rows[..., : 2 * num_units])
    units = halves.unflatten(-1, (num_heads, -1))
    if bits == THREE_BITS:
        thirds = rows[..., 2 * num_units : 3 * num_units].to(torch.int32)
        high = thirds.unflatten(-1, (num_heads, head_dim // slots // 2, 2)).transpose(-1, -2).flatten(-2)
        units = units.to(torch.int32) & 0xFFFF | high << 16
    return torch.cat([units >> (slot * bits) & (2**bits - 1) for slot in range(slots)], dim=-1)


def words_of_rows(
    rows: Tensor, bits: int, num_heads: int, head_dim: int, group_size: int, *, word_bits: WordBits = WIDE_WORD_BITS
) -> tuple[Tensor, Tensor]:
    """The scales and the minimums of rows [..., row_bytes], each [..., num_heads, num_groups], as in `Quantized`."""
    num_groups, used = head_dim // group_size, used_word_bits(bits, word_bits)
    first_word = words_offset(num_heads, head_dim, bits, word_bits)
    words = rows[..., first_word : first_word + used // 8 * num_heads * num_groups]
    if used == SHORT_WORD_BITS:
        return from_words(_as(torch.int16, words).unflatten(-1, (num_heads, num_groups)), bits)
    scale, minimum = _as(torch.float16, words).unflatten(-1, (num_heads, num_groups, 2)).unbind(-1)
    return scale, minimum


def _as(dtype: torch.dtype, rows: Tensor) -> Tensor:
    """Bytes [..., n] as numbers of two bytes; a copy where a view begins at an odd byte."""
    if rows.storage_offset() % 2 or any(stride % 2 for stride in rows.stride()[:-1]) or rows.stride(-1) != 1:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(dtype)
