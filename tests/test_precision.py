"""Widths, pairs and the byte formula against figures worked out by hand."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtuner.errors import KVTunerError, PrecisionError
from kvtuner.precision import (
    ALL_BITS,
    PACKED_BITS,
    TOKEN_GROUPS,
    ExactWindow,
    PrecisionPair,
    RowShape,
    ScaleLayout,
    bytes_per_token,
    check_group_size,
    check_token_group,
    copy_bytes,
    effective_bits,
    mean_bits,
    row_bytes,
)

LLAMA_8B = RowShape(num_kv_heads=8, head_dim=128, v_head_dim=128)


@pytest.mark.parametrize("k_bits", ALL_BITS)
@pytest.mark.parametrize("v_bits", ALL_BITS)
def test_every_pair_reads_back_what_it_writes(k_bits: int, v_bits: int) -> None:
    pair = PrecisionPair(k_bits, v_bits)
    assert str(pair) == f"K{k_bits}V{v_bits}"
    assert PrecisionPair.parse(str(pair)) == pair
    assert PrecisionPair.parse(f"  {str(pair).lower()} ") == pair


@pytest.mark.parametrize(
    ("text", "bits"), [("2", 2), ("8", 8), ("16", 16), ("bf16", 16), ("FP16", 16), ("float16", 16), ("bfloat16", 16)]
)
def test_one_width_stands_for_keys_and_values(text: str, bits: int) -> None:
    assert PrecisionPair.parse(text) == PrecisionPair(bits, bits)


@pytest.mark.parametrize("text", ["", " ", "K8", "V4", "V4K8", "K8V4V2", "K8 V4", "K-8V4", "-4", "4.0", "fp8", "8bit"])
def test_other_precision_texts_are_refused(text: str) -> None:
    with pytest.raises(PrecisionError, match=f"^a precision is written K8V4, 8 or bf16, not {text!r}$"):
        PrecisionPair.parse(text)


@pytest.mark.parametrize(
    ("text", "side", "bits"), [("K5V4", "k", 5), ("K8V0", "v", 0), ("K4V32", "v", 32), ("5", "k", 5), ("0", "k", 0)]
)
def test_widths_that_no_row_has_are_refused_by_their_side(text: str, side: str, bits: int) -> None:
    with pytest.raises(PrecisionError, match=rf"^{side}_bits must be one of \(2, 3, 4, 8, 16\), but is {bits}$"):
        PrecisionPair.parse(text)


@pytest.mark.parametrize("text", ["²", "K²V²", "٤", "K٤V٤", "4" * 5000, f"K{'8' * 5000}V4"])
def test_digits_that_are_not_plain_ascii_numbers_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(PrecisionError, match=r"^a precision is written K8V4, 8 or bf16, not '.*'$"):
        PrecisionPair.parse(text)


@settings(deadline=None)
@given(st.text(alphabet="kKvV01234568 bfp-.²٤\n", max_size=8))
def test_no_text_ends_in_anything_but_a_pair_or_a_precision_error(text: str) -> None:
    try:
        pair = PrecisionPair.parse(text)
    except PrecisionError:
        return
    assert {pair.k_bits, pair.v_bits} <= set(ALL_BITS)


def test_pair_with_a_width_outside_the_set_names_the_side_and_the_value() -> None:
    with pytest.raises(PrecisionError, match=r"v_bits must be one of .* but is 5"):
        PrecisionPair(4, 5)
    assert issubclass(PrecisionError, KVTunerError)


def keeps_slots_whole(head_dim: int, bits: int, group_size: int) -> bool:
    """Whether all channels that share one slot of a head's units share a scale: what a kernel relies on."""
    num_units = head_dim // 8 if bits == 3 else head_dim * bits // 16
    slots = (range(slot * num_units, (slot + 1) * num_units) for slot in range(head_dim // num_units))
    return all(len({channel // group_size for channel in slot}) == 1 for slot in slots)


@pytest.mark.parametrize(
    ("head_dim", "bits", "allowed"),
    [
        (128, 2, [16, 32, 64, 128]),
        (128, 3, [16, 32, 64, 128]),
        (80, 3, [10, 20, 40, 80]),
        (48, 3, [6, 12, 24, 48]),
        (128, 4, [32, 64, 128]),
        (128, 8, [64, 128]),
        (80, 2, [10, 20, 40, 80]),
        (80, 4, [20, 40, 80]),
        (80, 8, [40, 80]),
        (96, 2, [12, 24, 48, 96]),
        (96, 8, [48, 96]),
        (64, 2, [8, 16, 32, 64]),
        (64, 8, [32, 64]),
        (72, 2, [9, 18, 36, 72]),
        (12, 4, [3, 6, 12]),
        (8, 2, [1, 2, 4, 8]),
        (2, 8, [1, 2]),
    ],
)
def test_group_sizes_allowed_are_those_that_divide_the_head_and_keep_slots_whole(
    head_dim: int, bits: int, allowed: list[int]
) -> None:
    divisors = [size for size in range(1, head_dim + 1) if head_dim % size == 0]
    assert [size for size in divisors if keeps_slots_whole(head_dim, bits, size)] == allowed
    for group_size in range(-1, head_dim + 2):
        if group_size in allowed:
            check_group_size(head_dim, bits, group_size)
        else:
            with pytest.raises(PrecisionError, match=f"group_size {group_size} .*head_dim {head_dim}"):
                check_group_size(head_dim, bits, group_size)


@pytest.mark.parametrize(("head_dim", "bits"), [(0, 4), (-8, 4), (63, 4), (4, 2), (8, 3), (72, 3), (1, 8), (2, 4)])
def test_head_that_does_not_fill_whole_units_is_refused(head_dim: int, bits: int) -> None:
    with pytest.raises(PrecisionError, match=f"head_dim {head_dim} cannot be packed at {bits} bits"):
        check_group_size(head_dim, bits, head_dim)


@pytest.mark.parametrize("bits", [0, 1, 5, 16, -4])
def test_only_packed_widths_have_groups(bits: int) -> None:
    with pytest.raises(PrecisionError, match=f"but are {bits}"):
        check_group_size(128, bits, 128)


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "bits", "group_size", "expected"),
    [
        (8, 128, 4, None, 544),  # 512 + 32
        (8, 128, 4, 32, 640),  # 512 + 4 * 8 * 4
        (8, 128, 8, 64, 1088),  # 1024 + 4 * 8 * 2
        (8, 128, 16, None, 2048),
        (1, 128, 2, None, 48),  # 32 + 4, padded by 12
        (8, 128, 3, None, 416),  # 384 + 32
        (1, 80, 3, 40, 48),  # 30 + 2 + 8, padded by 8
        (2, 80, 8, 40, 176),  # 160 + 16
        (1, 80, 2, 10, 64),  # 20 + 32, padded by 12
        (3, 96, 4, 24, 192),  # 144 + 48
        (1, 8, 2, None, 16),  # 2 + 4, padded by 10
        (1, 8, 2, 1, 48),  # 2 + 32, padded by 14
        (5, 12, 16, None, 120),  # native rows are not padded
    ],
)
def test_row_bytes_are_codes_scale_words_and_padding(
    num_heads: int, head_dim: int, bits: int, group_size: int | None, expected: int
) -> None:
    assert row_bytes(num_heads, head_dim, bits, group_size) == expected


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "bits", "group_size", "expected"),
    [
        (8, 128, 4, 32, 640),  # 512 + 4 * 1024 / 32
        (8, 128, 2, 128, 288),  # 256 + 32
        (1, 8, 2, 16, 16),  # 2 + 2, padded by 12
        (5, 24, 4, 64, 80),  # 60 + 7.5 rounded up to 8, padded by 12
        (3, 152, 2, 128, 144),  # 114 + 14.25 rounded up to 15: 129; rounded down it would be 128
        (2, 80, 8, 16, 208),  # 160 + 40, padded by 8
        (5, 12, 16, 32, 120),  # native rows have neither
    ],
)
def test_row_bytes_per_channel_spread_the_words_of_a_group_over_its_tokens(
    num_heads: int, head_dim: int, bits: int, group_size: int, expected: int
) -> None:
    assert row_bytes(num_heads, head_dim, bits, group_size, granularity="per_channel") == expected
    shape = RowShape(num_heads, head_dim, 64, ScaleLayout(group_size, granularity="per_channel"))
    assert shape.k_bytes(bits) == expected
    assert shape.v_bytes(8) == row_bytes(num_heads, 64, 8, 64)


@settings(deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 20).map(lambda n: 16 * n),
    st.sampled_from(PACKED_BITS),
    st.sampled_from(TOKEN_GROUPS),
)
def test_rows_of_a_group_hold_its_codes_and_a_word_for_every_channel(
    num_heads: int, head_dim: int, bits: int, tokens: int
) -> None:
    rows = tokens * row_bytes(num_heads, head_dim, bits, tokens, granularity="per_channel")
    codes, words = tokens * num_heads * head_dim * bits // 8, 4 * num_heads * head_dim
    assert 0 <= rows - codes - words < 17 * tokens


