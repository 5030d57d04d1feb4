"""Chunks of new tokens with their prefixes: the places of both in one buffer, request after request.

Knows nothing of how rows are read or who attends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvtuner.runtime_loader.packed_attention import ExtendBounds


@dataclass(frozen=True, slots=True)
class JoinedChunk:
    """The places of a batch's tokens in a buffer that has a request's prefix before its new tokens.

    Attributes:
        prefix_places: The places of prefixes, in the order of their slots, int64 [slots].
        fresh_places: The places of new tokens, int64 [tokens].
        ends: The bounds of requests in the buffer, int32 [requests + 1].
        queries: The bounds of requests among new tokens, int32 [requests + 1].
        num_places: The places of the buffer, those of padding included.
        longest: The most tokens of a request, or a number above it.
    """

    prefix_places: Tensor
    fresh_places: Tensor
    ends: Tensor
    queries: Tensor
    num_places: int
    longest: int

    @classmethod
    def of(cls, bounds: ExtendBounds, num_tokens: int, longest: int | None = None) -> JoinedChunk:
        """Place a batch of `num_tokens` new tokens, with those that pad it, without waiting for the device."""
        tokens, prefix = bounds.tokens.long(), bounds.prefix[: len(bounds.tokens)].long()
        # A prefix lies behind the new tokens of requests before, new tokens behind the prefixes up to their own.
        return cls(
            _shifted(len(bounds.slots), prefix, tokens), _shifted(num_tokens, tokens, prefix[1:]),
            ends=(tokens + prefix).int(), queries=tokens.int(), num_places=len(bounds.slots) + num_tokens,
            longest=len(bounds.slots) + bounds.longest if longest is None else longest,
        )  # fmt: skip


def first_new_tokens(bounds: ExtendBounds, most: int, lengths: Sequence[int]) -> tuple[Tensor, ExtendBounds]:
    """A batch of the first new tokens of each request, at most `most`: their places among all, and its bounds.

    The new tokens of each request are `lengths`, which the host knows, so that the device is not asked.
    """
    tokens = bounds.tokens.long()
    ends = torch.cat((tokens[:1], tokens[0] + tokens.diff().clamp(max=most).cumsum(0)))
    places = _shifted(sum(min(length, most) for length in lengths), ends, tokens[:-1] - ends[:-1])
    return places, replace(bounds, tokens=ends.to(bounds.tokens.dtype), longest=min(most, bounds.longest))


def _shifted(count: int, ends: Tensor, before: Tensor) -> Tensor:
    """Indices up to a count, each shifted by what lies before its request; those of no request as the last one's."""
    index = torch.arange(count, device=ends.device)
    request = torch.searchsorted(ends[1:].contiguous(), index, right=True).clamp_(max=len(ends) - 2)
    return index + before[request]
