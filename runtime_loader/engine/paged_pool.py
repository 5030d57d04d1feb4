"""The keys and values of all requests: pages of token slots in every layer, and exact copies beside them.

All layers share the numbers of pages and slots. Knows nothing of tokens, requests' order or attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvtuner.errors import ServingError
from kvtuner.precision import NO_WINDOW, ExactWindow
from kvtuner.runtime_loader.exact_ring import ExactRing, ExactRings, request_bytes
from kvtuner.runtime_loader.packed_attention import PackedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvtuner.runtime_loader.row_format import LayerFormat

DEFAULT_KV_MEMORY: Final = 1 << 30
"""The most bytes of a pool that nobody sized."""
_ALIGNMENT: Final = 64
"""The bytes that torch's own tensors are aligned to."""


def unwritten_zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that on a processor take memory as they are written: most of a pool may never be."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    host = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)  # torch.zeros would write them
    start = -host.ctypes.data % _ALIGNMENT
    return torch.from_numpy(host[start : start + num_bytes]).view(dtype).view(*shape)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The sizes that the bytes of a pool follow from.

    Attributes:
        layers: The formats of every layer's rows.
        dtype: The dtype of rows of 16 bits and of exact copies.
        window: The tokens of each request that are kept exactly too.
        page_size: The token slots of a page.
        max_requests: The request slots.
        context_length: The most tokens of a request.
    """

    layers: Sequence[LayerFormat]
    dtype: torch.dtype
    page_size: int
    max_requests: int
    context_length: int
    window: ExactWindow = NO_WINDOW

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's rows in all layers."""
        return sum(layer.bytes_per_token(self.dtype) for layer in self.layers)

    @property
    def copies_bytes(self) -> int:
        """Bytes of the exact copies of all request slots."""
        return self.max_requests * request_bytes(self.layers, self.window, self.dtype)

    @property
    def pages_per_request(self) -> int:
        """The pages of a request as long as the context."""
        return -(-self.context_length // self.page_size)

    def num_bytes(self, num_pages: int) -> int:
        """Bytes of a pool of so many pages."""
        return num_pages * self.page_size * self.bytes_per_token + self.copies_bytes

    def num_pages(self, kv_memory: int | None) -> int:
        """The pages that fit in some bytes beside the copies, or by default what all requests can fill.

        Raises:
            ServingError: Not one page fits.
        """
        most = self.max_requests * self.pages_per_request
        memory = min(self.num_bytes(most), DEFAULT_KV_MEMORY) if kv_memory is None else kv_memory
        pages = (memory - self.copies_bytes) // (self.page_size * self.bytes_per_token)
        if pages < 1:
            raise ServingError(
                f"{memory} bytes of KV memory hold no page: one takes {self.page_size * self.bytes_per_token} bytes,"
                f" the exact copies of {self.max_requests} requests {self.copies_bytes}; give more, or fewer requests"
            )
        return int(pages)


class PagedPool:
    """A pool of `num_pages` pages, and the table of token slots by request slot."""

    def __init__(self, shape: PoolShape, num_pages: int, device: torch.device) -> None:
        self.shape, self.num_pages, self.device = shape, num_pages, device
        slots = num_pages * shape.page_size
        self.layers = [
            tuple(PackedRows.zeros(side, slots, shape.dtype, device, unwritten_zeros) for side in (layer.k, layer.v))
            for layer in shape.layers
        ]
        # On the host.
        self._table = np.zeros((shape.max_requests, shape.pages_per_request * shape.page_size), dtype=np.int64)
        self._of_page = np.arange(shape.page_size)
        self._copies: ExactRings | None = None
        if shape.window.num_tokens:
            self._copies = ExactRings(
                shape.layers, shape.window, shape.max_requests, dtype=shape.dtype, device=device
            )  # fmt: skip
        self._generations = torch.zeros(shape.max_requests, dtype=torch.int64)

    @property
    def is_packed(self) -> bool:
        """Whether any layer keeps less than 16 bits."""
        return any(side.format.spec is not None for layer in self.layers for side in layer)

    @property
    def num_bytes(self) -> int:
        """Bytes of rows and exact copies."""
        rows = sum(side.rows.nbytes for layer in self.layers for side in layer)
        return rows + (0 if self._copies is None else self._copies.num_bytes)

    def sides(self, layer: int) -> tuple[PackedRows, PackedRows]:
        """The rows of a layer's keys and values."""
        keys, values = self.layers[layer]
        return keys, values

    def copies(self, layer: int) -> ExactRing | None:
        """The exact copies of a layer; None without a window, or where rows are exact."""
        return None if self._copies is None else self._copies[layer]

    def begin_request(self, slot: int) -> None:
        """Give a request slot to another request: copies of the former one are not read any more."""
        self._generations[slot] += 1

    def copy_beginning(self, source: int, target: int, num_tokens: int) -> None:
        """Give a new request's slot the exact copies of another, and what its first page of its own shares with that.

        The tables have both requests' pages; whole pages of the first tokens are the same.
        """
        self.forget_former_requests()  # which would empty the new copies
        if self._copies is not None:
            self._copies.copy(source, target)
        size = self.shape.page_size
        if rest := num_tokens % size:
            old, new = (int(self._table[slot, num_tokens - rest]) for slot in (source, target))
            for side in (side for layer in self.layers for side in layer):
                side.rows[new : new + rest] = side.rows[old : old + rest]

    def set_pages(self, slot: int, pages: Sequence[int], start: int = 0) -> None:
        """Write pages of the request in a slot to the table, from its page number `start` on."""
        size = self.shape.page_size
        slots = np.array(pages, dtype=np.int64)[:, None] * size + self._of_page
        self._table[slot, start * size : (start + len(pages)) * size] = slots.ravel()

    def pages(self, requests: Sequence[int], longest: int) -> NDArray[np.int32]:
        """The pages of the first `longest` tokens of some request slots, [requests, pages]."""
        size = self.shape.page_size
        return (self._table[requests, :longest:size] // size).astype(np.int32)

    def forget_former_requests(self) -> None:
        """Empty the copies of request slots that were given to other requests, before their first step."""
        if self._copies is not None:
            self._copies.forget_former_requests(self._generations)

    def token_slots(self, request: int, start: int, stop: int) -> NDArray[np.int64]:
        """The token slots of some positions of the request in a request slot."""
        return self._table[request, start:stop]
