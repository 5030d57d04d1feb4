"""The row's law inside kernels is the one of `precision.py`."""

from __future__ import annotations

import itertools

import pytest

from kvtuner.precision import PACKED_BITS, num_slots, words_offset
from kvtuner.runtime_loader.kernels.unpack_codes import factor_of, slots_of, words_at


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_kernels_find_slots_and_words_where_rows_have_them(bits: int) -> None:
    assert slots_of(bits) == num_slots(bits)
    for heads, head_dim in itertools.product((1, 2, 3, 8), (16, 64, 80, 96, 128, 256)):
        assert 4 * words_at(heads, head_dim // num_slots(bits), bits) == words_offset(heads, head_dim, bits)


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_every_code_is_an_fp16_without_an_exponent(bits: int) -> None:
    """Only then is it a number times its code; from 1,024 on the bits are an exponent's."""
    assert all((2**bits - 1) * factor_of(slot, bits) < 1024 for slot in range(num_slots(bits)))
