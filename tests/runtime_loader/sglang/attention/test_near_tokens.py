"""What tokens read by chunks, and of images within windows, token by token."""

from __future__ import annotations

import pytest
import torch

from kvtuner.runtime_loader.packed_attention import ChunkMask
from kvtuner.runtime_loader.sglang.attention.near_tokens import ChunkPieces, cut_before_windows, tokens_of_last_chunk

BATCHES = [
    ((0,), (1,)), ((0, 0), (7, 24)), ((0, 5, 23, 24, 25), (60, 19, 1, 24, 23)), ((47, 100, 3), (2, 77, 0)),
]  # fmt: skip
"""Tokens of requests that are there already, and new ones."""
REQUESTS = ((0, 9, (2, 8)), (30, 12, (31, 41)), (4, 3, (0, 0)), (7, 1, (0, 0)))
"""Tokens that are there, new ones, and the first of an image with the first behind it, among all."""


def read_by(token: int, size: int) -> list[int]:
    """The tokens that one reads: those of its chunk up to itself."""
    return [other for other in range(token + 1) if other // size == token // size]


@pytest.mark.parametrize("size", [1, 7, 24])
@pytest.mark.parametrize(("prefixes", "lengths"), BATCHES)
def test_a_token_of_a_piece_reads_its_chunk_alone(
    prefixes: tuple[int, ...], lengths: tuple[int, ...], size: int
) -> None:
    pieces = ChunkPieces.of(prefixes, lengths, size, "cpu")
    bounds, earlier = pieces.bounds.tolist(), pieces.earlier.tolist()
    assert pieces.bounds.diff().tolist() == pieces.lengths
    # What a kernel gets: the slots of each request's last chunk so far, one request after the other.
    slots = [(request, token) for request, prefix in enumerate(prefixes) for token in read_by(prefix - 1, size)]
    slots = [(request, token) for request, token in slots if prefixes[request] // size == token // size]
    new = [
        (request, prefix + token)
        for request, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True))
        for token in range(length)
    ]
    assert bounds[-1] == len(new)
    assert earlier[-1] == len(slots)
    for piece in range(len(pieces.lengths)):
        before, own = slots[earlier[piece] : earlier[piece + 1]], new[bounds[piece] : bounds[piece + 1]]
        for place, (request, token) in enumerate(own):
            assert [*before, *own[: place + 1]] == [(request, other) for other in read_by(token, size)]


@pytest.mark.parametrize("size", [1, 7, 24])
def test_the_last_token_of_a_request_reads_what_its_chunk_has(size: int) -> None:
    lengths = torch.arange(60)
    expected = [len(read_by(length - 1, size)) for length in range(60)]
    assert tokens_of_last_chunk(lengths, size).tolist() == expected


@pytest.mark.parametrize("window", [1, 3, 5, 40])
def test_each_token_reads_its_window_and_later_ones_of_its_image(window: int) -> None:
    def reads(token: int, other: int, image: tuple[int, int]) -> bool:
        is_together = all(image[0] <= each < image[1] for each in (token, other))
        return other <= token or is_together

    flat, starts = [], [0]
    for prefix, length, image in REQUESTS:
        total = range(prefix + length)
        flat += [reads(token, other, image) for token in total[prefix:] for other in total]
        starts.append(len(flat))
    given = ChunkMask(torch.tensor(flat), torch.tensor(starts))
    cut_before_windows(given, [prefix for prefix, _, _ in REQUESTS], [length for _, length, _ in REQUESTS], window)
    for request, (prefix, length, image) in enumerate(REQUESTS):
        total = range(prefix + length)
        part = given.mask[starts[request] : starts[request + 1]].view(length, len(total))
        for place, token in enumerate(total[prefix:]):
            assert part[place].tolist() == [reads(token, other, image) and other > token - window for other in total]
