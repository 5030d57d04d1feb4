"""The settings that all candidates of a search share. Knows nothing of how candidates are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtuner.precision import (
    NATIVE_BITS,
    NO_WINDOW,
    PACKED_BITS,
    SEARCHED_BITS,
    WHOLE_HEADS,
    ExactWindow,
    Fit,
    ScaleLayout,
    Side,
)
from kvtuner.quant import Quantized, QuantSpec, Transform, quantize_widths
from kvtuner.transforms import candidate_transforms

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.transforms import TransformChoice


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """The settings of all candidates: scale layouts, grids, window, 3 bits or not, and the choice of transforms."""

    k_layout: ScaleLayout = WHOLE_HEADS
    v_layout: ScaleLayout = WHOLE_HEADS
    symmetric: bool = False
    fit: Fit = "minmax"
    window: ExactWindow = NO_WINDOW
    three_bits: bool = False
    transforms: TransformChoice = "all"

    @property
    def widths(self) -> tuple[int, ...]:
        """The packed widths of all candidates, ascending."""
        return PACKED_BITS if self.three_bits else SEARCHED_BITS

    def transform_names(self, side: Side) -> tuple[str, ...]:
        """The names of the transforms of one side's candidates."""
        return candidate_transforms(side, self.transforms)

    def layout(self, side: Side) -> ScaleLayout:
        """The scale layout of one side."""
        return self.k_layout if side == "k" else self.v_layout

    def spec(self, side: Side, bits: int, transform: Transform) -> QuantSpec | None:
        """The storage of one side of a layer at `bits`; None at 16, where it is not quantized."""
        if bits == NATIVE_BITS:
            return None
        layout = self.layout(side)
        return QuantSpec(bits, transform, layout.group_size, self.symmetric, self.fit, word_bits=layout.word_bits)

    def quantize(self, side: Side, stored: Tensor) -> list[Quantized]:
        """One side of a layer, in stored space, at each of `widths`."""
        group_size, word_bits = self.layout(side).group_size, self.layout(side).word_bits
        return quantize_widths(
            stored, self.widths, group_size, symmetric=self.symmetric, fit=self.fit, word_bits=word_bits
        )
