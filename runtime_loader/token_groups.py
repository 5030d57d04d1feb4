"""Groups of tokens of a pool's keys per channel, which are packed once requests fill them. Knows nothing of servers.

A group is `token_group` token slots in a row, from a multiple of that on, and holds tokens of one request from such a
position on: pages are whole groups. Its tokens have exact copies until it is full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.exact_ring import ExactRing, NewTokens
    from kvtuner.runtime_loader.packed_attention import PackedAttention, PackedRows


def pack_full_groups(
    attention: PackedAttention, keys: PackedRows, ring: ExactRing, new: NewTokens, slots: Tensor,
    chunks: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Pack the groups that new tokens fill.

    Args:
        attention: The implementation that stores them.
        keys: The rows of a layer's keys.
        ring: The layer's copies, which have those of single new tokens already, and not yet those of `chunks`.
        new: The new tokens.
        slots: The token slots of all requests, by ``new.rows``.
        chunks: The slots [tokens] and the keys [tokens, num_kv_heads, head_dim] of chunks of new tokens.

    Raises:
        CacheError: A copy of a token in a group that is not full is not at hand.
    """
    group, rows = keys.format.token_group, new.rows.tolist()
    tokens = None if new.tokens is None else new.tokens.tolist()
    for request, slot in enumerate(new.requests.tolist()):
        stored = slots[rows[request] : rows[request + 1]]
        past = len(stored) - (tokens is None)  # rows count a single new token, and no chunk
        start = past // group * group
        states = ring.keys_of(slot, start, len(stored))
        at = stored[start:]
        if tokens is not None and chunks is not None:
            chunk = slice(tokens[request], tokens[request + 1])
            at, states = torch.cat((at, chunks[0][chunk])), torch.cat((states, chunks[1][chunk].to(states.dtype)))
        if full := len(at) // group * group:
            attention.store_side(keys, at[:full], states[:full])
