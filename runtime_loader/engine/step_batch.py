"""The tokens of a step, of all requests side by side, and where each finds its keys. Knows no attention or models."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtuner.runtime_loader.packed_attention import ExtendBounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvtuner.runtime_loader.engine.engine_options import EngineAttend
    from kvtuner.runtime_loader.engine.generation import Generation
    from kvtuner.runtime_loader.engine.paged_pool import PagedPool


@dataclass(frozen=True, slots=True)
class StepPart:
    """The requests of a step that attend alike: all decode one token, or all prefill a chunk.

    Attributes:
        requests: Their request slots, int64 [requests].
        tokens: int64 [requests + 1]; request r has the new tokens ``tokens[r]`` to ``tokens[r + 1]`` of the part.
        new_slots: The token slots that new tokens are stored at, int64 [tokens].
        reads: int64 [requests + 1]; and reads the token slots ``read_slots[reads[r]:reads[r + 1]]``: those before its
            chunk, or all, the new one included, where it decodes.
        read_slots: The token slots of all requests, one after the other, int64.
        lengths: The tokens of each request with the new ones, int64 [requests].
        pages: The pages of each request, int32 [requests, pages of the longest].
        longest: The most new tokens of a request.
        is_decoding: Whether each has one new token of its answer, which reads itself as it is stored.
        reads_stored: Whether a chunk reads of itself what its rows give back.
    """

    requests: Tensor
    tokens: Tensor
    new_slots: Tensor
    reads: Tensor
    read_slots: Tensor
    lengths: Tensor
    pages: Tensor
    longest: int
    is_decoding: bool
    reads_stored: bool

    @classmethod
    def of(
        cls, pool: PagedPool, chunks: Sequence[tuple[Generation, int]], *, is_decoding: bool, reads_stored: bool
    ) -> StepPart:
        """The part of some requests with so many new tokens each."""
        # In NumPy on the host, whose calls take a third of the time of torch's on as few numbers as a step has.
        requests = np.array([generation.slot for generation, _ in chunks])
        past = np.array([generation.num_stored for generation, _ in chunks])
        new = np.array([count for _, count in chunks])
        ends = past + new
        read = ends if is_decoding else past

        def on_device(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(pool.device)

        return cls(
            on_device(requests),
            on_device(_bounds(new)),
            on_device(pool.token_slots(*_positions(requests, past, new))),
            on_device(_bounds(read)),
            on_device(pool.token_slots(*_positions(requests, np.zeros_like(past), read))),
            on_device(ends),
            torch.from_numpy(pool.page_table[requests, : -(-int(ends.max()) // pool.shape.page_size)]).to(pool.device),
            int(new.max()),
            is_decoding,
            reads_stored,
        )

    @property
    def bounds(self) -> ExtendBounds:
        """The new tokens, and the slots before them, as `PackedAttention.extend` takes them."""
        return ExtendBounds(self.tokens, self.reads, self.read_slots, self.longest)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A forward: tokens of requests that decode, then chunks of those that prefill.

    Attributes:
        input_ids: int64 [1, tokens].
        positions: int64 [1, tokens].
        parts: The requests that attend alike, in the order of their tokens.
        kept: The places of the tokens whose logits are asked for, int64.
    """

    input_ids: Tensor
    positions: Tensor
    parts: tuple[StepPart, ...]
    kept: Tensor

    @classmethod
    def of(
        cls, pool: PagedPool, scheduled: Sequence[tuple[Generation, int]], kept: Sequence[int], attend: EngineAttend
    ) -> StepBatch:
        """The step of requests with so many new tokens each, those that attend alike side by side."""

        def kind(entry: tuple[Generation, int]) -> tuple[bool, bool]:
            generation, _ = entry
            is_decoding = generation.decodes and attend != "hit"
            is_later = attend == "decode" and generation.num_stored > 0
            return is_decoding, not is_decoding and (attend == "cache" or is_later)

        spans = [(generation, generation.num_stored, count) for generation, count in scheduled]
        tokens = [token for generation, start, count in spans for token in generation.tokens[start : start + count]]
        firsts = [(generation.first_position + start, count) for generation, start, count in spans]
        positions = [position for start, count in firsts for position in range(start, start + count)]
        device = pool.device
        return cls(
            torch.tensor([tokens], device=device),
            torch.tensor([positions], device=device),
            tuple(
                StepPart.of(pool, list(chunks), is_decoding=is_decoding, reads_stored=reads_stored)
                for (is_decoding, reads_stored), chunks in groupby(scheduled, kind)
            ),
            torch.tensor(kept, dtype=torch.int64, device=device),
        )


def kept_tokens(scheduled: Sequence[tuple[Generation, int]]) -> tuple[list[int], list[slice]]:
    """The places in a step of the tokens whose logits are asked for, and the part of them that each request has.

    They are the last token of a request, if the step reaches it, or all of a prompt whose log-probabilities are asked
    for.
    """
    kept: list[int] = []
    of_requests, first = [], 0
    for generation, new in scheduled:
        reads_all = generation.sampling.prompt_logprobs is not None and not generation.decodes
        skipped = 0 if reads_all else new - (new == generation.num_missing)
        of_requests.append(slice(len(kept), len(kept) + new - skipped))
        kept += range(first + skipped, first + new)
        first += new
    return kept, of_requests


def _bounds(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.append(0, counts.cumsum())


def _positions(
    requests: NDArray[np.int64], start: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The request and the position of each of `counts` tokens from `start` on."""
    shift = start - counts.cumsum() + counts
    return requests.repeat(counts), np.arange(counts.sum()) + shift.repeat(counts)
