"""The pool of latents of which an index selects what a query reads: packed rows beside the index's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtuner.runtime_loader.sglang.compat.pool import DSATokenToKVPool
from kvtuner.runtime_loader.sglang.pools.latent_pool import PackedLatentPool
from kvtuner.runtime_loader.sglang.pools.self_test import announce_index

if TYPE_CHECKING:
    from torch import Tensor


class IndexedLatentPool(PackedLatentPool, DSATokenToKVPool):  # type: ignore[misc]  # sglang is not typed
    """SGLang's pool of such latents, with packed rows; it keeps keys of the index itself, in fp8 with their scales."""

    index_k_with_scale_buffer: list[Tensor]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layers = range(self.start_layer, self.start_layer + self.layer_num)
        announce_index([self.has_index(layer_id) for layer_id in layers], self.index_bytes)

    def has_index(self, layer_id: int) -> bool:
        """Whether a layer, by its global id, selects by an index of its own, and not as the one before it did."""
        return len(self.index_k_with_scale_buffer[layer_id - self.start_layer]) > 0

    @property
    def index_bytes(self) -> int:
        """The bytes of all keys of the index."""
        return sum(keys.nbytes for keys in self.index_k_with_scale_buffer)
