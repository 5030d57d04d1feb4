"""Pages of packed rows in a host buffer: where every layer's rows lie. Knows nothing of devices or of what rows hold.

A page is `page_size` tokens of all layers of a rank. Its bytes, wherever it goes, are the keys of every layer and then
the values of every layer, token after token: the same bytes by either order of the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Literal, get_args

from kvtuner.errors import ServingError

if TYPE_CHECKING:
    from torch import Tensor

Order = Literal["layer_first", "page_first"]
ORDERS: Final = get_args(Order)
ALIGNMENT: Final = 16
"""Bytes that a row's address must be a multiple of, so that kernels move it 16 at a time."""


@dataclass(frozen=True)
class PageLayout:
    """The places of rows in a host buffer; `ServingError` where rows cannot be aligned.

    Attributes:
        row_bytes: The bytes of one token's keys and of its values, by layer of the rank.
        order: The order of rows: a layer's rows of all pages side by side, or a page's rows of all layers.
        header_bytes: The bytes kept before each page; with `page_first` alone.
    """

    page_size: int
    row_bytes: tuple[tuple[int, int], ...]
    num_pages: int
    order: Order
    header_bytes: int = 0

    def __post_init__(self) -> None:
        for layer, sides in enumerate(self.row_bytes):
            if any(size % ALIGNMENT for size in sides):
                raise ServingError(
                    f"rows of layer {layer} take {sides[0]} and {sides[1]} bytes; a host tier needs multiples of"
                    f" {ALIGNMENT}: serve with fewer ranks, or without --enable-hierarchical-cache"
                )
        assert self.order in ORDERS
        assert self.header_bytes % ALIGNMENT == 0
        assert not (self.header_bytes and self.order == "layer_first")

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(map(sum, self.row_bytes))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's rows."""
        return self.page_size * self.token_bytes

    @property
    def key_bytes(self) -> int:
        """Bytes of a page's keys, which come first."""
        return self.page_size * sum(keys for keys, _ in self.row_bytes)

    @property
    def record_bytes(self) -> int:
        """Bytes that a page takes of the buffer."""
        return self.header_bytes + self.page_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.num_pages * self.record_bytes

    @cached_property
    def _in_page(self) -> tuple[tuple[int, int], ...]:
        # The bytes of a page at which each layer's keys and values begin: all keys lie before all values.
        sizes = [keys for keys, _ in self.row_bytes] + [values for _, values in self.row_bytes]
        starts = [self.page_size * start for start in accumulate(sizes, initial=0)]
        num_layers = len(self.row_bytes)
        return tuple((starts[layer], starts[num_layers + layer]) for layer in range(num_layers))

    def offset(self, layer: int, side: int) -> int:
        """Byte at which the first page's keys (side 0) or values (1) of a layer begin."""
        start = self._in_page[layer][side]
        return self.header_bytes + start if self.order == "page_first" else self.num_pages * start

    def stride(self, layer: int, side: int) -> int:
        """Bytes from a page's rows to the next page's."""
        return self.record_bytes if self.order == "page_first" else self.page_size * self.row_bytes[layer][side]


class HostPages:
    """Pages in a host buffer, uint8 [buffer_bytes]."""

    def __init__(self, layout: PageLayout, buffer: Tensor) -> None:
        assert buffer.numel() == layout.buffer_bytes
        assert buffer.data_ptr() % ALIGNMENT == 0
        self.layout, self.buffer = layout, buffer
        self._rows = [[self._view(layer, side) for side in (0, 1)] for layer in range(len(layout.row_bytes))]

    def _view(self, layer: int, side: int) -> Tensor:
        layout, size = self.layout, self.layout.row_bytes[layer][side]
        shape, strides = (layout.num_pages, layout.page_size, size), (layout.stride(layer, side), size, 1)
        return self.buffer.as_strided(shape, strides, layout.offset(layer, side))

    def rows(self, layer: int, side: int) -> Tensor:
        """Keys (side 0) or values (1) of a layer, [num_pages, page_size, row_bytes]: a view."""
        return self._rows[layer][side]

    def get(self, page: int, out: Tensor) -> None:
        """Copy a page's bytes into `out` [page_bytes]."""
        for piece, part in self._pieces(page, out):
            part.copy_(piece)

    def set(self, page: int, data: Tensor) -> None:
        """Overwrite a page with bytes [page_bytes]."""
        for piece, part in self._pieces(page, data):
            piece.copy_(part)

    def _pieces(self, page: int, data: Tensor) -> list[tuple[Tensor, Tensor]]:
        # What lies side by side of a page, with its part of `data`.
        if self.layout.order == "page_first":
            return [(self.record(page)[self.layout.header_bytes :], data)]
        pieces = [sides[side][page].view(-1) for side in (0, 1) for sides in self._rows]
        return list(zip(pieces, data.split([len(piece) for piece in pieces]), strict=True))

    def record(self, page: int) -> Tensor:
        """A page with the header before it, [record_bytes]: a view; of `page_first` alone."""
        assert self.layout.order == "page_first"
        start = page * self.layout.record_bytes
        return self.buffer[start : start + self.layout.record_bytes]
