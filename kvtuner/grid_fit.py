"""The fits of a grid to a group of channels: least squares, the same on every host, and min-max, at the end.

Knows nothing of rows or models.

A group becomes integers of its own range, of 8 bits, and a grid a multiplier and an offset with 14 bits behind the
point: codes come of integers alone. A pass finds the codes and sums them, their squares, and their products with the
group's integers. Every sum is below 2**24, where float32 is as exact as an integer: no order of summing and no fused
operation can change one. What follows from the sums is a few IEEE operations on one number of a group.

This is Lloyd's iteration (codes, then the best line through them) from one start and of three passes. The best of ten
starts with twelve passes each has a squared error that is 3 to 6 % lower on Gaussian, Laplace and Student groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from kvtuner.precision import FP16_MAX, SHORT_WORD_BITS, WIDE_WORD_BITS, WordBits, check_fitted_group
from kvtuner.zero_points import (
    LARGEST_SCALE,
    LAST_ZERO_POINT,
    SYMMETRIC_ZERO_POINT,
    minimum_of,
    nearest_scale,
    scale_above,
    zero_point_unit,
)

if TYPE_CHECKING:
    from collections.abc import Callable

START_SHARE: Final = {2: 0.7, 3: 0.875, 4: 0.9375}
"""The share of the group's range that the first grid covers, by bits."""
NUM_REFITS: Final = 2
UNITS: Final = 255
"""The range of a group in its own integers."""
SYMMETRIC_UNITS: Final = 127
"""The same on either side of zero, where the grid is symmetric."""
FRACTION: Final = 1 << 14
"""The unit of the multiplier and the offset that give codes; a multiplier is at most 1."""
MAX_GAIN: Final = 1.6
"""The most by which the last rescale widens the grid of least squares."""
MAX_OFFSET: Final = 256.0
"""The most steps between zero and the minimum: up to there fp16 errs by at most an eighth of a step."""
MIN_SCALE: Final = 2.0**-14
"""The smallest scale that is fitted: the smallest normal fp16, below which a scale has few digits."""


class FittedGrid(NamedTuple):
    """Grids [..., num_groups] with their codes [..., num_groups, group_size].

    Attributes:
        codes: The codes, float32 integers.
        scale: The scale, fp16.
        minimum: The minimum, fp16, or float32 of words of 16 bits.
        usable: Whether the fit holds; where it does not, the group keeps its min-max grid.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    usable: Tensor

    def completed(self, minmax: Callable[[], tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scale and minimum of every group, those of `minmax()` where the fit does not hold."""
        # On a processor it costs nothing to see that all hold, which is the rule; a GPU would have to wait for it.
        if self.usable.device.type == "cpu" and bool(self.usable.all()):
            return self.codes, self.scale, self.minimum
        codes, scale, minimum = minmax()
        return (
            torch.where(self.usable.unsqueeze(-1), self.codes, codes),
            torch.where(self.usable, self.scale, scale),
            torch.where(self.usable, self.minimum, minimum),
        )


def first_grid(bits: int, *, symmetric: bool) -> tuple[int, int]:
    """The multiplier and the offset of the first pass, which lies in the middle of the range."""
    top, share = 2**bits - 1, START_SHARE[bits]
    multiplier = FRACTION * top / ((2 * SYMMETRIC_UNITS if symmetric else UNITS) * share)
    if symmetric:
        return round(multiplier), zero_offset(bits)
    return round(multiplier), round(FRACTION / 2 - FRACTION * top * (1 - share) / (2 * share))


def zero_offset(bits: int) -> int:
    """The offset of every symmetric grid: zero has the code 2**(bits-1)."""
    return FRACTION // 2 + (FRACTION << (bits - 1))


