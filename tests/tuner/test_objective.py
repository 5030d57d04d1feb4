"""Measured KL: no sequence twice per run folder, clear losers not to their end, and never a value that is no number."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
from simulated.simulated_kl import Simulated, configuration, objective

from kvtuner.errors import NonFiniteActivationError
from kvtuner.run_folder import RunFolder
from kvtuner.tuner.objective import JOURNAL, RACE, configuration_key
from kvtuner.workers.work_claims import Claims

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


WINNER, LOSER = configuration(16), configuration(8)


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 7])
def test_a_configuration_is_measured_once_per_folder_and_identity(num_sequences: int, tmp_path: Path) -> None:
    folder, simulator = RunFolder(tmp_path), Simulated({16: [0.25 * (n + 1) for n in range(num_sequences)]})
    first, expected = objective(simulator, folder), 0.25 * (num_sequences + 1) / 2
    assert first(WINNER) == first(WINNER) == expected
    assert objective(simulator, folder)(WINNER) == expected
    assert simulator.run == num_sequences
    assert simulator.calls == 1, "the cores of a large machine wait between two calls"
    assert first.num_sequences == 2 * num_sequences
    objective(simulator, folder, "another")(WINNER)
    assert simulator.run == 2 * num_sequences


def test_what_another_worker_has_measured_meanwhile_is_not_measured_again(tmp_path: Path) -> None:
    folder, simulator = RunFolder(tmp_path), Simulated({16: [0.25, 0.5]})
    first, second = objective(simulator, folder), objective(simulator, folder)
    assert first(WINNER) == second(WINNER)
    assert simulator.run == 2


@pytest.mark.parametrize(
    ("losers", "num_run"),
    [
        ([9] * 2 + [1] * 10, 2),  # beyond the first margin
        ([1.4] * 2 + [2] * 2 + [1] * 8, 4),  # within the first, beyond the second
        ([1.4] * 2 + [1] * 2 + [1.4] * 2 + [0.5] * 6, 6),  # within both, beyond the third
        ([1.4] * 2 + [1] * 2 + [0.7] * 2 + [9] * 6, 12),  # within all
        ([0.5] * 12, 12),
    ],
)
def test_a_race_ends_once_one_is_clearly_worse(losers: list[float], num_run: int, tmp_path: Path) -> None:
    winners = [1.0] * 10 + [2.0, 3.0]
    folder, simulator = RunFolder(tmp_path), Simulated({16: winners, 8: losers})
    measured = objective(simulator, folder)
    best = measured(WINNER)
    value = measured.against(LOSER, WINNER)
    assert simulator.run == measured.num_sequences == 12 + num_run
    share = sum(losers[:num_run]) / sum(winners[:num_run])
    assert value == pytest.approx(fmean(losers) if num_run == 12 else share * best)
    if num_run < 12:
        assert value > min(margin for _, margin in RACE) * best
    # What is left is measured where the value itself is wanted, and a race's value does not depend on it.
    assert measured(LOSER) == pytest.approx(fmean(losers))
    assert simulator.run == 24
    assert objective(simulator, folder).against(LOSER, WINNER) == value


@pytest.mark.parametrize(
    ("num_sequences", "ends"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (5, [1, 2, 3, 5]), (8, [2, 3, 4, 8]), (13, [3, 5, 7, 13])],
)
def test_a_race_of_few_sequences_has_fewer_stages(num_sequences: int, ends: list[int], tmp_path: Path) -> None:
    even = {16: [1.0] * num_sequences, 8: [1.0] * num_sequences}
    folder = RunFolder(tmp_path)
    simulator = Simulated(even)
    objective(simulator, folder).against(LOSER, WINNER)
    batches = [record["batch"] for record in folder.records(JOURNAL)]
    assert batches == [*range(num_sequences), *range(num_sequences)]
    assert simulator.stages == [num_sequences, *(b - a for a, b in zip([0, *ends[:-1]], ends, strict=True))]


def test_what_another_worker_has_left_is_used(tmp_path: Path) -> None:
    folder, simulator = RunFolder(tmp_path), Simulated({16: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]})
    name = configuration_key(WINNER)
    lines = [{"identity": "mine", "configuration": name, "batch": place, "kl": [place + 1.0]} for place in (0, 3)]
    folder.append(JOURNAL, *lines)
    assert objective(simulator, folder)(WINNER) == objective(simulator, folder)(WINNER) == 3.5
    assert simulator.run == 4


def test_batches_are_never_split_by_a_race(tmp_path: Path) -> None:
    simulator = Simulated({16: [1.0] * 5, 8: [9.0] * 5}, batch_size=4)
    assert objective(simulator, RunFolder(tmp_path)).against(LOSER, WINNER) == pytest.approx(9.0)
    assert simulator.run == 5 + 4


def test_nothing_is_worse_by_a_factor_than_what_loses_nothing(tmp_path: Path) -> None:
    simulator = Simulated({16: [0.0] * 3, 8: [1.0, 2.0, 3.0]})
    assert objective(simulator, RunFolder(tmp_path)).against(LOSER, WINNER) == 2.0


def test_what_a_damaged_line_held_is_measured_again(tmp_path: Path) -> None:
    folder, simulator = RunFolder(tmp_path), Simulated({16: [1.0] * 12, 8: [1.3] * 2 + [0.9] * 10})
    value = objective(simulator, folder).against(LOSER, WINNER)
    lines = folder.file(JOURNAL).read_text().splitlines(keepends=True)
    assert len(lines) == 24
    folder.file(JOURNAL).write_text("".join(lines[:5] + lines[6:20] + lines[21:]))
    simulator.run = 0
    assert objective(simulator, folder).against(LOSER, WINNER) == value
    assert simulator.run == 2


def test_a_race_that_meets_no_number_is_an_error_that_keeps_what_was_measured(tmp_path: Path) -> None:
    folder, simulator = RunFolder(tmp_path), Simulated({16: [1.0] * 12, 8: [1.0] * 2 + [math.nan] + [1.0] * 9})
    with pytest.raises(NonFiniteActivationError, match="is nan"):
        objective(simulator, folder).against(LOSER, WINNER)
    kept = [(r["batch"], r["kl"]) for r in folder.records(JOURNAL)]
    assert kept == [*((place, [1.0]) for place in (*range(12), 0, 1)), (2, None), (3, [1.0])]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_is_an_error_that_is_not_measured_again(value: float, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    simulator = Simulated({16: [value]})
    for measured in (objective(simulator, folder), objective(simulator, folder)):
        message = rf"must be finite, but is {value} from layer 0 on \(K16V16\)"
        with pytest.raises(NonFiniteActivationError, match=message):
            measured(WINNER)
        assert measured.num_sequences == 0
    assert simulator.run == 1


def test_another_worker_helps_with_what_is_asked_for(tmp_path: Path) -> None:
    folder, kls = RunFolder(tmp_path), {16: [1.0] * 6, 8: [2.0] * 6}
    asking, helping = Simulated(kls), Simulated(kls)
    helper = objective(helping, folder)
    helper._queue._claims = Claims(folder, "another machine|1|1")
    helper._queue._claims.take(["anything"])  # shows itself
    assert not helper.help(), "nothing is asked for yet"
    plain = asking.measure

    def measure(specs: Mapping[int, Any], *, places: Sequence[int]) -> Any:
        assert helper.help()
        return plain(specs, places=places)

    asking.measure = measure  # type: ignore[method-assign]
    assert objective(asking, folder)(LOSER) == 2.0
    assert (asking.run, helping.run) == (3, 3)
    assert not helper.help()
