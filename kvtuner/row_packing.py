"""The packing of codes and scale words into rows of bytes, and back. Knows nothing of how codes were chosen."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

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
from kvtuner.quant import Quantized, by_channel, by_token
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
    bits, word_bits = quantized.bits, quantized.word_bits
    num_heads, head_dim = quantized.codes.shape[-2:]
    codes = _pack_codes(quantized.codes, bits)
    first_word = words_offset(num_heads, head_dim, bits, word_bits)
    if word_bits == SHORT_WORD_BITS:
        words = to_words(quantized.scale, quantized.minimum, bits).unsqueeze(-1)
    else:
        words = torch.stack((quantized.scale, quantized.minimum), dim=-1).contiguous()
    group_size = head_dim // quantized.scale.shape[-1]
    length = row_bytes(num_heads, head_dim, bits, group_size, word_bits=word_bits)
    aligned = pad(codes, (0, first_word - codes.shape[-1]))
    row = torch.cat((aligned, words.view(torch.uint8).flatten(-3)), dim=-1)
    return pad(row, (0, length - row.shape[-1]))


def _pack_codes(codes: Tensor, bits: int) -> Tensor:
    """The bytes of codes uint8 [..., num_heads, head_dim] as a row has them, uint8 [..., bytes]."""
    slots = num_slots(bits)
    sliced = codes.to(torch.int32).unflatten(-1, (slots, -1))
    shifts = torch.arange(slots, dtype=torch.int32, device=sliced.device) * bits
    units = (sliced << shifts.unsqueeze(-1)).sum(dim=-2, dtype=torch.int32)
    packed = torch.stack((units & 0xFF, units >> 8 & 0xFF), dim=-1).to(torch.uint8).flatten(-3)
    if bits != THREE_BITS:
        return packed
    high = (units >> 16).to(torch.uint8).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-3)
    return torch.cat((packed, high), dim=-1)


def pack_token_groups(quantized: Quantized) -> Tensor:
    """Lay groups of tokens out as rows: a token's codes as `pack_rows` has them, then its share of the group's words.

    The words of a group, one uint32 per (head, channel) as in `pack_rows`, are ``4 * num_heads * head_dim`` bytes, and
    the row of token i has bytes ``[i * share, (i + 1) * share)`` of them straight after its codes, where `share` is
    their number divided by the tokens, rounded up. So rows of a group are read together, and moved together.

    Args:
        quantized: Groups as `by_channel` arranges them, codes [..., groups, num_heads, head_dim, tokens].

    Returns:
        uint8 [..., tokens, row_bytes].
    """
    num_heads, head_dim, group_size = quantized.codes.shape[-3:]
    codes = _pack_codes(by_token(quantized.codes), quantized.bits)
    words = torch.cat((quantized.scale, quantized.minimum), dim=-1).contiguous().view(torch.uint8).flatten(-3)
    share = -(-words.shape[-1] // group_size)
    shares = pad(words, (0, share * group_size - words.shape[-1])).unflatten(-1, (group_size, share)).flatten(-3, -2)
    length = row_bytes(num_heads, head_dim, quantized.bits, group_size, granularity="per_channel")
    return pad(torch.cat((codes, shares), dim=-1), (0, length - codes.shape[-1] - share))


def unpack_token_groups(rows: Tensor, bits: int, num_heads: int, head_dim: int, group_size: int) -> Quantized:
    """Read whole groups of rows that `pack_token_groups` wrote, uint8 [..., tokens, row_bytes], as of `by_channel`.

    Raises:
        PrecisionError: A row of another length, or what `check_token_group` refuses.
    """
    expected = row_bytes(num_heads, head_dim, bits, group_size, granularity="per_channel")
    _check_rows(rows, expected)
    num_code_bytes, num_word_bytes = num_heads * head_dim * bits // 8, WIDE_WORD_BITS // 8 * num_heads * head_dim
    codes = codes_of_rows(rows, bits, num_heads, head_dim).to(torch.uint8)
    share = -(-num_word_bytes // group_size)
    shares = rows[..., num_code_bytes : num_code_bytes + share].unflatten(-2, (-1, group_size)).flatten(-2)
    words = _as(torch.float16, shares[..., :num_word_bytes]).unflatten(-1, (num_heads, head_dim, 2))
    return Quantized(by_channel(codes, group_size), words[..., :1], words[..., 1:], bits)


def unpack_rows(
    rows: Tensor, bits: int, num_heads: int, head_dim: int, group_size: int | None = None,
    *, word_bits: WordBits = WIDE_WORD_BITS,
) -> Quantized:  # fmt: skip
    """Read rows that `pack_rows` wrote, uint8 [..., row_bytes]; `group_size` is head_dim by default.

    Raises:
        PrecisionError: A row of another length, or what `check_group_size` refuses.
    """
    group_size = head_dim if group_size is None else group_size
    _check_rows(rows, row_bytes(num_heads, head_dim, bits, group_size, word_bits=word_bits))
    codes = codes_of_rows(rows, bits, num_heads, head_dim).to(torch.uint8)
    scale, minimum = words_of_rows(rows, bits, num_heads, head_dim, group_size, word_bits=word_bits)
    return Quantized(codes, scale, minimum, bits, used_word_bits(bits, word_bits))


def _check_rows(rows: Tensor, expected: int) -> None:
    if rows.shape[-1] != expected or rows.dtype != torch.uint8:
        raise PrecisionError(f"a row is uint8 [..., {expected}], not {rows.dtype} [..., {rows.shape[-1]}]")


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
