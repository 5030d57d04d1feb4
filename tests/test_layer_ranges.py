"""Text to layers and back."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtuner.errors import PrecisionError
from kvtuner.layer_ranges import LayerRange, precisions_by_layer, read_layers, read_ranges, write_ranges

WORDS = st.text(alphabet="abKV48:-", min_size=1, max_size=6)


def test_ranges_keep_their_order_and_words() -> None:
    assert read_ranges(" 2 - 3 : k4 v2 ,0:a:b") == [LayerRange(2, 3, "k4 v2"), LayerRange(0, 0, "a:b")]
    assert precisions_by_layer(read_ranges("1-2:x,0:y")) == {1: "x", 2: "x", 0: "y"}
    assert read_layers("4-7", "bf16") == LayerRange(4, 7, "bf16")


def test_neighbours_with_the_same_word_are_one_range() -> None:
    assert write_ranges(["a", "a", "b", "a"]) == "0-1:a,2:b,3:a"
    assert write_ranges([]) == ""


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(WORDS, min_size=1, max_size=40))
def test_what_is_written_is_read_back(words: list[str]) -> None:
    assert precisions_by_layer(read_ranges(write_ranges(words))) == dict(enumerate(words))


@settings(deadline=None, derandomize=True, database=None)
@given(st.text(alphabet="0123456789-:, ab\u0660\u00b2\n", max_size=24))
def test_no_text_ends_in_anything_but_ranges_or_a_precision_error(text: str) -> None:
    try:
        ranges = read_ranges(text)
    except PrecisionError as error:
        assert "\n" not in str(error)
        return
    assert all(0 <= first <= last <= 9999 and word.strip() == word != "" for first, last, word in ranges)


@pytest.mark.parametrize("text", ["0-9999:a," * 7000 + "0:a", "0" * 65000 + ":a", "," * 65000])
def test_hostile_text_is_refused_in_no_time(text: str) -> None:
    start = time.perf_counter()
    with pytest.raises(PrecisionError):
        precisions_by_layer(read_ranges(text))
    assert time.perf_counter() - start < 2


def test_a_text_that_nobody_types_is_refused() -> None:
    with pytest.raises(PrecisionError, match="at most 65536 characters, not 65540"):
        read_ranges("0:" + "a" * 65538)
