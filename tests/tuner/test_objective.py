"""Measured KL: once per configuration and run folder, and never a value that is no number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvtuner.calibration.measure import QuantOptions
from kvtuner.errors import NonFiniteActivationError
from kvtuner.precision import PrecisionPair
from kvtuner.run_folder import RunFolder
from kvtuner.search_spaces.space import Choice
from kvtuner.tuner.objective import JOURNAL, MeasuredKL

if TYPE_CHECKING:
    from pathlib import Path

NATIVE = (Choice(PrecisionPair(16, 16), "none", "none", 64, 0.0),) * 2


class Simulated:
    """Gives one KL for everything, and counts."""

    def __init__(self, kl: float) -> None:
        self.value, self.calls = kl, 0

    def kl(self, specs: object) -> float:
        self.calls += 1
        return self.value


def objective(simulator: Simulated, folder: RunFolder, identity: str = "mine") -> MeasuredKL:
    return MeasuredKL(cast("Any", simulator), cast("Any", None), QuantOptions(), folder, identity)


def test_a_configuration_is_measured_once_per_folder_and_identity(tmp_path: Path) -> None:
    folder, simulator = RunFolder(tmp_path), Simulated(0.25)
    first = objective(simulator, folder)
    assert (first(NATIVE), first(NATIVE), first.num_measured) == (0.25, 0.25, 1)
    assert objective(simulator, folder)(NATIVE) == 0.25
    assert simulator.calls == 1
    objective(simulator, folder, "another")(NATIVE)
    assert simulator.calls == 2


def test_what_another_worker_has_measured_meanwhile_is_not_measured_again(tmp_path: Path) -> None:
    folder, simulator = RunFolder(tmp_path), Simulated(0.25)
    first, second = objective(simulator, folder), objective(simulator, folder)
    assert first(NATIVE) == second(NATIVE) == 0.25
    assert simulator.calls == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_is_an_error_and_is_not_journalled(value: float, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    measured = objective(Simulated(value), folder)
    with pytest.raises(NonFiniteActivationError, match=rf"must be finite, but is {value} \(K16V16, K16V16\)"):
        measured(NATIVE)
    assert measured.num_measured == 0
    assert not folder.file(JOURNAL).exists()
