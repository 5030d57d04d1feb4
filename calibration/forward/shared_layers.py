"""Layers that configurations have in common run once: hidden states of one batch behind the first layers of each.

A search tries configurations that are alike; a layer's output depends on the layers before it alone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from torch import Tensor


class SharedLayers:
    """What need not run again of a configuration, whose layers are anything hashable.

    Within `limit` bytes it keeps what was used last, and of one configuration the states behind its first layers, which
    more of the others share.
    """

    def __init__(self, limit: int) -> None:
        """Keep `limit` bytes at most; 0 keeps nothing."""
        self._limit = limit
        self._states: OrderedDict[tuple[Hashable, ...], Tensor] = OrderedDict()
        self.num_bytes = 0
        """Bytes kept."""

    def room_for(self, state: Tensor) -> int:
        """How many states of this size can be kept: of a configuration, those behind its first layers."""
        return self._limit // max(1, state.nbytes)

    def longest(self, configuration: Sequence[Hashable]) -> tuple[int, Tensor | None]:
        """How many of its first layers need not run, and their output; None if all must."""
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
    """The longest first; what follows the last layer is not worth keeping, for no configuration is measured twice."""
    return [tuple(configuration[:layers]) for layers in range(len(configuration) - 1, 0, -1)]
