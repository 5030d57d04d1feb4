"""Latents that are staged for attention to a selection, against each selected token looked up alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from served_layers.stored_batch import BEFORE, MOST, NEW, WINDOWS, StoredBatch

from kvtuner.runtime_loader.sglang.attention import staged_latents
from kvtuner.runtime_loader.sglang.attention.staged_latents import requests_together

if TYPE_CHECKING:
    from kvtuner.precision import ExactWindow


@pytest.mark.parametrize(
    ("lengths", "most", "together"),
    [
        ([], 10, []),
        ([4], 10, [[4]]),
        ([40], 10, [[40]]),
        ([4, 6, 1, 9, 10, 11, 2, 3], 10, [[4, 6], [1, 9], [10], [11], [2, 3]]),
        ([3, 3, 3], 100, [[3, 3, 3]]),
    ],
)
def test_requests_are_together_that_fit(lengths: list[int], most: int, together: list[list[int]]) -> None:
    assert [lengths[each] for each in requests_together(lengths, most)] == together


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "cache"])
@pytest.mark.parametrize("most", [13, 1000])
def test_new_tokens_read_rows_copies_and_one_another(
    window: ExactWindow | None, is_fresh: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_latents, "STAGED_AT_ONCE", 7)
    monkeypatch.setattr(staged_latents, "PLACED_AT_ONCE", 2)
    batch, seen = StoredBatch(window), 0
    for together in requests_together([past + new for past, new in zip(BEFORE, NEW, strict=True)], most):
        some = batch.requests_of(together)
        selected = batch.selected[some.new]
        places = torch.where(selected >= 0, selected + some.first_places[:, None].int(), selected)
        staged, found = batch.staging.of_requests(some, batch.latents(some.new), places, is_fresh=is_fresh)
        assert torch.equal(found < 0, selected < 0)
        for row, token in enumerate(range(some.new.start, some.new.stop)):
            for column, position in enumerate(selected[row].tolist()):
                if position >= 0:
                    wanted = batch.wanted(token, position, is_fresh=is_fresh)
                    assert torch.equal(staged[found[row, column]], wanted), (token, position)
                    seen += 1
    assert seen == int((batch.selected >= 0).sum())


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "cache"])
def test_without_a_prefix_new_tokens_are_all_there_is(window: ExactWindow | None, is_fresh: bool) -> None:
    batch = StoredBatch(window, (0, 0, 0))
    some = replace(batch.requests_of(slice(0, 3)), all_slots=None)
    places = torch.where(batch.selected >= 0, batch.selected + some.first_places[:, None].int(), batch.selected)
    staged, found = batch.staging.of_requests(some, batch.latents(some.new), places, is_fresh=is_fresh)
    for token in range(some.new.stop):
        for column, position in enumerate(batch.selected[token].tolist()):
            if position >= 0:
                assert torch.equal(staged[found[token, column]], batch.wanted(token, position, is_fresh=is_fresh))


@pytest.mark.parametrize("window", WINDOWS[1:], ids=str)
def test_a_query_for_each_request_reads_rows_and_copies(window: ExactWindow) -> None:
    batch = StoredBatch(window)
    last = torch.tensor([3, 9, 12])  # the new tokens that stand for those that decode
    slots = torch.full((3, MOST), -1, dtype=torch.int32)
    for request in range(3):
        for column, position in enumerate(batch.selected[last[request]].tolist()):
            if position >= 0:
                slots[request, column] = batch.slots[request][position].int()
    staged, found = batch.staging.of_selection(
        slots, batch.selected[last], batch.positions[last], batch.requests, torch.float32
    )
    assert torch.equal(found < 0, slots < 0)
    ring = batch.staging.copies
    assert ring is not None
    for request in range(3):
        for column, position in enumerate(batch.selected[last[request]].tolist()):
            if position < 0:
                continue
            query, kept = int(batch.positions[last[request]]), ring.positions[batch.requests[request]].tolist()
            in_window = position > query - window.residual_length or position < window.sinks
            is_copied = in_window and position in kept
            at = slots[request, column][None].long()
            rows = torch.cat([stored.read(at, torch.float32)[0] for stored in batch.staging.rows], dim=-1)
            wanted = batch.exact[request][position] if is_copied else rows
            assert torch.equal(staged[found[request, column]], wanted), (request, position)
