"""Shared layers: what is found is what was kept, within its bytes, and what was used last outlives the rest."""

from __future__ import annotations

import random

import pytest
import torch

from kvtuner.calibration.forward.shared_layers import SharedLayers

STATE = torch.zeros(4, dtype=torch.float32)  # 16 bytes


def states(first: int, *values: float) -> dict[int, torch.Tensor]:
    return {layers: STATE + value for layers, value in enumerate(values, start=first)}


def test_the_longest_common_beginning_is_found_and_its_output_is_the_one_that_was_kept() -> None:
    shared = SharedLayers(1000)
    shared.keep("abcd", states(0, 0, 1, 2, 3))
    for other, layers in (("abcx", 3), ("abxx", 2), ("axcd", 1), ("xbcd", 0), ("abcd", 3)):
        found, state = shared.longest(other)
        assert found == layers, other
        assert (state is None) if layers == 0 else (state is not None and torch.equal(state, STATE + layers))
    shared.keep("abxx", states(2, 2, 30))
    assert shared.num_bytes == 4 * 16
    found, state = shared.longest("abxy")
    assert (found, float(state[0]) if state is not None else None) == (3, 30.0)


def test_of_one_configuration_the_first_layers_outlive_the_last() -> None:
    shared = SharedLayers(2 * 16)
    shared.keep("abcd", states(0, 0, 1, 2, 3))
    assert shared.num_bytes == 2 * 16
    assert shared.longest("abcd")[0] == 2


def test_what_was_used_last_outlives_what_was_not() -> None:
    shared = SharedLayers(2 * 16)
    shared.keep("ab", states(0, 0, 1))
    shared.keep("cd", states(0, 0, 1))
    shared.keep("ax", states(1, 1))
    shared.keep("ef", states(0, 0, 1))
    assert [shared.longest(configuration)[0] for configuration in ("ab", "cd", "ef")] == [1, 0, 1]


def test_room_is_counted_in_whole_states() -> None:
    assert [SharedLayers(limit).room_for(STATE) for limit in (0, 15, 16, 47, 48)] == [0, 0, 1, 2, 3]
    assert SharedLayers(0).room_for(torch.zeros(0)) == 0


@pytest.mark.parametrize("limit", [0, 15])
def test_nothing_is_kept_that_does_not_fit(limit: int) -> None:
    shared = SharedLayers(limit)
    shared.keep("abc", states(0, 0, 1, 2))
    assert (shared.num_bytes, shared.longest("abc")) == (0, (0, None))


def test_whatever_is_asked_a_state_is_that_of_its_layers() -> None:
    rng = random.Random(0)
    shared = SharedLayers(12 * 16)
    hits = 0
    for _ in range(300):
        configuration = tuple(rng.randrange(2) for _ in range(5))
        first, state = shared.longest(configuration)
        if state is not None:
            assert float(state[0]) == hash(configuration[:first]) % 1000
            hits += 1
        shared.keep(configuration, states(first, *(hash(configuration[:n]) % 1000 for n in range(first, 5))))
        assert shared.num_bytes <= 12 * 16
    assert hits > 100
