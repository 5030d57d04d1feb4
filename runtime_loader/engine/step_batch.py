"""The tokens of a step, of all requests side by side, and where each finds its keys. Knows no attention or models."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby, repeat
from operator import add
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtuner.runtime_loader.packed_attention import ExtendBounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvtuner.runtime_loader.engine.engine_options import EngineAttend
    from kvtuner.runtime_loader.engine.generation import Generation
    from kvtuner.runtime_loader.engine.paged_pool import PagedPool


@dataclass(frozen=True, slots=True)
class PagedReads:
    """What requests read, by pages.

    Attributes:
        lengths: The tokens of each request with the new ones, int32 [requests].
        pages: The pages of each request, int32 [requests, pages of the longest].
    """

    lengths: Tensor
    pages: Tensor

    @classmethod
    def of(cls, pool: PagedPool, requests: Sequence[int], lengths: Sequence[int]) -> PagedReads:
        """What the requests in some request slots read, of so many tokens each."""
        pages = torch.from_numpy(pool.pages(requests, max(lengths)))
        return cls(torch.tensor(lengths, dtype=torch.int32, device=pool.device), pages.to(pool.device))


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
        paged: The same by pages; None unless the attention reads pages.
        longest: The most new tokens of a request.
        is_decoding: Whether each has one new token of its answer, which reads itself as it is stored.
        reads_stored: Whether a chunk reads of itself what its rows give back.
    """

    requests: Tensor
    tokens: Tensor
    new_slots: Tensor
    reads: Tensor
    read_slots: Tensor
    paged: PagedReads | None
    longest: int
    is_decoding: bool
    reads_stored: bool

    @property
    def bounds(self) -> ExtendBounds:
        """The new tokens, and the slots before them, as `PackedAttention.extend` takes them."""
        return ExtendBounds(self.tokens, self.reads, self.read_slots, self.longest)


class _HostNumbers:
    """The numbers of a step on the host, which go to the device in two copies: those of Python, and token slots.

    Calls of NumPy and torch are few: between two forwards of a model a processor's caches have lost their code, so that
    a call takes longer than its numbers.
    """

    def __init__(self) -> None:
        self._ints: list[int] = []
        self._int_counts: list[int] = []
        self._slots: list[NDArray[np.int64]] = []
        self._slot_counts: list[int] = []

    def add(self, ints: Sequence[int]) -> int:
        """Put numbers behind the others; returns their place in what `on_device` gives."""
        self._ints += ints
        self._int_counts.append(len(ints))
        return len(self._int_counts) - 1

    def add_slots(self, slots: Iterable[NDArray[np.int64]], count: int) -> int:
        """Put so many token slots behind the others; returns their place in what `on_device` gives."""
        self._slots += slots
        self._slot_counts.append(count)
        return len(self._slot_counts) - 1

    def on_device(self, device: torch.device) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The numbers and the token slots of each call, int64."""
        ints, slots = np.array(self._ints, dtype=np.int64), np.concatenate(self._slots)
        return (
            torch.from_numpy(ints).to(device).split(self._int_counts),
            torch.from_numpy(slots).to(device).split(self._slot_counts),
        )


@dataclass(frozen=True, slots=True)
class _PartOnHost:
    """A part whose numbers are on the host, by their places there."""

    requests: int
    tokens: int
    new_slots: int
    reads: int
    read_slots: int
    paged: PagedReads | None
    longest: int
    is_decoding: bool
    reads_stored: bool

    @classmethod
    def of(
        cls, pool: PagedPool, chunks: Sequence[tuple[Generation, int]], numbers: _HostNumbers, kind: tuple[bool, bool],
        *, with_pages: bool,
    ) -> _PartOnHost:  # fmt: skip
        """The part of some requests with so many new tokens each."""
        is_decoding, reads_stored = kind
        requests = [generation.slot or 0 for generation, _ in chunks]
        past = [generation.num_stored for generation, _ in chunks]
        new = [count for _, count in chunks]
        ends = list(map(add, past, new))
        read = ends if is_decoding else past
        bounds, bounds_of_read = list(accumulate(new, initial=0)), list(accumulate(read, initial=0))
        return cls(
            numbers.add(requests),
            numbers.add(bounds),
            numbers.add_slots(map(pool.token_slots, requests, past, ends), bounds[-1]),
            numbers.add(bounds_of_read),
            numbers.add_slots(map(pool.token_slots, requests, repeat(0), read), bounds_of_read[-1]),
            PagedReads.of(pool, requests, ends) if with_pages else None,
            max(new),
            is_decoding,
            reads_stored,
        )

    def on_device(self, ints: Sequence[Tensor], slots: Sequence[Tensor]) -> StepPart:
        """The part, of all numbers of its step."""
        return StepPart(
            ints[self.requests], ints[self.tokens], slots[self.new_slots], ints[self.reads], slots[self.read_slots],
            self.paged, self.longest, self.is_decoding, self.reads_stored,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A forward: tokens of requests that decode, then chunks of those that prefill.

    Attributes:
        input_ids: int64 [1, tokens].
        positions: int64 [1, tokens].
        parts: The requests that attend alike, in the order of their tokens.
        kept: The places of the tokens whose logits are asked for, int64; None for all.
    """

    input_ids: Tensor
    positions: Tensor
    parts: tuple[StepPart, ...]
    kept: Tensor | None

    @classmethod
    def of(
        cls, pool: PagedPool, scheduled: Sequence[tuple[Generation, int]], kept: Sequence[int], attend: EngineAttend,
        *, with_pages: bool,
    ) -> StepBatch:  # fmt: skip
        """The step of requests with so many new tokens each, those that attend alike side by side."""

        def kind(entry: tuple[Generation, int]) -> tuple[bool, bool]:
            generation, _ = entry
            is_decoding = generation.decodes and attend != "hit"
            is_later = attend == "decode" and generation.num_stored > 0
            return is_decoding, not is_decoding and (attend == "cache" or is_later)

        numbers = _HostNumbers()
        spans = [(generation, generation.num_stored, count) for generation, count in scheduled]
        input_ids = [token for each, start, count in spans for token in each.tokens[start : start + count]]
        firsts = [(each.first_position + start, count) for each, start, count in spans]
        tokens = numbers.add(input_ids)
        positions = numbers.add([position for start, count in firsts for position in range(start, start + count)])
        of_kept = numbers.add(kept)
        on_host = [
            _PartOnHost.of(pool, list(chunks), numbers, of_kind, with_pages=with_pages)
            for of_kind, chunks in groupby(scheduled, kind)
        ]
        ints, slots = numbers.on_device(pool.device)
        return cls(
            ints[tokens][None],
            ints[positions][None],
            tuple(part.on_device(ints, slots) for part in on_host),
            ints[of_kept] if len(kept) < len(input_ids) else None,
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
