"""Layers that configurations have in common run once: hidden states of one batch behind the first layers of each.

A search tries configurations that are alike; a layer's output depends on the layers before it alone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

Layer = TypeVar("Layer", bound="Hashable")


class SharedLayers(Generic[Layer]):
    """What to do again of a configuration, of which every layer is anything hashable.

    Within `limit` bytes it keeps what was used last, and of one configuration the states behind its first layers, which
    more of the others share.
    """

    def __init__(self, limit: int) -> None:
        """Keep `limit` bytes at most; 0 keeps nothing."""
        self._limit = limit
        self._states: OrderedDict[tuple[Layer, ...], Tensor] = OrderedDict()
        self.num_bytes = 0
        """Bytes kept."""

    def longest(self, configuration: Sequence[Layer]) -> tuple[int, Tensor | None]:
        """How many of its first layers need not run, and their output; None if all must."""
        for layers in range(len(configuration) - 1, 0, -1):
            state = self._states.get(tuple(configuration[:layers]))
            if state is not None:
                return layers, state
        return 0, None

    def keep(self, configuration: Sequence[Layer], first: int, states: Sequence[Tensor]) -> None:
        """Keep the inputs of the layers of `configuration` from `first` on, and use those before them."""
        for layers, state in enumerate(states, start=first):
            if layers and self._limit:
                self._drop(tuple(configuration[:layers]))
                self._states[tuple(configuration[:layers])] = state
                self.num_bytes += _bytes_of(state)
        for layers in range(len(configuration) - 1, 0, -1):
            if tuple(configuration[:layers]) in self._states:
                self._states.move_to_end(tuple(configuration[:layers]))
        while self.num_bytes > self._limit:
            self._drop(next(iter(self._states)))

    def _drop(self, key: tuple[Layer, ...]) -> None:
        if key in self._states:
            self.num_bytes -= _bytes_of(self._states.pop(key))


def _bytes_of(state: Tensor) -> int:
    return state.numel() * state.element_size()
