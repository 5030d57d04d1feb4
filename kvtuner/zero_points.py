"""Scale words of 16 bits: a shortened scale and a zero point. Knows nothing of codes, fits or rows.

A scale is a positive fp16 without its sign and its lowest 4 bits. A zero point is the place of zero among the codes,
in units of 2**bits / 32: the minimum of a group is -zero_point * scale, an exact product. So zero always lies within a
grid, which a range on one side of it is widened to. NaN as a scale marks a group that held NaN or infinity.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

ZERO_POINT_BITS: Final = 5
LAST_ZERO_POINT: Final = 2**ZERO_POINT_BITS - 1
SYMMETRIC_ZERO_POINT: Final = 2 ** (ZERO_POINT_BITS - 1)
"""The zero point of symmetric grids, where zero has the code 2**(bits-1)."""
DROPPED_BITS: Final = 4
"""The lowest bits of an fp16 scale, which are not stored."""
LARGEST_SCALE: Final = 65024.0
"""The largest finite scale of a word."""
NOT_FINITE: Final = 0x7FF << ZERO_POINT_BITS
"""The word of a group that held NaN or infinity."""


def zero_point_unit(bits: int) -> float:
    """The step of zero points, in codes: a power of two, at most half at 4 bits."""
    return 2.0 ** (bits - ZERO_POINT_BITS)


def nearest_scale(scale: Tensor) -> Tensor:
    """The nearest scale of a word, fp16, of float32 from 0 to `LARGEST_SCALE`; halves go up."""
    half = scale.to(torch.float16).view(torch.int16)
    return _dropped(half + (1 << (DROPPED_BITS - 1)))


def scale_above(scale: Tensor) -> Tensor:
    """The smallest scale of a word, fp16, that is not below fp16 numbers from 0 to `LARGEST_SCALE`."""
    return _dropped(scale.view(torch.int16) + ((1 << DROPPED_BITS) - 1))


def _dropped(half: Tensor) -> Tensor:
    return (half >> DROPPED_BITS << DROPPED_BITS).view(torch.float16)


def minimum_of(scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """The minimum, float32, of fp16 scales and zero points 0 to `LAST_ZERO_POINT`; an exact product."""
    return zero_point.to(torch.float32) * -zero_point_unit(bits) * scale.to(torch.float32)


def to_words(scale: Tensor, minimum: Tensor, bits: int) -> Tensor:
    """The words, int16, of scales and minimums as `from_words` gives them."""
    exact = scale.to(torch.float32)
    usable = (exact > 0) & exact.isfinite()
    places = -minimum / torch.where(usable, exact, 1.0) / zero_point_unit(bits)
    zero_point = torch.where(usable, places, 0.0).round().to(torch.int32)
    word = scale.view(torch.int16).to(torch.int32) >> DROPPED_BITS << ZERO_POINT_BITS | zero_point
    return torch.where(exact.isnan(), NOT_FINITE, word).to(torch.int16)


def from_words(words: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The scales, fp16, and the minimums, float32, of int16 words."""
    unsigned = words.to(torch.int32) & 0xFFFF
    scale = (unsigned >> ZERO_POINT_BITS << DROPPED_BITS).to(torch.int16).view(torch.float16)
    return scale, minimum_of(scale, unsigned & LAST_ZERO_POINT, bits)
