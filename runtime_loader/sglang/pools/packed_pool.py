"""The pool of one rank: every layer as packed rows of its own width. Knows nothing of what SGLang's classes store."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from kvtuner.errors import ServingError
from kvtuner.precision import NATIVE_BITS
from kvtuner.runtime_loader.exact_ring import ExactRing, ExactRings
from kvtuner.runtime_loader.packed_attention import PackedRows
from kvtuner.runtime_loader.row_format import LayerFormat, pool_formats
from kvtuner.runtime_loader.sglang.compat.parallel import ranks
from kvtuner.runtime_loader.sglang.compat.pool import allocation, generations_of
from kvtuner.runtime_loader.sglang.pools.self_test import announce, announce_window, self_test
from kvtuner.runtime_loader.sglang.pools.window_self_test import window_self_test
from kvtuner.runtime_loader.sglang.process_state import process_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvtuner.runtime_loader.row_format import RowFormat


class PackedPool(ABC):
    """The rows of SGLang's pool of the class that a child names after this one: `keys` and `values` by layer.

    Rows are [slots, row_bytes] uint8 or, at 16 bits, [slots, heads, channels] in `model_dtype`; scales lie in the
    rows, so that whoever moves a row moves its scales. A latent has its row as keys, and rotary channels as values.

    Attributes:
        layer_ids: The global ids of the layers of this rank.
    """

    keys: list[PackedRows]
    values: list[PackedRows]
    # SGLang's class has these.
    size: int
    page_size: int
    start_layer: int
    layer_num: int
    device: str
    layer_transfer_counter: Any

    def __init__(self, *args: Any, dtype: torch.dtype, layer_ids: Sequence[int] | None = None, **kwargs: Any) -> None:
        self.model_dtype = dtype
        self.layer_ids = tuple(layer_ids or ())  # of a part of a pool, whose own layers SGLang counts from 0
        self.copies: ExactRings | None = None
        self._generations = torch.zeros(0, dtype=torch.int64)  # SGLang's own, of its request slots, beside copies
        self.rank_state = process_state().active_rank()
        # On CUDA, models whose kernels write straight into a bf16 pool go through `set_kv_buffer` at any other dtype.
        super().__init__(*args, dtype=torch.uint8, **kwargs)  # type: ignore[call-arg]  # of SGLang's class
        self_test(self)
        announce(self, ranks())

    @abstractmethod
    def shape_of_layer(self) -> tuple[int, int, int]:
        """The heads of a layer as SGLang gives them, and the channels of a key and a value, or of both parts."""

    @abstractmethod
    def new_states(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [tokens, heads, channels] that are stored of what SGLang gives for new tokens."""

    @abstractmethod
    def read_states(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What queries are multiplied by and what is summed, of stored keys and values in model space."""

    def allocate_rows(self) -> None:
        """Allocate the rows of all layers; a `ServingError` where SGLang's heads are not the profile's."""
        here = ranks()
        self.layer_ids = self.layer_ids or tuple(range(self.start_layer, self.start_layer + self.layer_num))
        profile = self.rank_state.profile
        formats = pool_formats(profile, self.layer_ids, tp_rank=here.tp_rank, tp_size=here.tp_size)
        given = self.shape_of_layer()
        for layer_id, entry in zip(self.layer_ids, formats, strict=True):
            wanted = (entry.k.num_heads, entry.k.head_dim, entry.v.head_dim)
            if wanted != given:
                raise ServingError(
                    f"SGLang gives layer {layer_id} of this rank {given[0]} KV heads of {given[1]} and {given[2]}"
                    f" channels, the profile {wanted[0]} of {wanted[1]} and {wanted[2]}; serve it without a profile"
                )
        tuned = set(profile.tuned_geometry().ids)
        self._is_packed = [layer_id in tuned for layer_id in self.layer_ids]
        with allocation(self):
            self.keys = [self._rows(entry.k) for entry in formats]
            self.values = [self._rows(entry.v) for entry in formats]

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

    def store(self, local_layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values [tokens, heads, channels] at token slots of a layer by its place on this rank.

        Keys per channel are packed by attention, which knows their requests, once a group is full.
        """
        keys, values = self.keys[local_layer], self.values[local_layer]
        if keys.format.token_group > 1:
            self.rank_state.attention.store_side(values, slots, v)
        else:
            self.rank_state.attention.store(keys, values, slots, k, v)

    def _rows(self, row_format: RowFormat) -> PackedRows:
        return PackedRows.zeros(row_format, self.size + self.page_size, self.model_dtype, self.device)

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

    def get_device_pool_infos(self) -> NoReturn:
        """Refuse a host pool of rows of one width, which would be made from this."""
        raise ServingError("SGLang's own host pools cannot hold packed rows; report this, with the server's flags")
