"""The grids that judge_grids.py compares do what they say, beside exhaustive searches and the project's own grids."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "judging"))

from judged_grids import Basis, ByHead, Halves, Judged, Levels, Trellis

from kvtuner.quant import QuantSpec


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def squared_error(read: torch.Tensor, exact: torch.Tensor) -> float:
    return float((read - exact).square().mean())


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("channels", [32, 64, 80, 96, 128])
def test_levels_err_as_the_fitted_grids_of_the_quantizer(bits: int, channels: int) -> None:
    x = gaussian(300, 2, channels)
    fitted = squared_error(QuantSpec(bits, fit="least_squares").simulate(x), x)
    # Both are Lloyd's iterations of three passes; the quantizer's starts from integers of 8 bits.
    assert squared_error(Levels(2**bits).read(x), x) == pytest.approx(fitted, rel=0.02)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_levels_in_short_words_err_as_the_quantizer_does(bits: int, parts: int) -> None:
    x = gaussian(300, 2, 64) + 0.3
    fitted = QuantSpec(bits, fit="least_squares", group_size=64 // parts, word_bits=16)
    levels = Levels(2**bits, parts, 16)
    assert squared_error(levels.read(x), x) == pytest.approx(squared_error(fitted.simulate(x), x), rel=0.03)
    assert levels.stored_bits(64) == 64 * bits + 16 * parts


def test_ternary_codes_lie_between_one_and_two_bits() -> None:
    x = gaussian(300, 2, 64)
    errors = [squared_error(Levels(levels).read(x), x) for levels in (2, 3, 4)]
    assert errors == sorted(errors, reverse=True)
    assert Levels(3).code_bits(64) == 13 * 8
    assert Levels(3).code_bits(128) == 26 * 8


def test_a_trellis_path_is_nearly_the_best_closed_one() -> None:
    trellis, columns = Trellis(1, states=4), gaussian(8, 40)
    least = torch.full((40,), torch.inf)
    for first in range(4):
        for branches in product(range(2), repeat=8):
            state, errors = first, torch.zeros(40)
            for column, branch in zip(columns, branches, strict=True):
                errors += (column - trellis.values[state // 2, state % 2, branch]).square()
                state = (2 * state + branch) % 4
            if state == first:
                least = torch.minimum(least, errors)
    found = (trellis._closed_path(columns) - columns).square().sum(0)
    assert bool((found >= least - 1e-5).all())
    # The state in which a path begins and ends is not searched for, but taken from a path that need not be closed.
    assert float(found.sum()) <= 1.1 * float(least.sum())


def test_a_trellis_of_256_states_errs_less_than_a_fitted_grid_of_its_bits() -> None:
    x = gaussian(64, 1, 64)
    assert squared_error(Trellis(2).read(x), x) < 0.75 * squared_error(Levels(4).read(x), x)


def test_a_basis_puts_first_what_is_read_most() -> None:
    mixing = gaussian(2, 16, 16).double()
    x = torch.einsum("thd,hde->the", gaussian(4000, 2, 16, seed=1).double(), mixing) + 3.0
    mean = x.mean(0)
    covariance = torch.einsum("thd,the->hde", x - mean, x - mean) / len(x)
    reader = torch.diag_embed(torch.logspace(0, -4, 16, dtype=torch.float64)).expand(2, -1, -1)
    basis = Basis.between(mean, covariance, reader, ridge=0.0)
    y = basis.apply(x)
    energies = y.square().mean(0)
    assert bool((energies.diff(dim=-1) < 0).all())
    correlations = torch.einsum("thd,the->hde", y, y) / len(y)
    assert float((correlations - torch.diag_embed(energies)).abs().max()) < 1e-3 * float(energies.max())
    torch.testing.assert_close(basis.invert(y), x.float(), rtol=0, atol=2e-3)


def test_the_weak_half_without_bits_reads_its_mean() -> None:
    x = gaussian(50, 2, 32)
    read = Halves(Levels(16), None).read(x)
    assert bool((read[..., 16:] == 0).all())
    assert squared_error(read[..., :16], x[..., :16]) < 0.01
    assert Halves(Levels(16), None).stored_bits(32) == 64 + 32
    assert Halves(Levels(4), Levels(2)).stored_bits(32) == 32 + 16 + 2 * 32


def test_heads_are_stored_each_its_own_way() -> None:
    x, storage = gaussian(20, 3, 32), Judged(Levels(4))
    read = ByHead([storage, None, QuantSpec(8)]).simulate(x)
    assert torch.equal(read[:, 1], x[:, 1])
    assert torch.equal(read[:, 0], storage.simulate(x)[:, 0])
    assert torch.equal(read[:, 2], QuantSpec(8).simulate(x)[:, 2])
