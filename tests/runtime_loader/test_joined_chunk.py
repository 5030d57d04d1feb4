"""A batch's prefixes and new tokens lie in one buffer, request after request, each place taken once."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvtuner.runtime_loader.joined_chunk import JoinedChunk
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
