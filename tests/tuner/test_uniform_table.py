"""The uniform table: what may be the best of a budget is measured whole, all else on a quarter of the sequences."""

from __future__ import annotations

import math
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import pytest
from simulated.simulated_kl import Simulated, configuration, objective

from kvtuner.precision import PrecisionPair
from kvtuner.run_folder import RunFolder
from kvtuner.tuner.uniform_table import largest_pairs, measure_uniforms

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WIDTHS = (2, 3, 4, 8, 16)
KLS = {16: [0.0] * 12, 8: [0.1] * 12, 4: [1.0] * 3 + [2.0] * 9, 3: [0.5] * 3 + [3.0] * 9, 2: [9.0] * 12}


def pair(bits: int) -> PrecisionPair:
    return PrecisionPair(bits, 16)


def measured(
    tmp_path: Path, inside: Sequence[Sequence[int]], kls: dict[int, list[float]] = KLS, batch_size: int = 1
) -> tuple[dict[int, float], Simulated, list[int]]:
    simulator, failed = Simulated(kls, batch_size), list[int]()
    found = measure_uniforms(
        objective(simulator, RunFolder(tmp_path)),
        {pair(bits): configuration(bits) for bits in WIDTHS},
        [[pair(bits) for bits in widths] for widths in inside],
        on_failure=lambda failure, _: failed.append(failure.k_bits),
    )
    return {one.k_bits: kl for one, kl in found.items()}, simulator, failed


def test_the_largest_pairs_are_those_that_no_other_exceeds() -> None:
    pairs = [PrecisionPair(k, v) for k, v in product(WIDTHS, repeat=2)]
    for most in (4, 5, 6, 8, 12, 16, 20, 32):
        inside = [one for one in pairs if one.k_bits + one.v_bits <= most]
        largest = largest_pairs(inside)
        for one in inside:
            wider = [
                other
                for other in inside
                if other != one and min(other.k_bits - one.k_bits, other.v_bits - one.v_bits) >= 0
            ]
            assert (one in largest) == (not wider)
    assert [str(one) for one in largest_pairs([one for one in pairs if one.k_bits + one.v_bits <= 12])] == [
        "K4V8",
        "K8V4",
    ]


def test_progress_tells_of_as_many_measurements_as_it_announced(tmp_path: Path) -> None:
    ahead, done = list[int](), list[object]()
    measure_uniforms(
        objective(Simulated(KLS, 1), RunFolder(tmp_path)),
        {pair(bits): configuration(bits) for bits in WIDTHS},
        [[pair(3)], [pair(2), pair(3), pair(4)]],
        on_ahead=ahead.append,
        on_batch=done.append,
    )
    assert ahead == [5 * 3, 2 * 12]
    assert len(done) == sum(ahead)


def test_the_largest_is_measured_whole_however_good_a_smaller_one_looks_at_first(tmp_path: Path) -> None:
    found, simulator, _ = measured(tmp_path, [[2, 3, 4]])
    whole = fmean(KLS[4])
    assert found[4] == pytest.approx(whole)
    assert simulator.run == 5 * 3 + 9
    # The others grow as the KL of 4 bits does.
    assert found == pytest.approx({2: 9.0 * whole, 3: 0.5 * whole, 4: whole, 8: 0.1 * whole, 16: 0.0})
    assert list(found) == list(WIDTHS)


def test_each_budget_has_its_largest_and_shares_what_is_measured(tmp_path: Path) -> None:
    found, simulator, _ = measured(tmp_path, [[2], [2, 3, 4], [2, 3, 4], [2, 3, 4, 8]])
    assert {bits: found[bits] for bits in (2, 4, 8)} == pytest.approx({bits: fmean(KLS[bits]) for bits in (2, 4, 8)})
    assert simulator.run == 5 * 3 + 3 * 9
    growth = sum(fmean(KLS[bits]) for bits in (2, 4, 8)) / sum(KLS[bits][0] for bits in (2, 4, 8))
    assert found[3] == pytest.approx(0.5 * growth)


def test_without_a_uniform_inside_all_have_the_kl_of_the_first_quarter(tmp_path: Path) -> None:
    found, simulator, _ = measured(tmp_path, [[]])
    assert found == pytest.approx({bits: fmean(KLS[bits][:3]) for bits in WIDTHS})
    assert simulator.run == 5 * 3


def test_beside_one_that_loses_nothing_no_kl_grows(tmp_path: Path) -> None:
    found, _, _ = measured(tmp_path, [[16]])
    assert found == pytest.approx({16: 0.0, **{bits: fmean(KLS[bits][:3]) for bits in (8, 4, 3, 2)}})


def test_what_is_no_number_is_told_once_and_has_no_value(tmp_path: Path) -> None:
    broken = {**KLS, 2: [math.nan] * 12, 4: [*KLS[4][:-1], math.inf]}
    found, _, failed = measured(tmp_path / "three", [[2, 3, 4], [3, 4], [4, 8]], broken)
    assert sorted(failed) == [2, 4]
    assert set(found) == {3, 8, 16}
    found, simulator, failed = measured(tmp_path / "one", [[2, 3, 4]], broken)
    assert sorted(failed) == [2, 4]
    # 3 bits take the place of 4, which fail on the last sequence.
    assert found[3] == pytest.approx(fmean(KLS[3])) and set(found) == {3, 8, 16}
    assert simulator.run == 5 * 3 + 2 * 9
    found, _, failed = measured(tmp_path / "none", [[4]], broken)
    assert found == pytest.approx({bits: fmean(KLS[bits][:3]) for bits in (3, 8, 16)})


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("num_sequences", [1, 2, 3, 7, 12])
def test_no_more_is_measured_than_a_quarter_of_all_and_the_largest(
    num_sequences: int, batch_size: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(num_sequences)
    kls = {bits: list(rng.lognormal(0.3 * (16 - bits) / 14, 1.0, num_sequences)) for bits in WIDTHS}
    found, simulator, _ = measured(tmp_path, [[2], [2, 3]], kls, batch_size)
    first = min(num_sequences, math.ceil(math.ceil(num_sequences / batch_size) / 4) * batch_size)
    assert simulator.run == 5 * first + 2 * (num_sequences - first)
    assert {bits: found[bits] for bits in (2, 3)} == pytest.approx({bits: fmean(kls[bits]) for bits in (2, 3)})
    growth = sum(fmean(kls[bits]) for bits in (2, 3)) / sum(fmean(kls[bits][:first]) for bits in (2, 3))
    for bits in (4, 8, 16):
        assert found[bits] == pytest.approx(growth * fmean(kls[bits][:first]))
