"""Layers that configurations share run once: the hidden states of a batch after the first layers are kept.

A search tries configurations that are alike; a layer's output depends on the layers before it alone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from torch import Tensor


class SharedLayers:
    """The hidden states of configurations that have run; a configuration is a sequence of hashable layers.

    Within `limit` bytes it keeps what was used last, and of one configuration the states behind its first layers, which
    more of the others share.
    """

    def __init__(self, limit: int) -> None:
        """Keep at most `limit` bytes; 0 keeps nothing."""
        self._limit = limit
        self._states: OrderedDict[tuple[Hashable, ...], Tensor] = OrderedDict()
        self.num_bytes = 0
        """The bytes that are kept."""

    def room_for(self, state: Tensor) -> int:
        """The number of states of this size that can be kept: of a configuration, those behind its first layers."""
        return self._limit // max(1, state.nbytes)

    def longest(self, configuration: Sequence[Hashable]) -> tuple[int, Tensor | None]:
        """The number of first layers that need not run again, and their output; None if all must run."""
        for key in _beginnings(configuration):
            if key in self._states:
                return len(key), self._states[key]
        return 0, None

    def keep(self, configuration: Sequence[Hashable], states: Mapping[int, Tensor]) -> None:
        """Keep states of `configuration`, by the number of layers before them, and use those that are kept."""
        for key in _beginnings(configuration):
            if len(key) in states and key not in self._states:
                self._states[key] = states[len(key)]
                self.num_bytes += states[len(key)].nbytes
            if key in self._states:
                self._states.move_to_end(key)
        while self.num_bytes > self._limit:
            self.num_bytes -= self._states.popitem(last=False)[1].nbytes


def _beginnings(configuration: Sequence[Hashable]) -> list[tuple[Hashable, ...]]:
    """The first layers, the longest part first; all layers are left out, as no configuration is measured twice."""
    return [tuple(configuration[:layers]) for layers in range(len(configuration) - 1, 0, -1)]
