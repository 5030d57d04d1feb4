"""The tokens that an index selects become one list for each query, or places of staged latents."""

from __future__ import annotations

import pytest
import torch

from kvtuner.precision import ExactWindow
from kvtuner.runtime_loader.exact_ring import EMPTY, ExactRing
from kvtuner.runtime_loader.sglang.attention.selected_tokens import ExactPlaces, NewPlaces, as_lists


def test_lists_follow_one_another_in_the_order_of_selection_and_leave_none_out() -> None:
    generator = torch.Generator().manual_seed(0)
    for queries, most in ((1, 1), (3, 7), (5, 64), (2, 2048)):
        slots = torch.randint(-2, 9000, (queries, most), generator=generator).clamp(min=-1).to(torch.int32)
        slots[0, -1] = -1
        if queries > 1:
            slots[1] = -1  # of a request that only fills a graph
        before = slots.clone()
        bounds, lists = as_lists(slots)
        assert torch.equal(slots, before)
        assert (bounds.dtype, lists.dtype) == (torch.int32, torch.int64)
        assert bounds.tolist()[0] == 0
        for query, (begin, end) in enumerate(zip(bounds.tolist()[:-1], bounds.tolist()[1:], strict=True)):
            assert lists[begin:end].tolist() == [slot for slot in slots[query].tolist() if slot >= 0]


def test_sizes_follow_from_the_number_of_queries_alone() -> None:
    few, many = (as_lists(torch.full((4, 16), slot, dtype=torch.int32)) for slot in (-1, 3))
    assert [x.shape for x in few] == [x.shape for x in many]
    assert few[0].tolist() == [0] * 5
    assert many[0].tolist() == [0, 16, 32, 48, 64]


@pytest.mark.parametrize("window", [ExactWindow(5, 0), ExactWindow(0, 3), ExactWindow(4, 2)], ids=str)
@pytest.mark.parametrize("attend", ["fresh", "cache"])
def test_a_query_reads_copies_at_hand_and_new_tokens_in_its_window_exactly(attend: str, window: ExactWindow) -> None:
    """Against each selected token looked at alone, of requests with and without a prefix, some copies missing."""
    generator = torch.Generator().manual_seed(0)
    before, lengths, slots = [9, 0, 30], [4, 6, 3], torch.tensor([2, 0, 3])
    positions = torch.full((5, window.num_tokens), EMPTY, dtype=torch.int32)
    ring = ExactRing(
        torch.zeros(5, window.num_tokens, 1, 8), torch.zeros(5, window.num_tokens, 1, 2), positions, window
    )
    for slot, past in zip(slots.tolist(), before, strict=True):
        kept = [p for p in range(past) if p < window.sinks or p >= past - window.residual_length]
        for position in kept[1:]:  # the first of them came from a prefix cache, without a copy
            positions[slot, ring.places(torch.tensor(position))] = position
    first = [0, 13, 19]  # of each request, among all staged tokens
    staged, copies = 13 + 6 + 33, 3 * window.num_tokens
    new = None
    if attend == "cache":
        starts = torch.tensor([0, 4, 10])
        new = NewPlaces(torch.tensor(before), staged + copies + starts - torch.tensor(before))
    requests = torch.tensor([0] * 4 + [1] * 6 + [2] * 3, dtype=torch.int32)
    queries = torch.tensor([p + i for p, n in zip(before, lengths, strict=True) for i in range(n)], dtype=torch.int32)
    selected = torch.full((13, 7), -1, dtype=torch.int32)
    for row, position in enumerate(queries.tolist()):
        some = torch.randperm(position + 1, generator=generator)[:7]
        selected[row, : len(some)] = some.int()
        selected[row, 0] = position
    offsets = torch.tensor(first, dtype=torch.int32)[requests.long()][:, None]
    places = torch.where(selected >= 0, selected + offsets, -1)
    found = ExactPlaces(ring, slots, staged, new).of(places, places - offsets, queries, requests)
    assert found.dtype == torch.int32
    moved = 0
    for row, (query, request) in enumerate(zip(queries.tolist(), requests.tolist(), strict=True)):
        for column, position in enumerate(selected[row].tolist()):
            wanted = -1 if position < 0 else first[request] + position
            if position >= 0 and (position > query - window.residual_length or position < window.sinks):
                place = int(ring.places(torch.tensor(position)))
                if position >= before[request]:
                    if attend == "cache":
                        wanted = staged + copies + [0, 4, 10][request] + position - before[request]
                elif positions[slots[request], place] == position:
                    wanted = staged + request * window.num_tokens + place
            moved += wanted >= staged
            assert found[row, column] == wanted, (row, column)
    assert moved > 3
