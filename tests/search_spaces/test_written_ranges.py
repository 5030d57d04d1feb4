from __future__ import annotations

import pytest

from kvtuner.layer_ranges import write_ranges
from kvtuner.precision import PrecisionPair
from kvtuner.search_spaces.written_layers import parse_ranges


@pytest.mark.parametrize(("text", "shortest", "num_layers"), [
    ("0:K8V4", "0:K8V4", 1),
    ("0:K8V4,1:K4V2,2:K4V2,3-5:K4V2", "0:K8V4,1-5:K4V2", 6),
    ("3:bf16, 0-2:8", "0-2:K8V8,3:K16V16", 4),
])  # fmt: skip
def test_a_configuration_is_written_with_equal_neighbours_as_one_range(
    text: str, shortest: str, num_layers: int
) -> None:
    pairs = parse_ranges(text, num_layers)
    assert write_ranges(pairs) == shortest
    assert parse_ranges(shortest, num_layers) == pairs


def test_a_long_text_of_equal_neighbours_becomes_short() -> None:
    text = ",".join(f"{layer}:K4V2" for layer in range(100))
    assert len(text) > 256
    assert write_ranges(parse_ranges(text, 100)) == "0-99:K4V2"
    assert write_ranges([PrecisionPair(4, 2)]) == "0:K4V2"
