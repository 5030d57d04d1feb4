"""The dense pool of one rank: every layer's keys and values as packed rows of their own width.

Layers with a window, where they share the pool, have rows in the served dtype, which SGLang's own kernels read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.compat.pool import KvBufferDesc, MHATokenToKVPool, write_slots
from kvtuner.runtime_loader.sglang.pools.packed_pool import PackedPool

if TYPE_CHECKING:
    from torch import Tensor


class PackedKVPool(PackedPool, MHATokenToKVPool):  # type: ignore[misc]  # sglang is not typed
    """SGLang's dense pool with packed rows, whose tensors are `k_buffer` and `v_buffer` too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("post_capture_active"):
            raise ServingError("a packed KV pool cannot be resized after capture")
        kwargs["enable_kv_cache_copy"] = False  # SGLang's kernel moves rows of one width; `move_kv_cache` is ours
        super().__init__(*args, **kwargs)

    def _create_buffers(self) -> None:
        self.allocate_rows()
        # Under the names of SGLang's dense pool, so that what it inherits finds rows to copy and move.
        self.k_buffer = [stored.rows for stored in self.keys]
        self.v_buffer = [stored.rows for stored in self.values]
        self.k_scale_buffer = self.v_scale_buffer = None
        self.native_k_scale_buffer = self.native_v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        self.store_dtype = torch.uint8
        self._kv_buffer_descs = self._build_kv_buffer_descs()
        self._init_data_ptrs_and_strides()

    def shape_of_layer(self) -> tuple[int, int, int]:
        """See `PackedPool.shape_of_layer`."""
        return self.head_num, self.head_dim, self.v_head_dim

    def new_states(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `PackedPool.new_states`."""
        return k.view(-1, self.head_num, self.head_dim), v.view(-1, self.head_num, self.v_head_dim)

    def read_states(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `PackedPool.read_states`: themselves."""
        return keys, values

    def _build_kv_buffer_descs(self) -> list[Any]:
        return [
            KvBufferDesc(f"{side}{layer}", tuple(rows.shape), row_bytes=rows[0].nbytes, tokens_per_row=1)
            for side, buffers in (("k", self.k_buffer), ("v", self.v_buffer))
            for layer, rows in enumerate(buffers)
        ]

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor, k_scale: float | None = None,
        v_scale: float | None = None, layer_id_override: int | None = None, dcp_kv_mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Store keys and values [tokens, heads, channels] at token slots."""
        # The checkpoint's scales for an fp8 cache are not used: rows have their own.
        if dcp_kv_mask is not None:
            raise ServingError("a packed KV pool does not share tokens among ranks")
        local = (layer.layer_id if layer_id_override is None else layer_id_override) - self.start_layer
        self.store(local, write_slots(loc_info), *self.new_states(cache_k, cache_v))

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Copy rows, scales included, from slots to slots in every layer."""
        for rows in (*self.k_buffer, *self.v_buffer):
            rows[tgt_loc] = rows[src_loc]

    def set_kv_buffer_prefix_valid(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse what drafts of blocks alone call."""
        raise ServingError("drafts of blocks do not work with a packed KV pool; drop --speculative-algorithm")
