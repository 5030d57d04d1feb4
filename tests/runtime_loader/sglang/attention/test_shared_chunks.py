"""The chunks of layers that others read, in one forward and from one to the next."""

from __future__ import annotations

import pytest
import torch

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.attention.shared_chunks import SharedChunk, SharedChunks


def chunk(number: float) -> SharedChunk:
    return SharedChunk(torch.full((3, 2, 4), number), torch.full((3, 2, 4), -number), torch.arange(3))


def test_each_reader_gets_the_chunk_of_its_own_layer_until_the_last() -> None:
    chunks = SharedChunks({2: 2, 5: 1})
    for number in (1.0, 10.0):  # of one forward and of the next
        chunks.keep(2, chunk(number))
        chunks.keep(5, chunk(number + 1))
        assert chunks.is_read_again(2) and chunks.is_read_again(5)
        assert chunks.take(2).k.unique().item() == number
        assert chunks.take(5).v.unique().item() == -number - 1
        assert chunks.is_read_again(2) and not chunks.is_read_again(5)
        assert chunks.take(2).v.unique().item() == -number
        assert not chunks.is_read_again(2)


def test_a_layer_that_none_reads_is_not_kept() -> None:
    chunks = SharedChunks({2: 1})
    chunks.keep(0, chunk(1.0))
    assert not chunks.is_read_again(0)
    with pytest.raises(ServingError, match="reads those of layer 0, and by its configuration none is to come"):
        chunks.take(0)


def test_what_is_kept_stays_where_memory_is_taken_again() -> None:
    chunks, fresh = SharedChunks({2: 1}), chunk(1.0)
    chunks.keep(2, fresh)
    fresh.k.fill_(7)
    fresh.v.fill_(7)
    assert chunks.take(2).k.unique().item() == 1
    assert fresh.stored_at is not None


def test_more_readers_or_keys_than_configured_are_refused() -> None:
    chunks = SharedChunks({2: 1})
    with pytest.raises(ServingError, match="none is to come; serve it without a profile"):
        chunks.take(2)
    chunks.keep(2, chunk(1.0))
    with pytest.raises(ServingError, match="gives keys to layer 2 twice, of which 1 others read the first ones"):
        chunks.keep(2, chunk(2.0))
    chunks.take(2)
    with pytest.raises(ServingError, match="none is to come"):
        chunks.take(2)
