"""Latents that are staged for attention to a selection, against each selected token looked up alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from kvtuner.precision import ExactWindow
from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.cpu.latent_attention import LatentAttention
from kvtuner.runtime_loader.exact_ring import ExactRings, NewTokens
from kvtuner.runtime_loader.packed_attention import PackedRows
from kvtuner.runtime_loader.row_format import LayerFormat, RowFormat
from kvtuner.runtime_loader.sglang.attention import staged_latents
from kvtuner.runtime_loader.sglang.attention.staged_latents import LatentStaging, NewLatents, requests_together

if TYPE_CHECKING:
    from torch import Tensor

RANK, ROPE, MOST = 32, 6, 5
BEFORE, NEW = (9, 0, 30), (4, 6, 3)
LENGTHS = [before + new for before, new in zip(BEFORE, NEW, strict=True)]
"""The tokens of three requests: before, new ones, and all of them."""
WINDOWS = [None, ExactWindow(5, 0), ExactWindow(0, 3), ExactWindow(4, 2)]


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


class Batch:
    """Three requests whose latents are stored, of some with copies, and a selection of each new token."""

    def __init__(self, window: ExactWindow | None, before: tuple[int, ...] = BEFORE) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = [past + new for past, new in zip(before, NEW, strict=True)]
        self.exact = [torch.randn(length, 1, RANK + ROPE, generator=generator) for length in lengths]
        formats = LayerFormat(RowFormat(1, RANK, QuantSpec(4, group_size=16)), RowFormat(1, ROPE, None))
        sides = (formats.k, formats.v)
        keys, values = (PackedRows.zeros(each, 80, torch.float32, "cpu") for each in sides)
        self.slots = torch.randperm(80, generator=generator)[: sum(lengths)].split(lengths)
        for slots, latents in zip(self.slots, self.exact, strict=True):
            for stored, part in zip((keys, values), latents.split((RANK, ROPE), dim=-1), strict=True):
                stored.write(slots, part)
        self.requests, ring = torch.tensor([2, 0, 3]), None
        if window is not None:
            ring = ExactRings([formats], window, 5, dtype=torch.float32, device="cpu")[0]
            assert ring is not None
            for slot, past, latents in zip(self.requests, before, self.exact, strict=True):
                tokens = NewTokens(slot[None], torch.tensor([0, 0]), torch.tensor([0, past]))
                ring.store(tokens, *latents[:past].split((RANK, ROPE), dim=-1))
            ring.positions[2, :1] = -1  # a token that came from a prefix cache has no copy
        self.staging, self.before = LatentStaging(LatentAttention(), (keys, values), ring), before
        self.positions = torch.tensor(
            [position for past, length in zip(before, lengths, strict=True) for position in range(past, length)]
        )
        self.numbers = torch.arange(3).repeat_interleave(torch.tensor(NEW))
        self.selected = torch.full((sum(NEW), MOST), -1, dtype=torch.int32)
        for row, position in enumerate(self.positions.tolist()):
            some = torch.randperm(position + 1, generator=generator)[:MOST]
            self.selected[row, : len(some)] = some.int()
            self.selected[row, 0] = position

    def new(self, together: slice) -> tuple[slice, NewLatents]:
        """The new tokens of some requests, and their numbers among all."""
        bounds, first = [0, *torch.tensor(NEW).cumsum(0).tolist()], [0]
        for length in (len(self.exact[request]) for request in range(3)[together]):
            first.append(first[-1] + length)
        tokens = slice(bounds[together.start], bounds[together.stop])
        numbers = self.numbers[tokens] - together.start
        fresh = [latents[past:] for latents, past in zip(self.exact[together], self.before[together], strict=True)]
        slots = [of_one[past:] for of_one, past in zip(self.slots[together], self.before[together], strict=True)]
        return tokens, NewLatents(
            latents=torch.cat(fresh), slots=torch.cat(slots), all_slots=torch.cat(self.slots[together]),
            positions=self.positions[tokens], numbers=numbers, first_places=torch.tensor(first)[numbers],
            requests=self.requests[together], before=torch.tensor(self.before[together]),
            bounds=torch.tensor(bounds[together.start : together.stop]) - bounds[together.start],
        )  # fmt: skip

    def wanted(self, token: int, position: int, *, is_fresh: bool) -> Tensor:
        """The latent that a new token reads of a position in its request."""
        request, query = int(self.numbers[token]), int(self.positions[token])
        ring, is_new = self.staging.copies, position >= self.before[request]
        if is_new and is_fresh:
            return self.exact[request][position]
        if ring is not None:
            window, slot = ring.window, int(self.requests[request])
            in_window = position > query - window.residual_length or position < window.sinks
            if in_window and (is_new or position in ring.positions[slot].tolist()):
                return self.exact[request][position]
        slots = self.slots[request][position][None]
        return torch.cat([stored.read(slots, torch.float32)[0] for stored in self.staging.rows], dim=-1)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "cache"])
@pytest.mark.parametrize("most", [13, 1000])
def test_new_tokens_read_rows_copies_and_one_another(
    window: ExactWindow | None, is_fresh: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_latents, "_READ_TOKENS", 7)
    batch, seen = Batch(window), 0
    for together in requests_together(LENGTHS, most):
        tokens, new = batch.new(together)
        selected = batch.selected[tokens]
        places = torch.where(selected >= 0, selected + new.first_places[:, None].int(), selected)
        staged, found = batch.staging.of_requests(new, places, is_fresh=is_fresh)
        assert torch.equal(found < 0, selected < 0)
        for row, token in enumerate(range(tokens.start, tokens.stop)):
            for column, position in enumerate(selected[row].tolist()):
                if position >= 0:
                    wanted = batch.wanted(token, position, is_fresh=is_fresh)
                    assert torch.equal(staged[found[row, column]], wanted), (token, position)
                    seen += 1
    assert seen == int((batch.selected >= 0).sum())


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "cache"])
def test_without_a_prefix_new_tokens_are_all_there_is(window: ExactWindow | None, is_fresh: bool) -> None:
    batch = Batch(window, (0, 0, 0))
    tokens, new = batch.new(slice(0, 3))
    new = replace(new, all_slots=None)
    places = torch.where(batch.selected >= 0, batch.selected + new.first_places[:, None].int(), batch.selected)
    staged, found = batch.staging.of_requests(new, places, is_fresh=is_fresh)
    for token in range(tokens.stop):
        for column, position in enumerate(batch.selected[token].tolist()):
            if position >= 0:
                assert torch.equal(staged[found[token, column]], batch.wanted(token, position, is_fresh=is_fresh))


@pytest.mark.parametrize("window", WINDOWS[1:], ids=str)
def test_a_query_for_each_request_reads_rows_and_copies(window: ExactWindow) -> None:
    batch = Batch(window)
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
