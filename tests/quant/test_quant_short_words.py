"""Grids in words of 16 bits: those of an oracle in Python's integers, over groups of every kind."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hostile_groups import first_grid, hostile_groups, squared_error

from kvtuner.precision import FITTED_BITS
from kvtuner.quant import quantize
from kvtuner.row_packing import pack_rows, unpack_rows

if TYPE_CHECKING:
    from torch import Tensor

GROUP_SIZES = (16, 64, 80, 96, 128)
F32 = np.float32
Grid = tuple[list[int], float, int]
"""The codes of a group, its scale and its zero point in units of 2**bits / 32."""


def shortened(scale: np.float16, added: int) -> np.float16:
    """An fp16 without its lowest 4 bits, after an addition to its bits."""
    return np.uint16((int(scale.view(np.uint16)) + added) // 16 * 16).view(np.float16)


def fp16_above(x: np.float32) -> np.float16:
    half = np.float16(x)
    return np.nextafter(half, np.float16(np.inf)) if half < x else half


def range_oracle(x: np.ndarray, bits: int, *, symmetric: bool) -> Grid:
    """A min-max grid."""
    x = np.clip(x, F32(-65504), F32(65504))
    low, high, top, half = min(x.min(), F32(0)), max(x.max(), F32(0)), 2**bits - 1, 2 ** (bits - 1)
    capped = min(max(-low, high) / F32(half - 1), F32(65024 / half))
    wanted = capped if symmetric else (high - low) / F32(top)
    scale = shortened(fp16_above(wanted), 15)
    inverse = F32(1) / F32(scale) if scale else F32(0)
    zero_point = 16 if symmetric else min(max(round(float(-low * inverse) * 2 ** (5 - bits)), 0), 31)
    minimum = F32(-zero_point * 2.0 ** (bits - 5) * float(scale))
    return [int(np.clip(np.rint((v - minimum) * inverse), 0, top)) for v in x], float(scale), zero_point


def fitted_oracle(x: np.ndarray, bits: int, *, symmetric: bool) -> Grid | None:
    """A fitted grid; None where the min-max one holds."""
    n, top, zero = len(x), 2**bits - 1, 2 ** (bits - 1)
    largest = max(abs(x.min()), abs(x.max()))
    origin, span = (F32(0), largest) if symmetric else (x.min(), x.max() - x.min())
    if largest >= 65504 or span < 2**-14 or (not symmetric and (x.min() > 0 or x.max() < 0)):
        return None
    count = F32(127 if symmetric else 255)
    units = [round(float(v)) for v in (x - origin) * (count / span)]
    multiplier, offset = first_grid(bits, symmetric=symmetric)
    zero_point = 16
    for refits in (2, 1, 0):
        if not refits and not symmetric:
            place = round(float(min(-origin * (count / span), F32(255)) * F32(multiplier)))
            step = 2 ** (9 + bits)
            zero_point = min(max(round((place + offset - 8192) / step), 0), 31)
            offset = zero_point * step + 8192 - place
        codes = [min(max((u * multiplier + offset) >> 14, 0), top) for u in units]
        if symmetric:
            covariance = sum((c - zero) * u for c, u in zip(codes, units, strict=True))
            variance = sum((c - zero) ** 2 for c in codes)
        else:
            covariance = n * sum(c * u for c, u in zip(codes, units, strict=True)) - sum(codes) * sum(units)
            variance = n * sum(c * c for c in codes) - sum(codes) ** 2
        if covariance <= 0:
            return None
        if refits:
            multiplier = round(float(min(F32(variance) / F32(covariance), F32(1)) * F32(16384)))
            if not symmetric:
                offset = 8192 + round(float(F32(16384 * sum(codes) - multiplier * sum(units)) / F32(n)))
    spread = sum(u * u for u in units) if symmetric else n * sum(u * u for u in units) - sum(units) ** 2
    slope = min(F32(spread) / F32(covariance), F32(covariance) / F32(variance) * F32(1.6))
    wanted = min(slope * (span / count), F32(65024 / (zero if symmetric else 1)))
    scale = shortened(np.float16(wanted), 8)
    return (codes, float(scale), zero_point) if scale >= 2**-14 else None


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("fit", ["minmax", "least_squares"])
@pytest.mark.parametrize("size", GROUP_SIZES)
@pytest.mark.parametrize("bits", FITTED_BITS)
def test_codes_and_words_are_the_oracles(bits: int, size: int, fit: str, symmetric: bool) -> None:
    x = hostile_groups(size)
    quantized = quantize(x, bits, symmetric=symmetric, fit=fit, word_bits=16)  # type: ignore[arg-type]  # one of FITS
    num_fitted = 0
    for number, group in enumerate(x.squeeze(1).numpy()):
        fitted = fitted_oracle(group, bits, symmetric=symmetric) if fit == "least_squares" else None
        codes, scale, zero_point = fitted or range_oracle(group, bits, symmetric=symmetric)
        num_fitted += fitted is not None
        assert quantized.codes[number, 0].tolist() == codes, number
        assert quantized.scale[number].item() == scale, number
        assert quantized.minimum[number].item() == -zero_point * 2.0 ** (bits - 5) * scale, number
    assert num_fitted > len(x) // 2 or fit == "minmax"


@pytest.mark.parametrize("fit", ["minmax", "least_squares"])
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("bits", FITTED_BITS)
def test_short_words_cost_little(bits: int, size: int, fit: str) -> None:
    x = torch.randn(2000, 1, size, generator=torch.Generator().manual_seed(1))
    x += 0.1 * torch.randn(2000, 1, 1, generator=torch.Generator().manual_seed(2))
    short, wide = (quantize(x, bits, fit=fit, word_bits=word_bits) for word_bits in (16, 32))  # type: ignore[arg-type]  # literals of a loop
    assert squared_error(x, short) < (1.04 if bits < 4 else 1.08) * squared_error(x, wide)
    centred = x - x.mean(-1, keepdim=True)
    projection = (short.dequantize() * centred).sum(-1) / centred.square().sum(-1)
    # A scale is rounded by 1 / 128 at most.
    assert fit == "minmax" or (projection - 1).abs().max() < 2**-7 + 2**-8


def test_values_inside_a_range_err_by_half_a_step() -> None:
    """A zero point errs by half a unit, which is half a step at 4 bits, and so do codes at the ends."""
    x = torch.randn(4000, 1, 64, generator=torch.Generator().manual_seed(5))
    for bits in FITTED_BITS:
        quantized = quantize(x, bits, word_bits=16)
        error = (quantized.dequantize() - x).abs() / quantized.scale.float()
        assert error.max() <= 0.5 + 1e-3


@pytest.mark.parametrize("offset", [30.0, -3000.0, 65000.0])
def test_grid_of_a_group_on_one_side_of_zero_begins_there(offset: float) -> None:
    x = torch.randn(8, 1, 64, generator=torch.Generator().manual_seed(6)) + offset
    fitted, plain = (quantize(x, 4, fit=fit, word_bits=16) for fit in ("least_squares", "minmax"))  # type: ignore[arg-type]  # literals of a loop
    assert torch.equal(fitted.codes, plain.codes) and torch.equal(fitted.scale, plain.scale)
    error = (plain.dequantize() - x.clamp(-65504, 65504)).abs()
    assert (error <= plain.scale.float() * 0.5001).all()


def test_eight_bits_have_words_of_32_bits() -> None:
    x = hostile_groups(64)
    short, wide = quantize(x, 8, word_bits=16), quantize(x, 8)
    assert short.word_bits == wide.word_bits == 32
    assert torch.equal(pack_rows(short), pack_rows(wide))
    assert torch.equal(unpack_rows(pack_rows(short), 8, 1, 64, word_bits=16).codes, wide.codes)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", FITTED_BITS)
def test_group_that_is_not_finite_reads_nan_and_no_other(bits: int, poison: float) -> None:
    x = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(3))
    x[1, 1, 40] = poison
    quantized = quantize(x, bits, 32, fit="least_squares", word_bits=16)
    assert quantized.codes[1, 1, 32:].tolist() == [0] * 32
    read = unpack_rows(pack_rows(quantized), bits, 2, 64, 32, word_bits=16).dequantize()
    assert read[1, 1, 32:].isnan().all() and read.isnan().sum() == 32


def oracle_row(codes: Tensor, words: list[int], bits: int) -> bytes:
    """One token's row by Python's integers."""
    slots = 8 if bits == 3 else 16 // bits
    units = []
    for head in codes.tolist():
        count = len(head) // slots
        units.append([sum(head[slot * count + unit] << bits * slot for slot in range(slots)) for unit in range(count)])
    row = b"".join((unit & 0xFFFF).to_bytes(2, "little") for head in units for unit in head)
    if bits == 3:
        pairs = [(head, unit) for head in units for unit in range(len(head) // 2)]
        row += bytes(head[unit + other] >> 16 for head, unit in pairs for other in (0, len(head) // 2))
    row += b"".join(word.to_bytes(2, "little") for word in words)
    return row + b"\0" * (-len(row) % 16)


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "bits", "group_size"),
    [(1, 8, 2, 1), (3, 80, 2, 40), (1, 16, 3, 2), (3, 80, 3, 40), (1, 48, 3, 12), (5, 80, 4, 20), (8, 128, 4, 32)],
)
def test_rows_are_the_bits_of_the_layout(num_heads: int, head_dim: int, bits: int, group_size: int) -> None:
    x = torch.randn(3, num_heads, head_dim, generator=torch.Generator().manual_seed(4))
    quantized = quantize(x, bits, group_size, fit="least_squares", word_bits=16)
    rows = pack_rows(quantized)
    for token in range(3):
        scales = quantized.scale[token].flatten()
        places = (-quantized.minimum[token].flatten() / scales.float() * 2 ** (5 - bits)).round().int().tolist()
        halves = [int(half) & 0xFFFF for half in scales.view(torch.int16)]
        words = [half // 16 * 32 + place for half, place in zip(halves, places, strict=True)]
        assert bytes(rows[token].tolist()) == oracle_row(quantized.codes[token], words, bits)
    read = unpack_rows(rows, bits, num_heads, head_dim, group_size, word_bits=16)
    for name in ("codes", "scale", "minimum"):
        assert torch.equal(getattr(read, name), getattr(quantized, name))


def test_the_row_of_short_words_is_the_one_written_by_hand() -> None:
    x = torch.arange(16, dtype=torch.float32).reshape(1, 16) / 4 - 1
    # Units as ever; the scale 0.25 is 0x3400 and its zero point 4 is 8 half codes: 0x340 << 5 | 8.
    row = pack_rows(quantize(x, 4, word_bits=16))
    assert bytes(row.tolist()).hex() == "40c851d962ea73fb" + "0868" + 6 * "00"
