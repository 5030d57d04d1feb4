"""What a time limit leaves a refinement: all that the rest, at the measured rate, does not take."""

from __future__ import annotations

import pytest

from kvtuner.pipeline.stages.time_limit import TimeLimit

AHEAD = [
    ("calibration", 100.0),
    ("uniform table", 50.0),
    ("refinement 3bit", 80.0),
    ("validation", 20.0),
    ("refinement 4bit", 80.0),
    ("validation", 10.0),
]
PASSES, SECONDS = {"calibration": 100.0, "uniform table": 40.0}, {"calibration": 10.0, "uniform table": 20.0}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_refinements_share_what_validation_leaves_and_the_last_has_all_of_it(clock: Clock) -> None:
    limit = TimeLimit(100.0, AHEAD, began=clock.now, clock=clock)
    clock.now += 30.0
    first = limit.refinement("refinement 3bit", PASSES, SECONDS)
    # 30 passes of validation at half a second each; 55 seconds are left for two refinements.
    assert (first.rest, first.seconds) == (15.0, 27.5)
    clock.now += 27.4
    assert not first.is_over()
    clock.now += 0.2
    assert first.is_over()
    clock.now += 10.4
    second = limit.refinement("refinement 4bit", PASSES, SECONDS)
    assert (second.rest, second.seconds) == (5.0, pytest.approx(27.0))


def test_without_time_a_refinement_is_over_at_once(clock: Clock) -> None:
    limit = TimeLimit(40.0, AHEAD, began=clock.now, clock=clock)
    clock.now += 30.0
    given = limit.refinement("refinement 3bit", PASSES, SECONDS)
    assert given.seconds == 0.0
    assert given.is_over()


def test_the_rate_is_that_of_all_phases_where_the_uniform_table_was_measured_before(clock: Clock) -> None:
    limit = TimeLimit(100.0, AHEAD, began=clock.now, clock=clock)
    resumed = {"calibration": 100.0, "uniform table": 0.0}
    assert limit.refinement("refinement 4bit", resumed, {"calibration": 10.0, "uniform table": 0.1}).rest == 1.01
    nothing = limit.refinement("refinement 4bit", {"calibration": 0.0}, {"calibration": 0.0})
    assert (nothing.rest, nothing.seconds) == (0.0, 100.0)