@pytest.mark.parametrize("group_size", [-32, 0, 1, 8, 24, 31, 48, 256])
def test_only_some_numbers_of_tokens_share_a_scale(group_size: int) -> None:
    with pytest.raises(PrecisionError, match=rf"group_size of \(16, 32, 64, 128\) tokens, but it is {group_size}"):
        row_bytes(8, 128, 4, group_size, granularity="per_channel")
    assert row_bytes(8, 128, 4, 32, granularity="per_channel") != row_bytes(8, 64, 4, 32)


@pytest.mark.parametrize(("head_dim", "bits", "says"), [(36, 2, "head_dim 36 cannot"), (64, 5, "packed bits")])
def test_rows_per_channel_are_packed_like_others(head_dim: int, bits: int, says: str) -> None:
    with pytest.raises(PrecisionError, match=says):
        check_token_group(head_dim, bits, 32)


def test_row_bytes_refuse_what_cannot_be_packed() -> None:
    with pytest.raises(PrecisionError, match="num_heads must be positive, but is 0"):
        row_bytes(0, 128, 4)
    with pytest.raises(PrecisionError, match="group_size 16"):
        row_bytes(8, 64, 8, 16)
    with pytest.raises(PrecisionError, match="packed bits"):
        row_bytes(8, 128, 5)


