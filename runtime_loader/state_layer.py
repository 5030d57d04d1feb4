"""A layer of a `KVTunerCache` that has recurrent states beside its keys, as some hybrids do. Knows no models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from kvtuner.runtime_loader.transformers_layer import KVTunerLayer

if TYPE_CHECKING:
    from torch import LongTensor, Tensor


class KVTunerStateLayer(LinearAttentionLayer, KVTunerLayer):  # type: ignore[override]  # a base computes it
    """A packed layer that also has recurrent or convolution states, which are transformers' own."""

    is_compileable = False

    def __init__(self, packed: KVTunerLayer, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        CacheLayerMixin.__init__(self)
        self.k, self.v, self.index_keys = packed.k, packed.v, packed.index_keys
        self.window, self.is_latent = packed.window, packed.is_latent

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Check keys and values as `KVTunerLayer` does, or take memory for states, which are given by name."""
        if args:
            KVTunerLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        LinearAttentionLayer.reset(self)
        KVTunerLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, given as a negative count."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        KVTunerLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let beam i continue what beam `beam_idx[i]` stored."""
        LinearAttentionLayer.reorder_cache(self, cast("LongTensor", beam_idx))
        KVTunerLayer.reorder_cache(self, beam_idx)
