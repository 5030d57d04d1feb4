"""The scale words that the options of a search ask for, and the scale layouts that they leave to a measurement."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtuner.calibration.auto_settings.scale_layouts import equal_layouts
from kvtuner.precision import SHORT_WORD_BITS, WIDE_WORD_BITS, ScaleLayout, Side, WordBits

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvtuner.calibration.auto_settings.scale_layouts import LayoutComparison
    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.calibration.quantization_options import QuantizationOptions
    from kvtuner.pipeline.options import MeasurementOptions


def given_layouts(
    options: MeasurementOptions, shape: ModelShape, widths: Collection[int]
) -> tuple[ScaleLayout, ScaleLayout]:
    """The scale layouts of keys and of values, as far as options decide them; words of 32 bits where they do not.

    By ``auto`` a side with a group size of its own has words of 16 bits where they make its rows shorter at one of the
    widths. In equal groups they raise KL by 1 to 6 %; half of the saved bytes, spent on finer groups or wider codes,
    lower it by more.
    """
    word_bits: WordBits = SHORT_WORD_BITS if options.word_bits == "16" else WIDE_WORD_BITS
    k_layout, v_layout = ScaleLayout(options.k_group_size, word_bits), ScaleLayout(options.v_group_size, word_bits)
    if options.word_bits != "auto":
        return k_layout, v_layout
    short = [replace(layout, word_bits=SHORT_WORD_BITS) for layout in (k_layout, v_layout)]
    wide_rows, short_rows = shape.geometry.row_shape(k_layout, v_layout), shape.geometry.row_shape(*short)
    if options.k_group_size is not None and any(short_rows.k_bytes(n) < wide_rows.k_bytes(n) for n in widths):
        k_layout = short[0]
    if options.v_group_size is not None and any(short_rows.v_bytes(n) < wide_rows.v_bytes(n) for n in widths):
        v_layout = short[1]
    return k_layout, v_layout


def competing_layouts(options: MeasurementOptions, shape: ModelShape) -> dict[Side, tuple[ScaleLayout, ScaleLayout]]:
    """The layouts that ``auto`` compares by a measurement, by side; a side with a group size of its own has none."""
    if options.word_bits != "auto":
        return {}
    groups = {"k": options.k_group_size, "v": options.v_group_size}
    channels = shape.geometry.channels
    layouts = {side: equal_layouts(head_dim) for side, head_dim in channels.items() if groups[side] is None}
    return {side: pair for side, pair in layouts.items() if pair is not None}


def layouts_text(quant: QuantizationOptions, shape: ModelShape, comparisons: Sequence[LayoutComparison]) -> str:
    """The scale layouts of a search in one line, with the KL of short words where they were compared."""
    ratios = {c.side: f" ({c.ratio:.2f} of the KL of {c.wide})" for c in comparisons if c.chosen == c.short}
    nouns = {"k": "latents"} if shape.geometry.is_latent else {"k": "keys", "v": "values"}
    parts = []
    for side, head_dim in shape.geometry.channels.items():
        parts.append(f"{nouns[side]} {quant.layout(side).of_head(head_dim)}{ratios.get(side, '')}")
    return ", ".join(parts)