@settings(deadline=None)
@given(st.integers(1, 33), st.integers(1, 20).map(lambda n: 16 * n), st.sampled_from(PACKED_BITS), st.booleans())
def test_packed_rows_are_aligned_and_padded_by_less_than_the_alignment(
    num_heads: int, head_dim: int, bits: int, two_groups: bool
) -> None:
    group_size = head_dim // 2 if two_groups else head_dim
    needed = Fraction(num_heads * head_dim * bits, 8) + 4 * num_heads * (head_dim // group_size)
    size = row_bytes(num_heads, head_dim, bits, group_size)
    assert size % 16 == 0
    assert 0 <= size - needed < 16


@settings(deadline=None)
@given(st.integers(1, 33), st.integers(1, 20).map(lambda n: 16 * n))
def test_more_bits_never_take_fewer_bytes(num_heads: int, head_dim: int) -> None:
    sizes = [row_bytes(num_heads, head_dim, bits) for bits in ALL_BITS]
    assert sizes == sorted(sizes)


def test_bytes_per_token_add_up_over_layers_sides_and_group_sizes() -> None:
    shape = RowShape(2, 80, 96, ScaleLayout(40), ScaleLayout(48))
    pairs = [PrecisionPair(8, 4), PrecisionPair(2, 16), PrecisionPair(16, 8)]
    by_hand = [(160 + 16) + (96 + 16), (40 + 16 + 8) + 2 * 96 * 2, 2 * 80 * 2 + (192 + 16)]
    assert [shape.pair_bytes(pair) for pair in pairs] == by_hand
    assert bytes_per_token(pairs, shape) == sum(by_hand)
    assert bytes_per_token([], shape) == 0


@pytest.mark.parametrize(
    ("texts", "mean", "effective"),
    [
        (["K8V4"], Fraction(6), Fraction(25, 4)),
        (["K4V4"], Fraction(4), Fraction(17, 4)),
        (["K2V2", "bf16"], Fraction(9), Fraction(73, 8)),
        (["K4V2", "K2V2", "K2V2"], Fraction(7, 3), Fraction(31, 12)),
    ],
)
def test_mean_and_effective_bits_are_exact(texts: list[str], mean: Fraction, effective: Fraction) -> None:
    pairs = [PrecisionPair.parse(text) for text in texts]
    assert mean_bits(pairs, LLAMA_8B) == mean
    assert effective_bits(pairs, LLAMA_8B) == effective


def test_mean_bits_weigh_keys_and_values_by_their_channels() -> None:
    shape = RowShape(num_kv_heads=1, head_dim=192, v_head_dim=128)
    assert mean_bits([PrecisionPair(4, 8)], shape) == Fraction(4 * 192 + 8 * 128, 320)
    assert effective_bits([PrecisionPair(4, 8)], shape) == Fraction(8 * (112 + 144), 320)


def test_bits_of_a_latent_count_the_rotary_channels_beside_it_at_16() -> None:
    shape = RowShape(num_kv_heads=1, head_dim=512, v_head_dim=0, rope_dim=64)
    assert mean_bits([PrecisionPair(4, 4)], shape) == Fraction(4 * 512 + 16 * 64, 576)
    assert effective_bits([PrecisionPair(4, 4)], shape) == Fraction(8 * (256 + 16 + 2 * 64), 576)


def test_more_bits_on_one_side_raise_both_means() -> None:
    for other, (low, high) in itertools.product(ALL_BITS, itertools.pairwise(ALL_BITS)):
        for measure in (mean_bits, effective_bits):
            assert measure([PrecisionPair(low, other)], LLAMA_8B) < measure([PrecisionPair(high, other)], LLAMA_8B)
            assert measure([PrecisionPair(other, low)], LLAMA_8B) < measure([PrecisionPair(other, high)], LLAMA_8B)


def test_padding_and_scales_only_ever_add_to_the_payload() -> None:
    for k_bits, v_bits in itertools.product(PACKED_BITS, PACKED_BITS):
        pairs = [PrecisionPair(k_bits, v_bits)]
        assert effective_bits(pairs, LLAMA_8B) > mean_bits(pairs, LLAMA_8B)
    native = [PrecisionPair(16, 16)]
    assert effective_bits(native, LLAMA_8B) == mean_bits(native, LLAMA_8B) == 16


def test_copies_take_native_bytes_and_positions_and_few_bits_of_a_long_context() -> None:
    window = ExactWindow(residual_length=32, sinks=4)
    assert copy_bytes(PrecisionPair(16, 4), 1000) == 1004 and copy_bytes(PrecisionPair(16, 16), 1000) == 4
    assert ExactWindow(32).bits_at(4096) == Fraction(1, 8)
    assert window.bits_at(16) == 16  # no more copies than tokens
    assert ExactWindow().bits_at(1) == 0


@pytest.mark.parametrize("counts", [(-1, 0), (1025, 0), (0, -1), (0, 65)])
def test_window_beyond_its_bounds_is_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(PrecisionError, match="must be within 0 and"):
        ExactWindow(*counts)
