"""Groups of tokens of a pool's keys per channel, which are packed once requests fill them. Knows nothing of servers.

A group is `token_group` token slots in a row, from a multiple of that on, and holds tokens of one request from such a
position on: pages are whole groups. Its tokens have exact copies until it is full.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.exact_ring import ExactRing, NewTokens
    from kvtuner.runtime_loader.packed_attention import NewKeys, PackedRows


class GroupsOnHost(ABC):
    """An attention whose tensors the host reads, so that it knows which groups are full."""

    @abstractmethod
    def store_side(self, stored: PackedRows, slots: Tensor, states: Tensor) -> None:
        """See `PackedAttention.store_side`."""

    def store_groups(
        self, keys: PackedRows, ring: ExactRing, new: NewTokens, slots: Tensor, chunk: NewKeys | None = None
    ) -> None:
        """See `PackedAttention.store_groups`."""
        group, rows = keys.format.token_group, new.rows.tolist()
        tokens = None if new.tokens is None else new.tokens.tolist()
        for request, slot in enumerate(new.requests.tolist()):
            stored = slots[rows[request] : rows[request + 1]]
            past = len(stored) - (tokens is None)  # rows count a single new token, and no chunk
            start = past // group * group
            states = ring.keys_of(slot, start, len(stored))
            at = stored[start:]
            if tokens is not None and chunk is not None:
                own = slice(tokens[request], tokens[request + 1])
                at, states = torch.cat((at, chunk.slots[own])), torch.cat((states, chunk.states[own].to(states.dtype)))
            if full := len(at) // group * group:
                self.store_side(keys, at[:full], states[:full])
