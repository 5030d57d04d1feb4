"""The scale words that the options of a search ask for, and the scale layouts that they leave to a measurement."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtuner.calibration.scale_layouts import equal_layouts
from kvtuner.precision import SEARCHED_BITS, SHORT_WORD_BITS, SIDES, WIDE_WORD_BITS, ScaleLayout, Side, WordBits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.calibration.quantization_options import QuantizationOptions
    from kvtuner.calibration.scale_layouts import LayoutComparison
    from kvtuner.pipeline.options import MeasurementOptions


def resolve_word_bits(options: MeasurementOptions, shape: ModelShape) -> tuple[WordBits, WordBits]:
    """The bits of a scale word of keys and of values, as far as options decide them; 32 of a side to be measured.

    By ``auto`` a side with a group size of its own has 16 where that makes its rows shorter. In equal groups they raise
    KL by 1 to 6 %, and half of what they save, in finer groups or wider codes, lowers it by more.
    """
    if options.word_bits != "auto":
        asked: WordBits = SHORT_WORD_BITS if options.word_bits == "16" else WIDE_WORD_BITS
        return asked, asked
    wide = shape.geometry.row_shape(ScaleLayout(options.k_group_size), ScaleLayout(options.v_group_size))
    short = replace(wide, k_word_bits=SHORT_WORD_BITS, v_word_bits=SHORT_WORD_BITS)
    saves_keys = any(short.k_bytes(bits) < wide.k_bytes(bits) for bits in SEARCHED_BITS)
    saves_values = any(short.v_bytes(bits) < wide.v_bytes(bits) for bits in SEARCHED_BITS)
    return (
        SHORT_WORD_BITS if options.k_group_size is not None and saves_keys else WIDE_WORD_BITS,
        SHORT_WORD_BITS if options.v_group_size is not None and saves_values else WIDE_WORD_BITS,
    )


def competing_layouts(options: MeasurementOptions, shape: ModelShape) -> dict[Side, tuple[ScaleLayout, ScaleLayout]]:
    """The layouts that ``auto`` compares by a measurement, by side; a side with a group size of its own has none."""
    if options.word_bits != "auto":
        return {}
    heads = (shape.geometry.head_dim, shape.geometry.v_head_dim)
    groups = (options.k_group_size, options.v_group_size)
    sides = zip(SIDES, heads, groups, strict=True)
    layouts = {side: equal_layouts(head_dim) for side, head_dim, group in sides if group is None}
    return {side: pair for side, pair in layouts.items() if pair is not None}


def layouts_text(quant: QuantizationOptions, shape: ModelShape, comparisons: Sequence[LayoutComparison]) -> str:
    """The scale layouts of a search in one line, with the KL of short words where they were compared."""
    ratios = {c.side: f" ({c.ratio:.2f} of the KL of {c.wide})" for c in comparisons if c.chosen == c.short}
    heads = (shape.geometry.head_dim, shape.geometry.v_head_dim)
    parts = []
    for side, noun, head_dim in zip(SIDES, ("keys", "values"), heads, strict=True):
        parts.append(f"{noun} {quant.layout(side).of_head(head_dim)}{ratios.get(side, '')}")
    return ", ".join(parts)
