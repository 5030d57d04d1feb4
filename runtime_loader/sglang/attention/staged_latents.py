"""Latents that are staged in model space, of one layer at a time, for attention to those that an index selects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtuner.runtime_loader.sglang.attention.selected_tokens import ExactPlaces, NewPlaces
from kvtuner.runtime_loader.workspaces import PLACED_AT_ONCE, STAGED_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvtuner.runtime_loader.exact_ring import ExactRing
    from kvtuner.runtime_loader.packed_attention import PackedAttention, PackedRows


def requests_together(lengths: Sequence[int], most_tokens: int) -> list[slice]:
    """The requests that have at most so many tokens together, in order; one that has more stands alone."""
    slices, first, total = [], 0, 0
    for number, length in enumerate(lengths):
        if number > first and total + length > most_tokens:
            slices.append(slice(first, number))
            first, total = number, 0
        total += length
    return [*slices, slice(first, len(lengths))] if lengths else []


@dataclass(frozen=True, slots=True)
class StagedRequests:
    """Some requests of a batch, one after the other, which have new tokens.

    Attributes:
        new: The numbers of their new tokens, among those of the batch.
        first_place: The place of the first of all their tokens, among those of the batch.
        slots: The token slots that new tokens were stored at, [tokens].
        all_slots: Those of all tokens of the requests, one request after the other; None where all of them are new.
        positions: The positions of new tokens, [tokens].
        numbers: The number of each one's request, [tokens].
        first_places: The place of the first token of that request among all of these requests, [tokens].
        requests: The slots of the requests, [requests].
        before: The tokens that each had before, [requests].
        bounds: [requests]; the new tokens of request r begin at ``bounds[r]``.
    """

    new: slice
    first_place: int
    slots: Tensor
    all_slots: Tensor | None
    positions: Tensor
    numbers: Tensor
    first_places: Tensor
    requests: Tensor
    before: Tensor
    bounds: Tensor


@dataclass(frozen=True, slots=True)
class LatentStaging:
    """The staging of a layer's latents.

    Attributes:
        attention: The reader of rows.
        rows: The latents, and the rotary channels beside them.
        copies: The exact copies of the layer; None without any.
    """

    attention: PackedAttention
    rows: tuple[PackedRows, PackedRows]
    copies: ExactRing | None

    def of_requests(
        self, staged: StagedRequests, latents: Tensor, places: Tensor, *, is_fresh: bool
    ) -> tuple[Tensor, Tensor]:
        """All latents of requests, and the places of those that new tokens read.

        Args:
            staged: The requests.
            latents: The latents of new tokens as they are, [tokens, 1, channels of both parts].
            places: The places of what each reads, among all tokens of the requests, [tokens, most], -1 for none; they
                are overwritten.
            is_fresh: Whether new tokens read one another as they are, and not as they were stored.

        Returns:
            Latents [at least all tokens, 1, channels of both parts], and places among these.
        """
        slots = staged.slots if staged.all_slots is None else staged.all_slots
        num_tokens, is_new_alone = len(slots), is_fresh and staged.all_slots is None
        if is_new_alone and self.copies is None:
            return latents, places
        apart = 0 if is_fresh or self.copies is None else len(latents)
        num_copies = self._num_copies(staged.requests)
        out = latents.new_empty(num_tokens + num_copies + apart, *latents.shape[1:])
        if is_new_alone:
            out[:num_tokens] = latents
        else:
            self._read(slots, out[:num_tokens])
            if is_fresh:
                out[(staged.first_places + staged.positions).long()] = latents
        if self.copies is None:
            return out, places
        self._copy(staged.requests, out[num_tokens : num_tokens + num_copies])
        new_places = None
        if apart:
            out[num_tokens + num_copies :] = latents
            new_places = NewPlaces(staged.before, num_tokens + num_copies + staged.bounds - staged.before)
        exact = ExactPlaces(self.copies, staged.requests, num_tokens, new_places)
        for first in range(0, len(places), PLACED_AT_ONCE):
            some = slice(first, first + PLACED_AT_ONCE)
            positions = places[some] - staged.first_places[some, None]
            places[some] = exact.of(places[some], positions, staged.positions[some], staged.numbers[some])
        return out, places

    def of_selection(
        self, slots: Tensor, selected: Tensor, positions: Tensor, requests: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The latents that some queries read, and their places; of a query for each request.

        Sizes follow from those of `slots`, so that a graph can be captured.

        Args:
            slots: The token slots of what each reads, [queries, most], -1 for none.
            selected: The positions of the same.
            positions: The position of each query, [queries].
            requests: The slots of the requests, [queries].
            dtype: The dtype of what is read.

        Returns:
            Latents [more than slots, 1, channels of both parts], and places among these, [queries, most].
        """
        assert self.copies is not None, "without copies rows are read as they are"
        channels = sum(stored.format.head_dim for stored in self.rows)
        staged = torch.empty(
            slots.numel() + self._num_copies(requests), 1, channels, dtype=dtype, device=slots.device
        )  # fmt: skip
        self._read(slots.flatten().clamp(min=0), staged[: slots.numel()])
        self._copy(requests, staged[slots.numel() :])
        places = torch.arange(slots.numel(), dtype=slots.dtype, device=slots.device).view(slots.shape)
        exact = ExactPlaces(self.copies, requests, slots.numel())
        numbers = torch.arange(len(slots), device=slots.device)
        return staged, exact.of(torch.where(slots >= 0, places, -1), selected, positions, numbers)

    def _read(self, slots: Tensor, out: Tensor) -> None:
        """Read both parts of the latents of token slots back into `out` [tokens, 1, channels]."""
        channels = [stored.format.head_dim for stored in self.rows]
        for some, target in zip(slots.split(STAGED_AT_ONCE), out.split(STAGED_AT_ONCE), strict=True):
            for stored, part in zip(self.rows, target.split(channels, dim=-1), strict=True):
                part.copy_(self.attention.read(stored, some, out.dtype))

    def _num_copies(self, requests: Tensor) -> int:
        return 0 if self.copies is None else len(requests) * self.copies.window.num_tokens

    def _copy(self, requests: Tensor, out: Tensor) -> None:
        """Copy the exact copies of requests, one request after the other, into `out` [places, 1, channels]."""
        assert self.copies is not None
        channels = [self.copies.keys.shape[-1], self.copies.values.shape[-1]]
        for copies, part in zip((self.copies.keys, self.copies.values), out.split(channels, dim=-1), strict=True):
            part.copy_(copies[requests.long()].flatten(0, 1))
