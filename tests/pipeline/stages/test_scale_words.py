"""Options decide the scale words of a side, or leave two layouts of equal bytes to a measurement."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtuner.geometry import ModelGeometry
from kvtuner.pipeline.options import CalibrateOptions, MeasurementOptions, SearchOptions
from kvtuner.pipeline.stages.scale_words import competing_layouts, resolve_word_bits

AUTO = MeasurementOptions(word_bits="auto")


def shape_of(num_kv_heads: int, head_dim: int, v_head_dim: int | None = None) -> Any:
    geometry = ModelGeometry(6, 4 * num_kv_heads, num_kv_heads, head_dim, v_head_dim or head_dim)
    return SimpleNamespace(geometry=geometry)


def sides(*budgets: str, shape: Any, **options: Any) -> str:
    return "".join(competing_layouts(SearchOptions(budget=budgets, measurement=AUTO, **options), shape))


def test_sides_without_a_group_size_compete_by_auto_alone() -> None:
    shape = shape_of(8, 128)
    assert list(competing_layouts(CalibrateOptions(measurement=AUTO), shape)) == ["k", "v"]
    for words in ("32", "16"):
        asked = MeasurementOptions(word_bits=words)  # type: ignore[arg-type]  # two of the choices
        assert competing_layouts(CalibrateOptions(measurement=asked), shape) == {}
        assert resolve_word_bits(asked, shape) == (int(words), int(words))
    grouped = MeasurementOptions(word_bits="auto", k_group_size=64)
    assert list(competing_layouts(CalibrateOptions(measurement=grouped), shape)) == ["v"]
    assert resolve_word_bits(grouped, shape) == (16, 32)


@pytest.mark.parametrize(
    ("shape", "expected"), [(shape_of(8, 96), ""), (shape_of(8, 96, 64), "v"), (shape_of(8, 128, 80), "k")]
)
def test_heads_that_are_no_power_of_two_do_not_compete(shape: Any, expected: str) -> None:
    assert sides("3bit", shape=shape) == expected


def test_budgets_that_buy_many_rows_of_8_bits_keep_wide_words_where_short_ones_make_these_longer() -> None:
    longer, padded = shape_of(8, 128), shape_of(2, 64)
    # K4V4 has 4.25 stored bits and K8V4 6.25, half of the layers each 5.25.
    found = {budget: sides(budget, shape=longer) for budget in ("3bit", "4bit", "4.9bit", "5bit", "5.2bpe", "5.25bpe")}
    assert found == {"3bit": "kv", "4bit": "kv", "4.9bit": "kv", "5bit": "", "5.2bpe": "kv", "5.25bpe": ""}
    assert sides("6bit", "3bit", shape=longer) == "kv"
    assert sides("8bit", shape=padded) == "kv"  # two words take as much as the padding of one
    # On a rank of one head, rows of 8 bits have 128 + 4 or 128 + 8 bytes: 144 both.
    assert sides("8bit", shape=longer, tp_size=8) == "kv"
