"""The settings that all candidates of a search share. Knows nothing of how candidates are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtuner.precision import (
    NATIVE_BITS,
    NO_WINDOW,
    PACKED_BITS,
    SEARCHED_BITS,
    WIDE_WORD_BITS,
    ExactWindow,
    Fit,
    Side,
    WordBits,
)
from kvtuner.quant import Quantized, QuantSpec, Transform, quantize_widths

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """The settings of all candidates: channels per scale, a head's by default; grids, words, window, 3 bits or not."""

    k_group_size: int | None = None
    v_group_size: int | None = None
    symmetric: bool = False
    fit: Fit = "minmax"
    window: ExactWindow = NO_WINDOW
    three_bits: bool = False
    k_word_bits: WordBits = WIDE_WORD_BITS
    v_word_bits: WordBits = WIDE_WORD_BITS

    @property
    def widths(self) -> tuple[int, ...]:
        """The packed widths of all candidates, ascending."""
        return PACKED_BITS if self.three_bits else SEARCHED_BITS

    def group_size(self, side: Side) -> int | None:
        """Channels per scale of one side."""
        return self.k_group_size if side == "k" else self.v_group_size

    def word_bits(self, side: Side) -> WordBits:
        """Bits of a scale word of one side."""
        return self.k_word_bits if side == "k" else self.v_word_bits

    def spec(self, side: Side, bits: int, transform: Transform) -> QuantSpec | None:
        """The storage of one side of a layer at `bits`; None at 16, where it is not quantized."""
        if bits == NATIVE_BITS:
            return None
        return QuantSpec(
            bits, transform, self.group_size(side), self.symmetric, self.fit, word_bits=self.word_bits(side)
        )

    def quantize(self, side: Side, stored: Tensor) -> list[Quantized]:
        """One side of a layer, in stored space, at each of `widths`."""
        return quantize_widths(
            stored,
            self.widths,
            self.group_size(side),
            symmetric=self.symmetric,
            fit=self.fit,
            word_bits=self.word_bits(side),
        )
