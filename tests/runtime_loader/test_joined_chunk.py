"""A batch's prefixes and new tokens lie in one buffer, request after request, each place taken once."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvtuner.runtime_loader.joined_chunk import JoinedChunk, first_new_tokens
from kvtuner.runtime_loader.packed_attention import ExtendBounds

CASES = [
    ([(5, 3)], 0), ([(0, 4), (7, 1)], 2), ([(0, 0), (3, 2), (0, 5), (9, 0), (2, 2)], 3), ([(4, 0)], 1), ([(0, 2)], 0),
]  # fmt: skip


@pytest.mark.parametrize(("requests", "padding"), CASES)
def test_each_request_has_its_prefix_and_then_its_new_tokens(requests: list[tuple[int, int]], padding: int) -> None:
    past, new = (torch.tensor([0, *itertools.accumulate(each)]) for each in zip(*requests, strict=True))
    spare = 2  # slots behind the last prefix, which nobody reads
    slots = torch.arange(int(past[-1]) + spare)
    chunk = JoinedChunk.of(ExtendBounds(new, past.int(), slots, 5), int(new[-1]) + padding)
    expected = [
        entry
        for request, (before, count) in enumerate(requests)
        for entry in (
            *(("prefix", int(past[request]) + index) for index in range(before)),
            *(("new", int(new[request]) + index) for index in range(count)),
        )
    ]
    buffer = [("none", 0)] * chunk.num_places
    for index, place in enumerate(chunk.prefix_places[: int(past[-1])].tolist()):
        buffer[place] = ("prefix", index)
    places = chunk.fresh_places.tolist()
    for index, place in enumerate(places[: int(new[-1])]):
        assert buffer[place] == ("none", 0)
        buffer[place] = ("new", index)
    assert buffer[: len(expected)] == expected
    # Tokens that pad a batch have places of their own, behind all requests.
    assert all(len(expected) <= place < chunk.num_places for place in places[int(new[-1]) :])
    assert len(set(places)) == len(places)
    lengths = [before + count for before, count in requests]
    assert chunk.ends.tolist() == [0, *itertools.accumulate(lengths)]
    assert (chunk.ends.dtype, chunk.queries.dtype) == (torch.int32, torch.int32)
    assert chunk.longest >= max(lengths)


@pytest.mark.parametrize("most", [0, 1, 3, 9])
@pytest.mark.parametrize(("requests", "padding"), CASES)
def test_the_first_new_tokens_of_each_request_are_a_batch_of_their_own(
    requests: list[tuple[int, int]], padding: int, most: int
) -> None:
    past, new = (torch.tensor([0, *itertools.accumulate(each)]) for each in zip(*requests, strict=True))
    bounds = ExtendBounds(new.int(), past.int(), torch.arange(int(past[-1])), 5)
    places, first = first_new_tokens(bounds, most, [count for _, count in requests])
    taken = [list(range(start, min(start + most, end))) for start, end in itertools.pairwise(new.tolist())]
    assert places.tolist() == list(itertools.chain.from_iterable(taken))
    assert first.tokens.tolist() == [0, *itertools.accumulate(map(len, taken))]
    assert (first.tokens.dtype, first.longest) == (torch.int32, min(most, 5))
    assert first.slots is bounds.slots and first.prefix is bounds.prefix
