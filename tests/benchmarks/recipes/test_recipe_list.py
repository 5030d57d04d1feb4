"""Every quantizer against its paper's formula in float64, one group after the other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.recipes.floats import Nvfp4
from benchmarks.recipes.kivi import ChannelGroups, TokenGroups
from benchmarks.recipes.kvarn import EvenTiles, even_scales, spread
from benchmarks.recipes.moments import LayerMoments
from benchmarks.recipes.oscar import SpectralRotation, basis, bit_reversed
from benchmarks.recipes.recipe_list import all_recipes
from benchmarks.recipes.rotated import ClippedRotation, PlainRotation
from benchmarks.recipes.turboquant import RandomRotation, WithSigns, levels, projection, rotation

if TYPE_CHECKING:
    from benchmarks.recipes.recipe import Quantizer

Numbers = NDArray[np.float64]
TOLERANCE = 0.02  # of the range: words are rounded to half precision, and a number on a border may take either code
HEADS, TOKENS, CHANNELS = 2, 40, 32


def keys(tokens: int = TOKENS, channels: int = CHANNELS) -> torch.Tensor:
    """Keys with an offset and an outlier channel, [1, heads, tokens, channels]."""
    x = torch.randn(1, HEADS, tokens, channels, generator=torch.Generator().manual_seed(3))
    x[..., 1] *= 9
    return x + torch.linspace(-2, 2, channels)


def hadamard_matrix(size: int) -> Numbers:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(size)


def grid(group: Numbers, bits: int) -> Numbers:
    low, high = group.min(), group.max()
    step = (high - low) / (2**bits - 1)
    return np.round((group - low) / step) * step + low


def agree(found: torch.Tensor, wanted: Numbers, share: float = 0.99) -> None:
    difference = np.abs(found.double().numpy() - wanted)
    assert found.dtype == torch.float32
    assert np.mean(difference <= TOLERANCE * np.ptp(wanted)) >= share, np.sort(difference.ravel())[-5:]


def by_row(x: torch.Tensor, function: object) -> Numbers:
    return np.apply_along_axis(function, -1, x.double().numpy())  # type: ignore[call-overload] # any function of a row


def test_kivi_groups_a_channel_of_tokens_and_leaves_the_last_part_of_a_group() -> None:
    x = keys()
    wanted = x.double().numpy().copy()
    for head in range(HEADS):
        for channel in range(CHANNELS):
            wanted[0, head, :32, channel] = grid(wanted[0, head, :32, channel], 2)
    found = ChannelGroups(2).read_back(x)
    agree(found, wanted)
    assert torch.equal(found[:, :, 32:], x[:, :, 32:])
    # The fault of grouping channels instead is far outside of the tolerance.
    with pytest.raises(AssertionError):
        agree(TokenGroups(2).read_back(x), wanted)


def test_kivi_groups_thirty_two_channels_of_a_tokens_values() -> None:
    x = keys(channels=96)
    wanted = by_row(x, lambda row: np.concatenate([grid(part, 4) for part in np.split(row, 3)]))
    agree(TokenGroups(4).read_back(x), wanted)


def test_a_group_of_equal_numbers_reads_as_it_was() -> None:
    x = torch.full((1, 1, 32, 32), 0.75)
    for quantizer in (ChannelGroups(2), TokenGroups(2)):
        assert torch.equal(quantizer.read_back(x), x)


def test_quarot_clips_both_ends_and_rounds_its_zero_point() -> None:
    h = hadamard_matrix(CHANNELS)

    def oracle(row: Numbers) -> Numbers:
        y = h @ row
        low, high = 0.95 * min(y.min(), 0), 0.95 * max(y.max(), 0)
        scale = (high - low) / 3
        zero = np.round(-low / scale)
        return h @ ((np.clip(np.round(y / scale) + zero, 0, 3) - zero) * scale)

    agree(ClippedRotation(2).read_back(keys()), by_row(keys(), oracle), share=0.95)  # a code moves a whole head


def test_saw_int4_rotates_keys_and_takes_a_heads_whole_range() -> None:
    h = hadamard_matrix(CHANNELS)
    agree(PlainRotation().read_back(keys()), by_row(keys(), lambda row: h @ grid(h @ row, 4)))


def test_turboquants_levels_are_the_best_of_a_random_directions_coordinates() -> None:
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((100_000, CHANNELS))
    sample = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True))[:, 0]
    found = levels(3, CHANNELS).double().numpy()
    cells = np.argmin(np.abs(sample[:, None] - found), axis=1)
    means = np.array([sample[cells == cell].mean() for cell in range(8)])
    assert found == pytest.approx(means, abs=0.003)  # each level is the mean of its cell: three deviations of a mean
    # Max's table (1960) of a Gaussian, which a coordinate of 128 is nearly; the paper rounds to .36, .117, .03, .009.
    wide = generator.standard_normal((10_000, 128))
    wide /= np.linalg.norm(wide, axis=1, keepdims=True)
    for bits, distortion in ((1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)):
        nearest_level = levels(bits, 128).double().numpy()
        nearest_level = nearest_level[np.searchsorted((nearest_level[1:] + nearest_level[:-1]) / 2, wide)]
        assert 128 * np.mean((wide - nearest_level) ** 2) == pytest.approx(distortion, rel=0.03)


def test_turboquant_rotates_a_direction_and_stores_its_norm() -> None:
    matrix, table = rotation(CHANNELS).double().numpy(), levels(3, CHANNELS).double().numpy()
    assert matrix @ matrix.T == pytest.approx(np.eye(CHANNELS), abs=1e-6)

    def oracle(row: Numbers) -> Numbers:
        norm = np.linalg.norm(row)
        codes = np.argmin(np.abs((matrix @ row / norm)[:, None] - table), axis=1)
        return norm * (matrix.T @ table[codes])

    agree(RandomRotation(3).read_back(keys()), by_row(keys(), oracle))


def test_turboquants_signs_make_inner_products_unbiased() -> None:
    x, s = keys(), projection(CHANNELS).double().numpy()
    coarse = RandomRotation(2).read_back(x)
    rest = (x - coarse).double().numpy()
    norm = np.linalg.norm(rest, axis=-1, keepdims=True)
    wanted = coarse.double().numpy() + norm * math.sqrt(math.pi / 2) / CHANNELS * (np.sign(rest @ s.T) @ s)
    agree(WithSigns(3).read_back(x), wanted)
    # Levels alone shrink a vector; with the signs its product with itself is right in the mean.
    many = torch.randn(1, 1, 4000, CHANNELS, generator=torch.Generator().manual_seed(5))
    products = [(quantizer(3).read_back(many) * many).sum() / many.square().sum() for quantizer in RECONSTRUCTIONS]
    assert products[0] < 0.98
    assert products[1] == pytest.approx(1, abs=0.02)


RECONSTRUCTIONS = (RandomRotation, WithSigns)


@pytest.mark.parametrize("by_channel", [True, False])
def test_kvarn_evens_a_tile_and_stores_two_scales(by_channel: bool) -> None:
    x, h = keys(tokens=2 * 16 + 5), hadamard_matrix(CHANNELS)
    wanted = x.double().numpy().copy()
    for head in range(HEADS):
        for start in (0, 16):
            tile = wanted[0, head, start : start + 16] @ h
            tile = tile.T if by_channel else tile
            rows, columns = (part.numpy() for part in even_scales(torch.from_numpy(tile)))
            even = tile / rows / columns
            read = np.stack([grid(row, 4) for row in even]) * rows * columns
            wanted[0, head, start : start + 16] = (read.T if by_channel else read) @ h
    found = EvenTiles(4, by_channel, tile=16).read_back(x)
    agree(found, wanted)
    assert torch.equal(found[:, :, 32:], x[:, :, 32:])


def test_kvarns_scales_make_deviations_more_even_and_never_less() -> None:
    tile = keys(tokens=32)[0].double() * torch.logspace(-1, 1, 32).double()[:, None]
    rows, columns = even_scales(tile)
    assert bool((spread(tile / rows / columns) < 0.35 * spread(tile)).all())
    even = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    rows, columns = even_scales(even)
    assert bool((spread(even / rows / columns) <= spread(even)).all())


def test_oscars_basis_is_eigenvectors_then_hadamard_in_bit_reversed_order() -> None:
    assert bit_reversed(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    root = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).double()
    covariance = root @ root.T
    values, vectors = np.linalg.eigh(covariance.numpy())
    found = basis(covariance).double().numpy()
    assert found @ found.T == pytest.approx(np.eye(8), abs=1e-5)
    # Undone from its end on: channel bit_reversed(i) came from that of the i-th largest eigenvalue.
    before = np.empty((8, 8))
    before[:, np.argsort(-values)] = found[:, [0, 4, 2, 6, 1, 5, 3, 7]]
    assert np.abs(before @ hadamard_matrix(8)) == pytest.approx(np.abs(vectors), abs=1e-5)  # eigenvectors have no sign


def test_oscar_clips_at_a_quantile_of_a_tokens_magnitudes() -> None:
    matrix = basis(torch.from_numpy(np.cov(keys()[0].flatten(0, 1).numpy().T)).double())
    r = matrix.double().numpy()

    def oracle(row: Numbers) -> Numbers:
        y = row @ r
        limit = np.sort(np.abs(y))[int(0.92 * CHANNELS)]
        y = np.clip(y, -limit, limit)
        scale = (y.max() - y.min()) / 3
        zero = -y.min() / scale
        return (np.clip(np.floor(y / scale + zero + 0.5), 0, 3) - zero) * scale @ r.T

    agree(SpectralRotation(matrix, 0.92).read_back(keys()), by_row(keys(), oracle))


def test_nvfp4_has_a_scale_of_eight_bits_for_sixteen_channels() -> None:
    x = keys()
    largest = float(x.abs().max())
    unit, e2m1 = largest / 6 / 448, np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    e4m3 = np.unique(e4m3[np.isfinite(e4m3) & (e4m3 >= 0)])

    def oracle(row: Numbers) -> Numbers:
        parts = []
        for block in np.split(row, CHANNELS // 16):
            scale = unit * e4m3[np.argmin(np.abs(np.abs(block).max() / 6 / unit - e4m3))]
            codes = np.argmin(np.abs(np.abs(block)[:, None] / scale - e2m1), axis=1)
            parts.append(np.sign(block) * e2m1[codes] * scale)
        return np.concatenate(parts)

    agree(Nvfp4(largest).read_back(x), by_row(x, oracle))


def quantizers() -> list[tuple[str, Quantizer]]:
    moments = LayerMoments(torch.eye(64).double(), torch.eye(64).double(), 10.0, 10.0)
    recipes = all_recipes([moments])
    return [(f"{recipe.name} {side}", recipe.layers[0][side].quantizer) for recipe in recipes for side in (0, 1)]


@pytest.mark.parametrize(("name", "quantizer"), quantizers(), ids=[name for name, _ in quantizers()])
def test_every_recipe_reads_back_something_near_and_nothing_exact(name: str, quantizer: Quantizer) -> None:
    x = torch.randn(2, 3, 256, 64, generator=torch.Generator().manual_seed(1))
    error = (quantizer.read_back(x) - x).square().mean() / x.square().mean()
    least, largest = {2: (0.02, 0.25), 3: (0.01, 0.4), 4: (1e-3, 0.1), 8: (1e-5, 1e-3)}[
        getattr(quantizer, "width", int(quantizer.bits(64)))
    ]
    assert least < error < largest, name
