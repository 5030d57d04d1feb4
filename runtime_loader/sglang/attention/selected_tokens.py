"""The tokens that an index selects, as attention takes them: lists of packed rows, or places of staged latents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.exact_ring import ExactRing


def as_lists(slots: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds and token slots of queries, one list after the other, of `slots` [queries, most] with -1 for none.

    Sizes follow from those of `slots`, so that a graph can be captured; behind the last list there is anything.
    """
    is_slot = slots.flatten() >= 0
    bounds = slots.new_zeros(len(slots) + 1, dtype=torch.int32)
    bounds[1:] = is_slot.view(slots.shape).sum(dim=1).cumsum(0)
    places = torch.where(is_slot, is_slot.cumsum(0) - 1, slots.numel())
    lists = slots.new_zeros(slots.numel() + 1, dtype=torch.int64)
    lists.scatter_(0, places, slots.flatten().long())
    return bounds, lists


@dataclass(frozen=True)
class DecodedSelection:
    """The tokens that queries read that decode together, by one index, for all layers that share it.

    Attributes:
        positions: Their positions as the index gives them, [queries, most], -1 for none.
        slots: Their token slots, [queries, most], -1 for none.
    """

    positions: Tensor
    slots: Tensor

    @cached_property
    def lists(self) -> tuple[Tensor, Tensor]:
        """The bounds and token slots of queries as `as_lists` gives them, made for the first layer that asks."""
        return as_lists(self.slots)


@dataclass(frozen=True, slots=True)
class NewPlaces:
    """The places of new tokens as they are, among staged latents of which others stand where they are stored.

    Attributes:
        before: The tokens that each request had before, [requests].
        first: The place that its token 0 would have if all of them were new, [requests].
    """

    before: Tensor
    first: Tensor


@dataclass(frozen=True, slots=True)
class ExactPlaces:
    """The places, among staged latents, of those that queries read under an exact window.

    Attributes:
        ring: The copies of the layer.
        slots: The slots of the requests, [requests], whose copies stand one after the other.
        first_copy: The place of the first.
        new: The new tokens; None where all of them are staged as they are.
    """

    ring: ExactRing
    slots: Tensor
    first_copy: int
    new: NewPlaces | None = None

    def of(self, places: Tensor, positions: Tensor, queries: Tensor, requests: Tensor) -> Tensor:
        """The places of selected tokens, those of copies at hand and of new tokens in the window among them.

        Args:
            places: The places otherwise, [queries, most], -1 for none.
            positions: The tokens' positions in their requests, [queries, most]; anything for none.
            queries: The position of each query, [queries].
            requests: The number of its request in the batch, [queries].
        """
        requests = requests.long()
        window = self.ring.window
        at = self.ring.places(positions.clamp(min=0)).clamp(max=window.num_tokens - 1).long()  # of sinks alone
        is_exact = positions > queries[:, None] - window.residual_length
        is_exact |= positions < window.sinks
        is_exact &= places >= 0
        has_copy = self.ring.positions[self.slots.long()[requests][:, None], at] == positions
        copies = self.first_copy + window.num_tokens * requests[:, None] + at
        found = torch.where(is_exact & has_copy, copies.to(places.dtype), places)
        if self.new is None:
            return found
        is_new = positions >= self.new.before[requests][:, None]
        new = positions + self.new.first[requests][:, None]
        return torch.where(is_exact & is_new, new.to(places.dtype), found)
