"""Words of 16 bits: every one against Python's fractions, and there and back."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from kvtuner.zero_points import (
    LARGEST_SCALE,
    LAST_ZERO_POINT,
    NOT_FINITE,
    from_words,
    nearest_scale,
    scale_above,
    to_words,
    zero_point_unit,
)

SHORT_WIDTHS = (2, 3, 4)
SCALES = np.arange(0x7C0, dtype=np.uint16).__lshift__(4).view(np.float16).astype(np.float64)
"""Every finite scale of a word, ascending."""


@pytest.mark.parametrize("bits", SHORT_WIDTHS)
def test_every_word_is_a_scale_and_an_exact_minimum(bits: int) -> None:
    words = torch.arange(0x7C0 << 5, dtype=torch.int32)
    scale, minimum = from_words(words.to(torch.int16), bits)
    assert scale.dtype == torch.float16 and minimum.dtype == torch.float32
    assert np.array_equal(scale.double().numpy(), SCALES.repeat(32))
    for index in range(7, len(words), 1009):
        zero_point = Fraction(index % 32) * Fraction(zero_point_unit(bits))
        assert Fraction(minimum[index].item()) == -zero_point * Fraction(SCALES[index // 32])
    assert zero_point_unit(bits) * 2**5 == 2**bits


@pytest.mark.parametrize("bits", SHORT_WIDTHS)
def test_words_are_found_again(bits: int) -> None:
    """A scale of 0 has no place for zero, and its zero point is 0."""
    words = torch.cat((torch.zeros(1), torch.arange(32, 0x7C0 << 5), torch.tensor([NOT_FINITE]))).to(torch.int32)
    found = to_words(*from_words(words.to(torch.int16), bits), bits)
    assert torch.equal(found.to(torch.int32) & 0xFFFF, words)


def test_the_word_that_is_not_finite_reads_nan() -> None:
    scale, minimum = from_words(torch.tensor([NOT_FINITE]).to(torch.int16), 4)
    assert math.isnan(scale.item()) and math.isnan(minimum.item())
    assert from_words(torch.tensor([-1], dtype=torch.int16), 4)[0].isnan().all(), "rows that nobody wrote"


def test_scales_are_rounded_to_words() -> None:
    rng = np.random.default_rng(0)
    wanted = np.concatenate((np.exp(rng.uniform(-18, math.log(LARGEST_SCALE), 4000)), SCALES)).astype(np.float32)
    halves = torch.from_numpy(wanted).to(torch.float16)
    exact = halves.double().numpy()
    places = np.searchsorted(SCALES, exact, side="left")
    assert np.array_equal(scale_above(halves).double().numpy(), SCALES[places])
    nearest = nearest_scale(torch.from_numpy(wanted)).double().numpy()
    below, above = SCALES[np.maximum(np.searchsorted(SCALES, exact, side="right") - 1, 0)], SCALES[places]
    assert np.array_equal(nearest, np.where(exact - below < above - exact, below, above))
    assert SCALES[-1] == LARGEST_SCALE and LAST_ZERO_POINT == 31
