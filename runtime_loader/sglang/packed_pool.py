"""The KV pool of one rank: every layer's keys and values as packed rows of their own width.

Layers with a window, where they share the pool, have rows in the served dtype, which SGLang's own kernels read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from kvtuner.errors import ServingError
from kvtuner.precision import NATIVE_BITS
from kvtuner.runtime_loader.exact_ring import ExactRing, ExactRings
from kvtuner.runtime_loader.packed_attention import PackedRows
from kvtuner.runtime_loader.row_format import LayerFormat, pool_formats
from kvtuner.runtime_loader.sglang.compat.parallel import ranks
from kvtuner.runtime_loader.sglang.compat.pool import (
    KvBufferDesc,
    MHATokenToKVPool,
    allocation,
    generations_of,
    write_slots,
)
from kvtuner.runtime_loader.sglang.process_state import process_state
from kvtuner.runtime_loader.sglang.self_test import announce, announce_window, self_test
from kvtuner.runtime_loader.sglang.window_self_test import window_self_test

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvtuner.runtime_loader.row_format import RowFormat


class PackedKVPool(MHATokenToKVPool):  # type: ignore[misc]  # sglang is not typed
    """SGLang's dense pool with packed rows: `keys` and `values` by layer of this rank.

    `k_buffer` and `v_buffer` are their tensors, [slots, row_bytes] uint8 or, at 16 bits, [slots, heads, channels] in
    `model_dtype`; scales lie in the rows, so that whoever moves a row moves its scales.

    Attributes:
        layer_ids: The global ids of the layers of this rank.
    """

    def __init__(self, *args: Any, dtype: torch.dtype, layer_ids: Sequence[int] | None = None, **kwargs: Any) -> None:
        if kwargs.get("post_capture_active"):
            raise ServingError("a packed KV pool cannot be resized after capture")
        kwargs["enable_kv_cache_copy"] = False  # SGLang's kernel moves rows of one width; `move_kv_cache` is ours
        self.model_dtype = dtype
        self.layer_ids = tuple(layer_ids or ())  # of a part of a pool, whose own layers SGLang counts from 0
        self.copies: ExactRings | None = None
        self._generations = torch.zeros(0, dtype=torch.int64)  # SGLang's own, of its request slots, beside copies
        self.rank_state = process_state().active_rank()
        # On CUDA, models whose kernels write straight into a bf16 pool go through `set_kv_buffer` at any other dtype.
        super().__init__(*args, dtype=torch.uint8, **kwargs)
        self_test(self)
        announce(self, ranks())

    def _create_buffers(self) -> None:
        here = ranks()
        self.layer_ids = self.layer_ids or tuple(range(self.start_layer, self.start_layer + self.layer_num))
        profile = self.rank_state.profile
        formats = pool_formats(profile, self.layer_ids, tp_rank=here.tp_rank, tp_size=here.tp_size)
        for layer_id, entry in zip(self.layer_ids, formats, strict=True):
            wanted = (entry.k.num_heads, entry.k.head_dim, entry.v.head_dim)
            if wanted != (self.head_num, self.head_dim, self.v_head_dim):
                raise ServingError(
                    f"SGLang gives layer {layer_id} of this rank {self.head_num} KV heads of {self.head_dim} and"
                    f" {self.v_head_dim} channels, the profile {wanted[0]} of {wanted[1]} and {wanted[2]}; serve it"
                    " without a profile"
                )
        tuned = set(profile.tuned_geometry().ids)
        self._is_packed = [layer_id in tuned for layer_id in self.layer_ids]
        with allocation(self):
            self.keys = [self._rows(entry.k) for entry in formats]
            self.values = [self._rows(entry.v) for entry in formats]
        # Under the names of SGLang's dense pool, so that what it inherits finds rows to copy and move.
        self.k_buffer = [stored.rows for stored in self.keys]
        self.v_buffer = [stored.rows for stored in self.values]
        self.k_scale_buffer = self.v_scale_buffer = None
        self.native_k_scale_buffer = self.native_v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        self.store_dtype = torch.uint8
        self._kv_buffer_descs = self._build_kv_buffer_descs()
        self._init_data_ptrs_and_strides()

    def add_copies(self, request_pool: Any) -> None:
        """Allocate and test the copies of the profile's exact window, for as many requests as SGLang lets run; once."""
        window = self.rank_state.profile.window
        if window.num_tokens:
            self._generations = generations_of(request_pool)
            layers = [LayerFormat(k.format, v.format) for k, v in zip(self.keys, self.values, strict=True)]
            self.copies = ExactRings(layers, window, len(self._generations), dtype=self.model_dtype, device=self.device)
            window_self_test(self, self.copies, self._generations)
        announce_window(self, ranks())

    @property
    def bytes_per_token(self) -> tuple[int, int]:
        """The bytes of a token on this rank, as its rows are stored and as bf16 would be."""
        sides = (*self.keys, *self.values)
        in_bf16 = NATIVE_BITS // 8 * sum(math.prod(stored.shape[1:]) for stored in sides)
        return sum(stored.rows[0].nbytes for stored in sides), in_bf16

    @property
    def read_layers(self) -> list[tuple[int, PackedRows, PackedRows]]:
        """The layers that are read here, not by SGLang's own kernels: their global ids, keys and values."""
        sides = zip(self.layer_ids, self.keys, self.values, self._is_packed, strict=True)
        return [(layer_id, keys, values) for layer_id, keys, values, is_packed in sides if is_packed]

    def forget_former_requests(self) -> None:
        """Empty the copies of request slots that were handed on, before the forward of their new requests."""
        if self.copies is not None:
            self.copies.forget_former_requests(self._generations)

    def copies_of(self, layer_id: int) -> ExactRing | None:
        """Return the exact copies of a layer by its global id; None without any, as where its rows are exact."""
        if self.copies is None or layer_id not in self.layer_ids:
            return None
        return self.copies[self.layer_ids.index(layer_id)]

    def _rows(self, row_format: RowFormat) -> PackedRows:
        return PackedRows.zeros(row_format, self.size + self.page_size, self.model_dtype, self.device)

    def _build_kv_buffer_descs(self) -> list[Any]:
        return [
            KvBufferDesc(f"{side}{layer}", tuple(rows.shape), row_bytes=rows[0].nbytes, tokens_per_row=1)
            for side, buffers in (("k", self.k_buffer), ("v", self.v_buffer))
            for layer, rows in enumerate(buffers)
        ]

    def get_key_buffer(self, layer_id: int) -> PackedRows | Tensor:
        """Return the keys of a layer by its global id, once a pending transfer has brought them.

        Those of a layer with a window are a tensor.
        """
        return self._at(self.keys, layer_id)

    def get_value_buffer(self, layer_id: int) -> PackedRows | Tensor:
        """Return the values of a layer as `get_key_buffer` does its keys."""
        return self._at(self.values, layer_id)

    def _at(self, stored: Sequence[PackedRows], layer_id: int) -> PackedRows | Tensor:
        local: int = layer_id - self.start_layer
        # A host tier may still be loading the layer.
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(local)
        return stored[local] if self._is_packed[local] else stored[local].rows

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor, k_scale: float | None = None,
        v_scale: float | None = None, layer_id_override: int | None = None, dcp_kv_mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Store keys and values [tokens, heads, channels] at token slots."""
        # The checkpoint's scales for an fp8 cache are not used: rows have their own.
        if dcp_kv_mask is not None:
            raise ServingError("a packed KV pool does not share tokens among ranks")
        local = (layer.layer_id if layer_id_override is None else layer_id_override) - self.start_layer
        keys, values = self.keys[local], self.values[local]
        self.rank_state.attention.store(
            keys, values, write_slots(loc_info), cache_k.view(-1, *keys.shape[1:]), cache_v.view(-1, *values.shape[1:])
        )

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Copy rows, scales included, from slots to slots in every layer."""
        for rows in (*self.k_buffer, *self.v_buffer):
            rows[tgt_loc] = rows[src_loc]

    def set_kv_buffer_prefix_valid(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse what drafts of blocks alone call."""
        raise ServingError("drafts of blocks do not work with a packed KV pool; drop --speculative-algorithm")

    def get_device_pool_infos(self) -> NoReturn:
        """Refuse a host pool of rows of one width, which would be made from this."""
        raise ServingError("SGLang's own host pools cannot hold packed rows; report this, with the server's flags")
