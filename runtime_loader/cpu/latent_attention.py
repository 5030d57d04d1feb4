"""Attention over packed latents (MLA) in plain torch: queries that are absorbed read a latent as key and as value.

A layer's latents stand as keys, and its rotary channels as values, as in `LayerFormat`. Queries have both, in this
order, and outputs the channels of a latent. Rows are read back a block of tokens at a time, once for all heads.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from kvtuner.runtime_loader.torch_attention import (
    BLOCK_KEYS,
    TorchAttention,
    TorchLayer,
    TorchNumbers,
    TorchPart,
    TorchStates,
    by_kv_head,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from kvtuner.runtime_loader.packed_attention import PackedRows, ScoreScaling


class LatentAttention(TorchAttention):
    """`PackedAttention` over latents: `q` is [.., num_heads, latent + rotary channels], `k` and `v` are both parts."""

    def layer_of(self, keys: PackedRows, values: PackedRows, scores: ScoreScaling, *, shares_mean: bool) -> TorchLayer:
        """What reads the latents and rotary channels of a layer."""
        return _LatentLayer(keys, values, scores, shares_mean)


class _LatentLayer(TorchLayer):
    """A layer whose latents are keys beside rotary channels, and values alone."""

    @property
    def channels(self) -> int:
        return self.keys.format.head_dim

    def of_rows(self, q: Tensor, slots: Tensor, hidden: Tensor | None = None) -> TorchPart:
        def blocks() -> Iterator[tuple[slice, TorchNumbers, Callable[[], TorchNumbers]]]:
            for start in range(0, len(slots), BLOCK_KEYS):
                read = slots[start : start + BLOCK_KEYS]
                states = joined(*(stored.read(read, torch.float32) for stored in (self.keys, self.values)))
                tokens = slice(start, start + len(read))
                yield tokens, TorchNumbers.of_states(states.k), partial(TorchNumbers.of_states, states.v)

        return TorchPart(by_kv_head(q, 1), blocks, hidden, in_model_space=True)

    def of_states(self, q: Tensor, states: TorchStates, hidden: Tensor) -> TorchPart:
        return super().of_states(q, joined(*states), hidden)


def joined(latents: Tensor, rotary: Tensor) -> TorchStates:
    """The keys and values of latents [tokens, 1, channels] and the rotary channels beside them, likewise."""
    return TorchStates(torch.cat((latents, rotary), dim=-1), latents)
