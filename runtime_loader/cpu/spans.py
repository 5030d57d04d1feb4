"""The tokens that each query of a batch reads from rows, from new states and from exact copies. Knows no library."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvtuner.errors import CacheError

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.exact_ring import WindowReads
    from kvtuner.runtime_loader.packed_attention import ChunkMask, ExtendBounds


@dataclass(frozen=True, slots=True)
class Spans:
    """The tokens of each request, and those of them that each of its queries reads. All tensors are int64.

    Attributes:
        tokens: [requests + 1]; request r has ``tokens[r]`` to ``tokens[r + 1]``.
        queries: [requests + 1]; and the queries ``queries[r]`` to ``queries[r + 1]``.
        slots: The token slots of all tokens; None where they are rows.
        first: [queries]; the first token of its request that a query reads; None where it reads from the start on.
        last: [queries]; the token behind the last that it reads; None where it reads to the end.
    """

    tokens: Tensor
    queries: Tensor
    slots: Tensor | None = None
    first: Tensor | None = None
    last: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """The tokens of all requests."""
        return int(self.tokens[-1] - self.tokens[0])


class ChunkReads(NamedTuple):
    """What the queries of a chunk read, of which each reads a token once.

    Attributes:
        rows: The prefixes by their rows.
        fresh: New tokens as they are.
        copies: The prefixes by their copies, whose slots are places of all request slots, one after the other.
        stored: New tokens as rows give them back.
    """

    rows: Spans
    fresh: list[Spans]
    copies: list[Spans]
    stored: list[Spans]


@dataclass(frozen=True)
class Chunk:
    """New tokens of some requests behind their stored prefixes.

    Attributes:
        tokens: int64 [requests + 1]; request r has the new tokens ``tokens[r]`` to ``tokens[r + 1]``.
        prefix: int64 [requests + 1]; and the prefix ``slots[prefix[r]:prefix[r + 1]]``.
        slots: int64; the token slots of all prefixes.
        mask: The new tokens that each reads, where that is not all before it.
    """

    tokens: Tensor
    prefix: Tensor
    slots: Tensor
    mask: ChunkMask | None = None

    @classmethod
    def of(cls, bounds: ExtendBounds) -> Chunk:
        """The chunk that bounds describe, once they were checked."""
        num_requests = len(bounds.tokens) - 1
        tokens, prefix = (bounds_of(each, num_requests) for each in (bounds.tokens, bounds.prefix))
        return cls(tokens, prefix, bounds.slots.to(torch.int64).contiguous(), bounds.mask)

    def is_alone(self, num_queries: int) -> bool:
        """Whether no request has a prefix, and all queries are of new tokens in a row."""
        return self.mask is None and bool(self.prefix[0] == self.prefix[-1]) and int(self.tokens[-1]) == num_queries

    @cached_property
    def _request(self) -> Tensor:
        """The request of each query."""
        return torch.arange(len(self.tokens) - 1).repeat_interleave(self.tokens.diff().clamp(min=0))

    @cached_property
    def _past(self) -> Tensor:
        """The tokens before the chunk of each query."""
        return self.prefix.diff()[self._request]

    @cached_property
    def _ends(self) -> Tensor:
        """The new tokens that each query reads: those of its request up to its own."""
        return torch.arange(1, len(self._request) + 1) - self.tokens[self._request]

    def _near(self, residual_length: int) -> Tensor:
        """The position of the first token that each query reads exactly, as far as it is at hand."""
        return (self._past + self._ends - residual_length).clamp(min=0)

    def reads(self, window: WindowReads | None) -> ChunkReads | None:
        """What each query reads, causally, and under a window its near tokens and sinks exactly.

        None where the copies at hand behind the sinks are not the last tokens of a prefix without a gap, so that no
        two bounds tell them from rows.
        """
        if window is None:
            fresh = self._causal() if self.mask is None else [self._of_mask(self.mask)]
            return ChunkReads(Spans(self.prefix, self.tokens, self.slots), fresh, [], [])
        assert self.mask is None
        prefix = self._prefix_under(window)
        if prefix is None:
            return None
        fresh, stored = (self._causal(), []) if window.stored is None else self._new_tokens_under(window)
        return ChunkReads(prefix[0], fresh, prefix[1], stored)

    def _causal(self) -> list[Spans]:
        return [Spans(self.tokens, self.tokens, last=self._ends)]

    def _of_mask(self, mask: ChunkMask) -> Spans:
        """The new tokens that each reads: a request of its own, whose slots are places of new tokens."""
        starts, counts, past = self.tokens.tolist(), self.tokens.diff().tolist(), self.prefix.diff().tolist()
        lengths, slots = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for request, (num_past, count) in enumerate(zip(past, counts, strict=True)):
            read = mask.of_request(request, num_past, count)
            lengths.append(read.sum(1))
            slots.append(starts[request] + read.nonzero()[:, 1])
        return Spans(_ends(torch.cat(lengths)), torch.arange(len(self._request) + 1), torch.cat(slots))

    def _new_tokens_under(self, window: WindowReads) -> tuple[list[Spans], list[Spans]]:
        """The new tokens that each query reads as they are, and those that it reads as rows give them back."""
        near = (self._near(window.ring.window.residual_length) - self._past).clamp(min=0)
        sinks = torch.minimum((window.ring.window.sinks - self._past).clamp(min=0), near)
        exact = [Spans(self.tokens, self.tokens, first=near, last=self._ends)]
        if sinks.any():
            exact.append(Spans(self.tokens, self.tokens, last=sinks))
        return exact, [Spans(self.tokens, self.tokens, first=sinks, last=near)]

    def _prefix_under(self, window: WindowReads) -> tuple[Spans, list[Spans]] | None:
        """The rows and the copies of the prefixes that each query reads; None as for `reads`."""
        ring, requests = window.ring, window.requests.long()
        length = self.prefix.diff()
        positions, order = ring.positions[requests].long().sort(dim=1)  # [requests, places]
        places = requests.unsqueeze(1) * positions.shape[1] + order
        at_hand = (positions >= 0) & (positions < length.unsqueeze(1))
        is_sink = at_hand & (positions < ring.window.sinks)
        is_recent = at_hand & ~is_sink
        num_sinks, num_recent = is_sink.sum(1), is_recent.sum(1)
        start = length - num_recent
        if bool((is_recent & (positions < start.unsqueeze(1))).any()):
            return None
        kept = torch.ones(len(self.slots), dtype=torch.bool)
        kept[(self.prefix[:-1].unsqueeze(1) + positions)[is_sink]] = False
        first, last = int(self.prefix[0]), int(self.prefix[-1])
        near = torch.maximum(self._near(ring.window.residual_length), start[self._request])
        near = torch.minimum(near, self._past)
        rows = Spans(
            _ends(length - num_sinks),
            self.tokens,
            self.slots[first:last][kept[first:last]],
            last=near - num_sinks[self._request],
        )
        copies = [
            Spans(_ends(num_recent), self.tokens, places[is_recent], first=near - start[self._request]),
            Spans(_ends(num_sinks), self.tokens, places[is_sink]),
        ]
        return rows, [spans for spans in copies if spans.num_tokens]


def bounds_of(indptr: Tensor, num_requests: int) -> Tensor:
    """The bounds of requests, int64 [requests + 1]; `CacheError` where there are fewer."""
    bounds = indptr[: num_requests + 1].to(torch.int64).contiguous()
    if len(bounds) <= num_requests:
        raise CacheError(f"{num_requests} requests need {num_requests + 1} bounds, but {len(bounds)} are given")
    return bounds


def _ends(lengths: Tensor) -> Tensor:
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
