"""Pages between a device and the host, in plain torch: on a processor by indexing, elsewhere a copy for each page.

Two kinds of device pools: one that holds rows, which move as they are, and one in the model's dtype, whose keys and
values become rows on their way down and are read back on their way up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from kvtuner.runtime_loader.host_tier.pages import HostPages
    from kvtuner.runtime_loader.row_format import RowFormat

BLOCK_TOKENS: Final = 2048
"""Tokens that move at a time, at least a page: bounds what a transfer allocates on the device."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSide:
    """Keys or values of one layer on the device.

    Attributes:
        buffer: [slots, row_bytes] uint8, or [slots, num_heads, head_dim] in the model's dtype.
        format: how they lie below the device.
        packed: whether the buffer holds rows of that format already.
    """

    buffer: Tensor
    format: RowFormat
    packed: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row below the device."""
        return self.format.row_bytes(self.buffer.dtype)

    @property
    def moves_as_it_is(self) -> bool:
        """Whether bytes on the device are those on the host."""
        return self.packed or self.format.spec is None

    @property
    def raw(self) -> Tensor:
        """The buffer's bytes, [slots, bytes of a token]."""
        return self.buffer.view(torch.uint8).view(len(self.buffer), -1)


Layers = list[tuple[DeviceSide, DeviceSide]]


class PageMover(Protocol):
    """What a host tier needs to move pages. Slots are whole pages, in the order of their tokens."""

    name: str

    def backup(self, host_slots: Tensor, device_slots: Tensor) -> None:
        """Copy tokens of all layers from device slots [tokens] to host slots [tokens]."""
        ...

    def load(self, layer: int, host_slots: Tensor, device_slots: Tensor) -> None:
        """Copy tokens of one layer of this rank from host slots [tokens] to device slots [tokens]."""
        ...


class TorchMover:
    """`PageMover` in plain torch, for any device.

    Args:
        layers: keys and values of the rank's layers.
        pages: on the host.
    """

    name = "torch"

    def __init__(self, layers: Layers, pages: HostPages) -> None:
        self._layers, self._pages = layers, pages

    def backup(self, host_slots: Tensor, device_slots: Tensor) -> None:
        """See `PageMover.backup`."""
        page_size = self._pages.layout.page_size
        for host, device in in_blocks(host_slots, device_slots, page_size):
            host_pages = pages_of(host, page_size)
            for layer, sides in enumerate(self._layers):
                for side, of_device in enumerate(sides):
                    rows, target = _rows_at(of_device, device), self._pages.rows(layer, side)
                    _scatter(target, host_pages, rows.view(-1, *target.shape[1:]))

    def load(self, layer: int, host_slots: Tensor, device_slots: Tensor) -> None:
        """See `PageMover.load`."""
        page_size = self._pages.layout.page_size
        for host, device in in_blocks(host_slots, device_slots, page_size):
            for side, of_device in enumerate(self._layers[layer]):
                rows = _gather(self._pages.rows(layer, side), pages_of(host, page_size), of_device.buffer.device)
                _write_rows(of_device, device, rows.view(len(device), -1))


def in_blocks(host_slots: Tensor, device_slots: Tensor, page_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Slots in blocks of whole pages."""
    assert len(host_slots) == len(device_slots)
    assert len(host_slots) % page_size == 0
    block = max(BLOCK_TOKENS // page_size, 1) * page_size
    yield from zip(host_slots.split(block), device_slots.split(block), strict=True)


def pages_of(slots: Tensor, page_size: int) -> Tensor:
    """Pages of slots that are whole pages, in their order."""
    return slots[::page_size] // page_size


def _rows_at(side: DeviceSide, slots: Tensor) -> Tensor:
    """Rows [tokens, row_bytes] of device slots, on the device."""
    slots = slots.to(side.buffer.device)
    if side.moves_as_it_is:
        return side.raw[slots]
    return side.format.pack(side.buffer[slots])


def _write_rows(side: DeviceSide, slots: Tensor, rows: Tensor) -> None:
    slots = slots.to(side.buffer.device)
    if side.moves_as_it_is:
        side.raw[slots] = rows
    else:
        side.buffer[slots] = side.format.unpack(rows, side.buffer.dtype)


def _scatter(target: Tensor, pages: Tensor, rows: Tensor) -> None:
    if rows.device == target.device:
        target[pages.to(target.device)] = rows
        return
    for page, block in zip(pages.tolist(), rows, strict=True):
        target[page].copy_(block, non_blocking=True)


def _gather(source: Tensor, pages: Tensor, device: torch.device) -> Tensor:
    if device == source.device:
        return source[pages.to(device)]
    rows = torch.empty((len(pages), *source.shape[1:]), dtype=torch.uint8, device=device)
    for block, page in zip(rows, pages.tolist(), strict=True):
        block.copy_(source[page], non_blocking=True)
    return rows


def token_bytes(layers: Sequence[tuple[DeviceSide, DeviceSide]]) -> tuple[tuple[int, int], ...]:
    """Bytes of one token's rows below the device, keys and values, by layer."""
    return tuple((keys.row_bytes, values.row_bytes) for keys, values in layers)
