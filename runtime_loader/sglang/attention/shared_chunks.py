"""The new keys and values of layers that others read, kept from the layer that stores them to its last reader.

SGLang gives a reader the id of the layer that stores and no keys, and would look for those of a chunk in the pool,
where a packed layer has rows. Knows nothing of how they are attended to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtuner.errors import ServingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedChunk:
    """The keys and values [tokens, heads, channels] of a chunk, and the token slots where they were stored, if any."""

    k: Tensor
    v: Tensor
    stored_at: Tensor | None


class SharedChunks:
    """The chunks of the forward that runs, by the layer that stores them; `num_readers` are the others that read it."""

    def __init__(self, num_readers: Mapping[int, int]) -> None:
        self._num_readers = dict(num_readers)
        self._to_come = dict.fromkeys(num_readers, 0)
        self._chunks: dict[int, SharedChunk] = {}

    def keep(self, layer_id: int, chunk: SharedChunk) -> None:
        """Keep a chunk for the readers of its layer; a `ServingError` where readers of the former are still to come."""
        if layer_id not in self._num_readers:
            return
        if self._to_come[layer_id]:
            raise ServingError(
                f"this model gives keys to layer {layer_id} twice, of which {self._num_readers[layer_id]} others read"
                " the first ones by its configuration; serve it without a profile"
            )
        self._to_come[layer_id] = self._num_readers[layer_id]
        # Whose memory SGLang's code, or a graph around attention, takes again before the last reader.
        self._chunks[layer_id] = SharedChunk(chunk.k.clone(), chunk.v.clone(), chunk.stored_at)

    def take(self, layer_id: int) -> SharedChunk:
        """The chunk that the next reader of a layer reads; a `ServingError` where there is none."""
        if not self._to_come.get(layer_id):
            raise ServingError(
                f"this model gives no keys to a layer that reads those of layer {layer_id}, and by its configuration"
                " none is to come; serve it without a profile"
            )
        self._to_come[layer_id] -= 1
        return self._chunks[layer_id] if self._to_come[layer_id] else self._chunks.pop(layer_id)

    def is_read_again(self, layer_id: int) -> bool:
        """Whether another reader of a layer is to come in this forward."""
        return bool(self._to_come.get(layer_id))
