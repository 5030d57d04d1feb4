"""The measurement that comparisons of grids, widths, words and windows start from."""

from __future__ import annotations

from typing import Final

from kvtuner.pipeline.options import MeasurementOptions

PLAIN: Final = MeasurementOptions(fit="minmax", three_bits=False, word_bits="32", residual_length=0)
"""Min-max grids of 2, 4 and 8 bits with words of 32 bits for a whole head, and no exact window."""
