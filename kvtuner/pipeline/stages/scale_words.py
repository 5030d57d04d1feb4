"""The scale words that the options of a search ask for, and the scale layouts that they leave to a measurement."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtuner.calibration.scale_layouts import equal_layouts
from kvtuner.pipeline.options import SearchOptions
from kvtuner.precision import (
    SEARCHED_BITS,
    SHORT_WORD_BITS,
    SIDES,
    WIDE_WORD_BITS,
    WIDEST_PACKED_BITS,
    PrecisionPair,
    ScaleLayout,
    Side,
    WordBits,
    row_bytes,
)
from kvtuner.search_spaces.budget import Budget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.calibration.quantization_options import QuantizationOptions
    from kvtuner.calibration.scale_layouts import LayoutComparison
    from kvtuner.geometry import ModelGeometry
    from kvtuner.pipeline.options import CalibrateOptions, MeasurementOptions


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


def competing_layouts(options: CalibrateOptions, shape: ModelShape) -> dict[Side, tuple[ScaleLayout, ScaleLayout]]:
    """The layouts that ``auto`` compares by a measurement, by side.

    A side with a group size of its own has none, nor one whose rows of 8 bits short words make longer where every
    budget buys many of those: what finer groups gain below 8 bits is then less than what the longer rows cost.
    """
    measurement, geometry = options.measurement, shape.geometry
    if measurement.word_bits != "auto":
        return {}
    buys_8_bits = isinstance(options, SearchOptions) and _buys_8_bits(options, geometry)
    tp_size = options.tp_size if isinstance(options, SearchOptions) else 1
    num_heads = geometry.row_shape(tp_size=tp_size).num_kv_heads
    layouts: dict[Side, tuple[ScaleLayout, ScaleLayout]] = {}
    heads = (geometry.head_dim, geometry.v_head_dim)
    groups = (measurement.k_group_size, measurement.v_group_size)
    for side, head_dim, group_size in zip(SIDES, heads, groups, strict=True):
        pair = equal_layouts(head_dim) if group_size is None else None
        if pair is None:
            continue
        wide, short = (row_bytes(num_heads, head_dim, WIDEST_PACKED_BITS, layout.group_size) for layout in pair)
        if short == wide or not buys_8_bits:
            layouts[side] = pair
    return layouts


def _buys_8_bits(options: SearchOptions, geometry: ModelGeometry) -> bool:
    """Whether every budget holds K8V4 in half of the layers and K4V4 in the others, with wide words."""
    pairs = [PrecisionPair(4 if layer % 2 else 8, 4) for layer in range(geometry.num_layers)]
    constraints = [
        Budget.parse(text).constraint(geometry, tp_size=options.tp_size, pp_size=options.pp_size)
        for text in options.budget
    ]
    return bool(constraints) and all(constraint.is_met(pairs) for constraint in constraints)


def layouts_text(quant: QuantizationOptions, shape: ModelShape, comparisons: Sequence[LayoutComparison]) -> str:
    """The scale layouts of a search in one line, with the KL of short words where they were compared."""
    ratios = {c.side: f" ({c.ratio:.2f} of the KL of {c.wide})" for c in comparisons if c.chosen == c.short}
    heads = (shape.geometry.head_dim, shape.geometry.v_head_dim)
    parts = []
    for side, noun, head_dim in zip(SIDES, ("keys", "values"), heads, strict=True):
        parts.append(f"{noun} {quant.layout(side).of_head(head_dim)}{ratios.get(side, '')}")
    return ", ".join(parts)
