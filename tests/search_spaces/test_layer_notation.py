"""The hand-written syntax, checked against what it says in words."""

from __future__ import annotations

import pytest

from kvtuner.errors import KVTunerError, SearchSpaceError
from kvtuner.layer_ranges import write_ranges
from kvtuner.precision import PrecisionPair
from kvtuner.search_spaces.layer_notation import parse_keep, parse_ranges

K4V2, NATIVE = PrecisionPair(4, 2), PrecisionPair(16, 16)


def test_ranges_give_every_layer_its_pair() -> None:
    assert parse_ranges("0-1:bf16,2-4:K4V2", range(5)) == [NATIVE, NATIVE, K4V2, K4V2, K4V2]


def test_ranges_may_come_in_any_order_and_with_spaces() -> None:
    assert parse_ranges(" 2 - 3 : k4v2 , 0:16, 1:8 ", range(4)) == [NATIVE, PrecisionPair(8, 8), K4V2, K4V2]


def test_keep_names_some_layers() -> None:
    assert parse_keep("27:16,0:K8V8") == {27: NATIVE, 0: PrecisionPair(8, 8)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0-1:8,3:8", "layer 2"),
        ("0-2:8,2-3:4", "layer 2"),
        ("0-4:8", "layer 4"),
        ("0-3:8,9:8", "layer 9"),
        ("3-0:8", "3-0:8"),
        ("0-3:K5V4", "k_bits"),
        ("0-3:K4", "K4"),
        ("0-3", "0-3"),
        ("", "''"),
        ("0-3:8,", "''"),
        ("-1-3:8", "-1-3:8"),
        ("0-99999999999:8", "99999999999"),
        ("\u0660-\u0663:8", "\u0660"),
        ("0-3:8:8", "8:8"),
    ],
)
def test_bad_ranges_are_refused_in_one_line_that_names_the_fault(text: str, says: str) -> None:
    with pytest.raises(SearchSpaceError) as caught:
        parse_ranges(text, range(4))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_of_a_model_with_others_are_given_by_their_ids() -> None:
    ids = (3, 4, 7)
    pairs = parse_ranges("3-4:K8V4,7:K4V2", ids)
    assert write_ranges(pairs, ids=ids) == "3-4:K8V4,7:K4V2"
    assert write_ranges([K4V2] * 3, ids=ids) == "3-4:K4V2,7:K4V2"
    with pytest.raises(
        SearchSpaceError, match=r"the model has layers 3-4, 7 that are tuned.*so layer 5 cannot be given"
    ):
        parse_ranges("3-7:8", ids)
    with pytest.raises(SearchSpaceError, match="has none for layer 7"):
        parse_ranges("3-4:8", ids)


def test_keep_refuses_a_layer_named_twice() -> None:
    with pytest.raises(SearchSpaceError, match="layer 0 is twice"):
        parse_keep("0:8,0-3:4")


def test_a_refusal_is_an_error_that_the_command_line_prints() -> None:
    assert issubclass(SearchSpaceError, KVTunerError)


@pytest.mark.parametrize(("text", "shortest", "num_layers"), [
    ("0:K8V4", "0:K8V4", 1),
    ("0:K8V4,1:K4V2,2:K4V2,3-5:K4V2", "0:K8V4,1-5:K4V2", 6),
    ("3:bf16, 0-2:8", "0-2:K8V8,3:K16V16", 4),
])  # fmt: skip
def test_a_configuration_is_written_with_equal_neighbours_as_one_range(
    text: str, shortest: str, num_layers: int
) -> None:
    pairs = parse_ranges(text, range(num_layers))
    assert write_ranges(pairs) == shortest
    assert parse_ranges(shortest, range(num_layers)) == pairs


def test_a_long_text_of_equal_neighbours_becomes_short() -> None:
    text = ",".join(f"{layer}:K4V2" for layer in range(100))
    assert len(text) > 256
    assert write_ranges(parse_ranges(text, range(100))) == "0-99:K4V2"
    assert write_ranges([K4V2]) == "0:K4V2"
