"""The pool of latents (MLA) of one rank: a packed row for each token and layer, and its rotary channels beside.

Every tensor-parallel rank holds the whole latent. Rotary channels keep the served dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.cpu.latent_attention import joined
from kvtuner.runtime_loader.sglang.compat.pool import MLATokenToKVPool, write_slots
from kvtuner.runtime_loader.sglang.pools.packed_pool import PackedPool

if TYPE_CHECKING:
    from torch import Tensor


class PackedLatentPool(PackedPool, MLATokenToKVPool):  # type: ignore[misc]  # sglang is not typed
    """SGLang's pool of latents with packed rows; `kv_buffer` has the rows of all layers, then their rotary channels."""

    def _create_buffers(self) -> None:
        self.allocate_rows()
        # Under the name of SGLang's pool, so that what it inherits counts and moves both parts.
        self.kv_buffer = [stored.rows for stored in (*self.keys, *self.values)]
        self.store_dtype = torch.uint8

    def shape_of_layer(self) -> tuple[int, int, int]:
        """See `PackedPool.shape_of_layer`."""
        return 1, self.kv_lora_rank, self.qk_rope_head_dim

    def new_states(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `PackedPool.new_states`: both parts of `k`, of which `v` is the first."""
        both = k.view(-1, 1, self.kv_lora_rank + self.qk_rope_head_dim)
        latents, rotary = both.split((self.kv_lora_rank, self.qk_rope_head_dim), dim=-1)
        return latents, rotary

    def read_states(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `PackedPool.read_states`: a latent is read twice."""
        return joined(keys, values)

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor, layer_id_override: int | None = None
    ) -> None:
        """Store latents with their rotary channels, `cache_k` [tokens, 1, channels of both], at token slots."""
        local = (layer.layer_id if layer_id_override is None else layer_id_override) - self.start_layer
        self.store(local, write_slots(loc_info), *self.new_states(cache_k, cache_v))

    def set_mla_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k_nope: Tensor, cache_k_rope: Tensor,
        layer_id_override: int | None = None,
    ) -> None:  # fmt: skip
        """Store latents and rotary channels, each [tokens, 1, channels], at token slots."""
        local = (layer.layer_id if layer_id_override is None else layer_id_override) - self.start_layer
        latents = cache_k_nope.view(-1, 1, self.kv_lora_rank)
        self.store(local, write_slots(loc_info), latents, cache_k_rope.view(-1, 1, self.qk_rope_head_dim))

    def get_mla_kv_buffer(self, layer: Any, loc: Tensor, dst_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return latents and rotary channels of token slots in model space, each [tokens, 1, channels]."""
        local, dtype = layer.layer_id - self.start_layer, dst_dtype or self.model_dtype
        return self.keys[local].read(loc, dtype), self.values[local].read(loc, dtype)

    def get_contiguous_buf_infos(self) -> NoReturn:
        """Refuse a transfer to another server, which would leave rotary channels behind."""
        raise _stays()

    def get_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a copy in host memory, as `get_contiguous_buf_infos` a transfer."""
        raise _stays()


def _stays() -> ServingError:
    return ServingError("packed latents stay on their device; report this, with the server's flags")
