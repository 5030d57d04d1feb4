from __future__ import annotations

import pytest
import torch

from kvtuner.calibration.batches import batches

IDS = torch.arange(7 * 16).reshape(7, 16)


def positions(**changes) -> torch.Tensor:
    arguments = {"context_length": 512, "offsets": "random", "seed": 3, "batch_size": 2} | changes
    return torch.cat([batch.position_ids for batch in batches(IDS, **arguments)])


@pytest.mark.parametrize("batch_size", [1, 2, 7, 10])
def test_every_sequence_comes_once_in_order(batch_size) -> None:
    found = list(batches(IDS, 512, offsets="random", seed=0, batch_size=batch_size))
    assert torch.equal(torch.cat([batch.input_ids for batch in found]), IDS)
    assert [batch.index for batch in found] == list(range(-(-7 // batch_size)))
    assert all(batch.num_tokens == batch.position_ids.numel() for batch in found)
    assert sum(batch.num_tokens for batch in found) == IDS.numel()


@pytest.mark.parametrize("offsets", ["random", "small", "large"])
def test_positions_are_consecutive_and_inside_the_context(offsets) -> None:
    found = positions(offsets=offsets)
    assert (found.diff(dim=1) == 1).all()
    assert found.min() >= 0
    assert found.max() < 512


def test_small_and_large_offsets_are_the_ends_of_the_context() -> None:
    assert (positions(offsets="small")[:, 0] == 0).all()
    assert (positions(offsets="large")[:, -1] == 511).all()


def test_random_offsets_follow_the_seed_and_not_the_batch_size() -> None:
    assert torch.equal(positions(batch_size=1), positions(batch_size=3))
    assert not torch.equal(positions(), positions(seed=4))


def test_random_offsets_cover_the_whole_context() -> None:
    ids = torch.zeros(4000, 16, dtype=torch.int64)
    starts = torch.cat([b.position_ids[:, 0] for b in batches(ids, 64, offsets="random", seed=0, batch_size=500)])
    assert set(starts.tolist()) == set(range(64 - 16 + 1))


@pytest.mark.parametrize("seed", range(20))
def test_every_equal_part_of_the_context_has_one_random_offset(seed) -> None:
    ids = torch.zeros(6, 10, dtype=torch.int64)
    found = torch.cat([batch.position_ids[:, 0] for batch in batches(ids, 129, offsets="random", seed=seed)])
    assert sorted((found // 20).tolist()) == list(range(6))  # 120 places to begin in 6 parts


@pytest.mark.parametrize("offsets", ["random", "small", "large"])
def test_sequences_as_long_as_the_context_begin_at_zero(offsets) -> None:
    assert (positions(offsets=offsets, context_length=16)[:, 0] == 0).all()