class GroupIntegers:
    """Groups as integers of their own range, from which grids of several widths are fitted."""

    def __init__(self, groups: Tensor, low: Tensor, high: Tensor, *, symmetric: bool = False) -> None:
        """Take the integers of finite groups.

        Args:
            groups: float32 [..., num_groups, group_size].
            low: The least of each group, [..., num_groups].
            high: The largest of each group.
            symmetric: Whether grids lie around zero.

        Raises:
            PrecisionError: A group of more than `MAX_FITTED_CHANNELS`.
        """
        self.symmetric = symmetric
        self.num_channels = groups.shape[-1]
        check_fitted_group(self.num_channels)
        largest = torch.maximum(low.abs(), high.abs())
        self.is_within = largest < FP16_MAX  # else it may have been saturated, and others' integers would differ
        self.holds_zero = torch.ones_like(low, dtype=torch.bool) if symmetric else (low <= 0) & (high >= 0)
        self.origin = torch.zeros_like(low) if symmetric else low
        span = largest if symmetric else high - low
        units = torch.full_like(span, SYMMETRIC_UNITS if symmetric else UNITS)
        # A range too small to be fitted has integers of zero, and so no covariance with any codes.
        ratio = torch.where(span < MIN_SCALE, 0.0, units / span.clamp(min=MIN_SCALE))
        self.values = ((groups - self.origin.unsqueeze(-1)).mul_(ratio.unsqueeze(-1))).round_()
        self.unit = span / units
        self.zero = (-self.origin * ratio).clamp_(0, UNITS)  # the place of zero among the integers
        self.total = self.values.sum(-1)
        squares = self.values.square().sum(-1)
        self.variance = squares if symmetric else _difference(self.num_channels, squares, self.total, self.total)

    def fit(self, bits: int, word_bits: WordBits = WIDE_WORD_BITS) -> FittedGrid:
        """Fit a grid of 2**bits codes to every group, with the scales and minimums that such words can hold."""
        is_short = word_bits == SHORT_WORD_BITS
        zero = 1 << (bits - 1)
        zero_point = torch.full_like(self.unit, SYMMETRIC_ZERO_POINT)
        multiplier, offset = (torch.full_like(self.unit, x) for x in first_grid(bits, symmetric=self.symmetric))
        for remaining in reversed(range(NUM_REFITS + 1)):
            if is_short and not self.symmetric and not remaining:
                zero_point, offset = self._zero_point(multiplier, offset, bits)
            codes = (self.values * (multiplier / FRACTION).unsqueeze(-1)).add_((offset / FRACTION).unsqueeze(-1))
            codes = codes.floor_().clamp_(0, 2**bits - 1)
            total, squares, products = codes.sum(-1), codes.square().sum(-1), (codes * self.values).sum(-1)
            if self.symmetric:
                covariance = products - zero * self.total
                variance = squares - 2 * zero * total + zero * zero * self.num_channels
            else:
                covariance = _difference(self.num_channels, products, total, self.total)
                variance = _difference(self.num_channels, squares, total, total)
            if remaining:
                inverse = (variance / covariance.clamp(min=1.0)).clamp_(max=1.0)
                multiplier = (inverse * FRACTION).round_()
                if not self.symmetric:  # through the mean of the integers and that of the codes
                    offset = FRACTION / 2 + self._mean(_difference(FRACTION, total, self.total, multiplier)).round_()
        # The slope that projects what is read on what was written without bias, and not the shorter one of least
        # squares: a softmax of shrunken scores would be too flat.
        divisor = covariance.clamp(min=1.0)
        slope = torch.minimum(self.variance / divisor, covariance / variance.clamp(min=1.0) * MAX_GAIN)
        largest = (LARGEST_SCALE if is_short else FP16_MAX) / (zero if self.symmetric else 1)
        wanted = (slope * self.unit).clamp(max=largest)
        scale = nearest_scale(wanted) if is_short else wanted.to(torch.float16)
        usable = self.is_within & (covariance > 0) & (scale.float() >= MIN_SCALE)
        if is_short:
            usable &= self.holds_zero
            return FittedGrid(codes, scale, minimum_of(scale, zero_point, bits), usable)
        if self.symmetric:
            return FittedGrid(codes, scale, (-zero * scale.float()).to(torch.float16), usable)
        mean = self.origin + self._mean(self.total) * self.unit
        minimum = (mean - scale.float() * self._mean(total)).clamp(-FP16_MAX, FP16_MAX)
        usable &= minimum.abs() <= scale.float() * MAX_OFFSET
        return FittedGrid(codes, scale, minimum.to(torch.float16), usable)

    def _zero_point(self, multiplier: Tensor, offset: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """The zero points nearest to a grid's, and the offset with which it has them."""
        place = (self.zero * multiplier).round_()  # below 2**22
        unit = FRACTION * zero_point_unit(bits)
        zero_point = ((place + (offset - FRACTION / 2)) / unit).round_().clamp_(0, LAST_ZERO_POINT)
        return zero_point, zero_point * unit + (FRACTION / 2 - place)

    def _mean(self, total: Tensor) -> Tensor:
        # A tensor, since CUDA would multiply by the reciprocal of a number.
        return total / torch.full_like(total, self.num_channels)


def _difference(count: int, products: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """``count * products - one * other``, an exact integer below 2**31 that is rounded to float32 once."""
    # Float64 holds the integers and their products; int64 would take twice as long on a CPU.
    return (count * products.double() - one.double() * other.double()).float()


def fp16_down(x: Tensor) -> Tensor:
    """Largest fp16 at or below float32 `x`; |x| <= 65504."""
    nearest = x.to(torch.float16)
    word = nearest.view(torch.int16)
    # The next fp16 below: one less if positive, one more in magnitude if negative. Never reached from +0.0.
    step = -1 - 2 * (word >> 15)
    return (word + (nearest.float() > x) * step).view(torch.float16)


def fp16_up(x: Tensor) -> Tensor:
    """Smallest fp16 at or above float32 `x`; |x| <= 65504."""
    return -fp16_down(-x)


def quantize_minmax(
    groups: Tensor, low: Tensor, high: Tensor, bits: int, *, symmetric: bool, word_bits: WordBits
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, float32, of finite groups [..., num_groups, group_size], with the scale and the minimum of each."""
    if word_bits == SHORT_WORD_BITS:
        scale, minimum = _zero_point_grid(low, high, bits, symmetric=symmetric)
    elif symmetric:
        scale = _symmetric_scale(torch.maximum(low.abs(), high.abs()), bits)
        minimum = (-(2 ** (bits - 1)) * scale.float()).to(torch.float16)
    else:
        minimum = fp16_down(low)
        scale = _covering_scale(high - minimum.float(), 2**bits - 1)
    inverse = _inverse(scale)
    codes = (groups - minimum.float().unsqueeze(-1)).mul_(inverse.unsqueeze(-1)).round_().clamp_(0, 2**bits - 1)
    return codes, scale, minimum


def _zero_point_grid(low: Tensor, high: Tensor, bits: int, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """The scale, fp16, and the minimum, float32, of the range with zero, as words of 16 bits hold them."""
    if symmetric:
        half = 2 ** (bits - 1)
        wanted = _divide(torch.maximum(low.abs(), high.abs()), half - 1).clamp(max=LARGEST_SCALE / half)
        scale = scale_above(fp16_up(wanted))
        return scale, minimum_of(scale, torch.full_like(low, SYMMETRIC_ZERO_POINT), bits)
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    scale = scale_above(fp16_up(_divide(high - low, 2**bits - 1)))
    zero_point = (-low * _inverse(scale) / zero_point_unit(bits)).round_().clamp_(0, LAST_ZERO_POINT)
    return scale, minimum_of(scale, zero_point, bits)


def _inverse(scale: Tensor) -> Tensor:
    step = scale.float()
    return torch.where(step == 0, 0.0, torch.ones_like(step) / step)


def _covering_scale(span: Tensor, levels: int) -> Tensor:
    """Smallest fp16 scale of which `levels` steps cover `span`."""
    scale = _divide(span, levels).to(torch.float16)
    return (scale.view(torch.int16) + (scale.float() * levels < span)).view(torch.float16)


def _symmetric_scale(largest: Tensor, bits: int) -> Tensor:
    half = 2 ** (bits - 1)
    return fp16_up(_divide(largest, half - 1).clamp(max=FP16_MAX / half))


def _divide(x: Tensor, divisor: int) -> Tensor:
    """IEEE division: by a Python number, CUDA would multiply by the rounded reciprocal."""
    return x / torch.full_like(x, divisor)
