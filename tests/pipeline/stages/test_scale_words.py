"""The scale words that options decide: short ones of a side with groups of its own only where rows get shorter."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import pytest

from kvtuner.geometry import ModelGeometry
from kvtuner.pipeline.options import MeasurementOptions
from kvtuner.pipeline.stages.scale_words import given_layouts
from kvtuner.precision import PACKED_BITS, SEARCHED_BITS, ScaleLayout, row_bytes

if TYPE_CHECKING:
    from fixture_types import LoadTiny

    from kvtuner.calibration.model_loading import ModelShape


@pytest.fixture
def shape_of(load_tiny: LoadTiny) -> ModelShape:
    return load_tiny("llama-gqa").shape


def shape_with(shape: ModelShape, heads: int, head_dim: int) -> ModelShape:
    return replace(shape, geometry=ModelGeometry(2, heads, heads, head_dim, head_dim))


@pytest.mark.parametrize(("word_bits", "expected"), [("32", 32), ("16", 16)])
def test_words_that_are_asked_for_are_taken(shape_of: ModelShape, word_bits: str, expected: int) -> None:
    options = MeasurementOptions(word_bits=word_bits, k_group_size=8)  # type: ignore[arg-type]  # one of WORD_CHOICES
    layouts = given_layouts(options, shape_of, PACKED_BITS)
    assert layouts == (ScaleLayout(8, expected), ScaleLayout(None, expected))  # type: ignore[arg-type]  # 16 or 32


def test_auto_leaves_whole_heads_to_a_measurement(shape_of: ModelShape) -> None:
    assert given_layouts(MeasurementOptions(), shape_of, PACKED_BITS) == (ScaleLayout(), ScaleLayout())


@pytest.mark.parametrize(
    ("heads", "head_dim", "group"), [(2, 96, 48), (4, 48, 48), (1, 64, 32), (8, 128, 64), (2, 64, 64)]
)
@pytest.mark.parametrize("widths", [PACKED_BITS, SEARCHED_BITS], ids=str)
def test_auto_takes_short_words_of_given_groups_where_rows_of_a_measured_width_get_shorter(
    shape_of: ModelShape, heads: int, head_dim: int, group: int, widths: tuple[int, ...]
) -> None:
    shape = shape_with(shape_of, heads, head_dim)
    saves = any(
        row_bytes(heads, head_dim, bits, group, word_bits=16) < row_bytes(heads, head_dim, bits, group)
        for bits in widths
    )
    for k_group, v_group in product((None, group), repeat=2):
        options = MeasurementOptions(k_group_size=k_group, v_group_size=v_group)
        words = [16 if given is not None and saves else 32 for given in (k_group, v_group)]
        assert [layout.word_bits for layout in given_layouts(options, shape, widths)] == words


def test_rows_of_two_heads_of_96_channels_get_shorter_at_three_bits_alone(shape_of: ModelShape) -> None:
    shape, options = shape_with(shape_of, 2, 96), MeasurementOptions(k_group_size=48)
    assert given_layouts(options, shape, PACKED_BITS)[0].word_bits == 16
    assert given_layouts(options, shape, SEARCHED_BITS)[0].word_bits == 32
