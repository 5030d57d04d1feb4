"""Packed rows against bytes assembled bit by bit, and against rows written out by hand."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtuner.errors import PrecisionError
from kvtuner.precision import LAYOUT_ID, row_bytes, words_offset
from kvtuner.quant import Quantized, quantize
from kvtuner.row_packing import pack_rows, unpack_rows

if TYPE_CHECKING:
    from kvtuner.precision import WordBits

# (num_heads, head_dim, bits, group_size)
LAYOUTS = [
    (1, 8, 2, 8),
    (1, 8, 2, 1),
    (2, 72, 2, 9),
    (3, 80, 2, 40),
    (2, 64, 2, 16),
    (1, 16, 3, 2),
    (3, 80, 3, 40),
    (1, 48, 3, 12),
    (8, 128, 3, 128),
    (1, 12, 4, 3),
    (5, 80, 4, 20),
    (2, 96, 4, 96),
    (8, 128, 4, 32),
    (1, 6, 8, 3),
    (3, 96, 8, 48),
    (2, 80, 8, 40),
]


def seeded_quantized(lead: tuple[int, ...], layout: tuple[int, int, int, int], seed: int) -> Quantized:
    """Any codes with any scale words, NaN and infinity among them: packing judges nothing."""
    num_heads, head_dim, bits, group_size = layout
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (*lead, num_heads, head_dim), generator=rng, dtype=torch.uint8)
    words = torch.randint(-(2**15), 2**15, (2, *lead, num_heads, head_dim // group_size), generator=rng)
    scale, minimum = words.to(torch.int16).view(torch.float16)
    return Quantized(codes, scale, minimum, bits)


def half_bits(x: torch.Tensor) -> list[int]:
    return [word & 0xFFFF for word in x.contiguous().view(torch.int16).flatten().tolist()]


def oracle_row(quantized: Quantized) -> bytes:
    """One token's row, set bit by bit."""
    bits = quantized.bits
    num_heads, head_dim = quantized.codes.shape
    if bits == 3:
        return oracle_row_of_three_bits(quantized)
    num_units = head_dim * bits // 16
    row = bytearray(num_heads * head_dim * bits // 8)
    for head in range(num_heads):
        for channel, code in enumerate(quantized.codes[head].tolist()):
            slot, unit = divmod(channel, num_units)
            for bit in range(bits):
                position = 16 * (head * num_units + unit) + slot * bits + bit
                row[position // 8] |= (code >> bit & 1) << position % 8
    return with_words(bytes(row), quantized)


def oracle_row_of_three_bits(quantized: Quantized) -> bytes:
    """One token's row of units that are Python integers of 24 bits."""
    first_two, thirds = b"", b""
    for codes in quantized.codes.tolist():
        half = len(codes) // 16
        units = [sum(codes[slot * 2 * half + unit] << 3 * slot for slot in range(8)) for unit in range(2 * half)]
        first_two += b"".join((unit & 0xFFFF).to_bytes(2, "little") for unit in units)
        thirds += bytes(units[unit + other] >> 16 for unit in range(half) for other in (0, half))
    thirds += b"\0" * (-len(first_two + thirds) % 4)
    return with_words(first_two + thirds, quantized)


def with_words(codes: bytes, quantized: Quantized) -> bytes:
    """A row of codes with its scale words and its padding."""
    row = codes
    for scale, minimum in zip(half_bits(quantized.scale), half_bits(quantized.minimum), strict=True):
        row += struct.pack("<I", scale | minimum << 16)
    return row + b"\0" * (-len(row) % 16)


def token(quantized: Quantized, index: tuple[int, ...]) -> Quantized:
    return Quantized(quantized.codes[index], quantized.scale[index], quantized.minimum[index], quantized.bits)


def assert_equal(found: Quantized, expected: Quantized) -> None:
    assert found.bits == expected.bits
    assert found.codes.dtype == torch.uint8
    assert found.scale.dtype == found.minimum.dtype == torch.float16
    assert torch.equal(found.codes, expected.codes)
    assert found.scale.shape == expected.scale.shape
    assert half_bits(found.scale) == half_bits(expected.scale)
    assert half_bits(found.minimum) == half_bits(expected.minimum)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_the_bits_of_the_layout(layout: tuple[int, int, int, int]) -> None:
    quantized = seeded_quantized((2, 3), layout, seed=1)
    rows = pack_rows(quantized)
    assert rows.dtype == torch.uint8
    assert rows.shape == (2, 3, row_bytes(*layout))
    for index in ((0, 0), (0, 2), (1, 1)):
        assert bytes(rows[index].tolist()) == oracle_row(token(quantized, index))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_is_zero_whatever_the_codes(layout: tuple[int, int, int, int]) -> None:
    num_heads, head_dim, bits, group_size = layout
    codes = torch.full((2, num_heads, head_dim), 2**bits - 1, dtype=torch.uint8)
    words = torch.full((2, num_heads, head_dim // group_size), -1, dtype=torch.int16).view(torch.float16)
    rows = pack_rows(Quantized(codes, words, words, bits))
    code_bytes, first_word = num_heads * head_dim * bits // 8, words_offset(num_heads, head_dim, bits)
    used = first_word + 4 * num_heads * (head_dim // group_size)
    assert (rows[:, :code_bytes] == 0xFF).all()
    assert (rows[:, code_bytes:first_word] == 0).all()
    assert (rows[:, first_word:used] == 0xFF).all()
    assert (rows[:, used:] == 0).all()


def test_the_row_of_two_bit_codes_is_the_one_written_by_hand() -> None:
    x = torch.tensor([[-2.0, -1.0, 0.0, 1.0, 1.0, 0.0, -1.0, -2.0]])
    # codes 0 1 2 3 3 2 1 0 from the lowest bits up: 0x1be4; scale 1.0 is 0x3c00, minimum -2.0 is 0xc000
    assert bytes(pack_rows(quantize(x, 2)).tolist()).hex() == "e41b" + "003c00c0" + 10 * "00"


def test_the_row_of_three_bit_codes_is_the_one_written_by_hand() -> None:
    codes = (torch.arange(16) // 2 * torch.tensor([1, 0] * 8) + torch.tensor([0, 7] * 8)).to(torch.uint8)
    words = torch.tensor([[1.0]]).half()
    # Unit 0 holds codes 0 to 7 of the even channels, 0o76543210 = 0xfac688; unit 1 holds sevens, 0xffffff.
    row = pack_rows(Quantized(codes.unsqueeze(0), words, -words, 3))
    assert bytes(row.tolist()).hex() == "88c6" + "ffff" + "faff" + "0000" + "003c00bc" + 4 * "00"


def test_the_row_of_two_heads_and_two_groups_is_the_one_written_by_hand() -> None:
    codes = torch.stack((torch.arange(16), 15 - torch.arange(16))).to(torch.uint8)
    scale = torch.tensor([[1.0, 0.5], [2.0, 0.0]]).half()
    minimum = torch.tensor([[-2.0, 0.0], [65504.0, math.nan]]).half()
    row = pack_rows(Quantized(codes, scale, minimum, 4))
    # Unit u of a head holds channels u, 4 + u, 8 + u, 12 + u from its lowest nibble up.
    codes_hex = "40c851d962ea73fb" + "bf37ae269d158c04"
    words_hex = "003c00c0" + "00380000" + "0040ff7b" + "0000007e"
    assert bytes(row.tolist()).hex() == codes_hex + words_hex


def test_the_row_of_eight_bit_codes_is_the_one_written_by_hand() -> None:
    codes = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    words = torch.tensor([[1.0]]).half()
    # Two units, the low byte from the first half of the channels, the high byte from the second.
    row = pack_rows(Quantized(codes, words, -words, 8))
    assert bytes(row.tolist()).hex() == "01030204" + "003c00bc" + 8 * "00"


def test_a_poisoned_group_has_one_word() -> None:
    row = pack_rows(quantize(torch.tensor([[math.inf] + [1.0] * 7]), 2))
    assert bytes(row.tolist()).hex() == "0000" + "0000007e" + 10 * "00"


def test_the_layout_pinned_here_is_the_one_with_this_name() -> None:
    """A change to the rows above needs a new name: profiles and stored caches carry it."""
    assert LAYOUT_ID == "halfword-sliced-v1"


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from([(), (0,), (1,), (5,), (2, 0), (0, 3), (2, 3), (1, 2, 2)]),
    st.integers(0, 2**32 - 1),
)
def test_unpacking_undoes_packing(layout: tuple[int, int, int, int], lead: tuple[int, ...], seed: int) -> None:
    num_heads, head_dim, bits, group_size = layout
    quantized = seeded_quantized(lead, layout, seed)
    rows = pack_rows(quantized)
    assert rows.shape == (*lead, row_bytes(*layout))
    assert_equal(unpack_rows(rows, bits, num_heads, head_dim, group_size), quantized)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_undoes_unpacking_of_any_bytes_but_the_padding(layout: tuple[int, int, int, int]) -> None:
    num_heads, head_dim, bits, group_size = layout
    used = words_offset(num_heads, head_dim, bits) + 4 * num_heads * (head_dim // group_size)
    between = slice(num_heads * head_dim * bits // 8, words_offset(num_heads, head_dim, bits))
    rng = torch.Generator().manual_seed(3)
    rows = torch.randint(256, (4, row_bytes(*layout)), generator=rng, dtype=torch.uint8)
    rows[:, between] = 0
    back = pack_rows(unpack_rows(rows, bits, num_heads, head_dim, group_size))
    assert torch.equal(back[:, :used], rows[:, :used])


def test_rows_in_a_wider_poisoned_buffer_are_read_by_their_own_bytes() -> None:
    quantized = seeded_quantized((7,), (2, 80, 4, 40), seed=4)
    rows = pack_rows(quantized)
    buffer = torch.full((15, rows.shape[-1] + 48), 0xFF, dtype=torch.uint8)
    slots = buffer[1::2, 16 : 16 + rows.shape[-1]]
    slots.copy_(rows)
    assert_equal(unpack_rows(slots, 4, 2, 80, 40), quantized)
    assert_equal(unpack_rows(slots[3:4], 4, 2, 80, 40), token(quantized, (slice(3, 4),)))
    assert_equal(unpack_rows(slots[3], 4, 2, 80, 40), token(quantized, (3,)))


def test_one_group_per_head_is_the_default() -> None:
    quantized = seeded_quantized((3,), (2, 64, 8, 64), seed=5)
    assert_equal(unpack_rows(pack_rows(quantized), 8, 2, 64), quantized)


def test_rows_of_another_length_or_dtype_are_refused() -> None:
    rows = pack_rows(seeded_quantized((3,), (2, 64, 4, 64), seed=6))
    size = rows.shape[-1]
    for wrong in (rows[:, :-1], rows[:, :-16], torch.cat((rows, rows), dim=-1), rows[:, :0]):
        with pytest.raises(PrecisionError, match=rf"a row is uint8 \[\.\.\., {size}\]"):
            unpack_rows(wrong, 4, 2, 64)
    with pytest.raises(PrecisionError, match=r"not torch\.int8"):
        unpack_rows(rows.view(torch.int8), 4, 2, 64)
    with pytest.raises(PrecisionError, match="a row is uint8"):
        unpack_rows(rows, 8, 2, 64)
    with pytest.raises(PrecisionError, match="group_size 24"):
        unpack_rows(rows, 4, 2, 64, 24)


@pytest.mark.parametrize("word_bits", [32, 16])
def test_a_row_is_read_wherever_its_bytes_begin(word_bits: WordBits) -> None:
    quantized = quantize(torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0)), 4, word_bits=word_bits)
    row = pack_rows(quantized)
    odd = torch.zeros(row.numel() + 1, dtype=torch.uint8)
    odd[1:] = row.flatten()
    read = unpack_rows(odd[1:].view(1, -1), 4, 1, 32, word_bits=word_bits)
    assert torch.equal(read.dequantize(), quantized.dequantize())
