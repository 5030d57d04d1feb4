"""`PageMover` by Triton kernels that reach into pinned host memory, on the stream of the transfer.

A device pool of rows: one launch moves the pages of all layers. One in the model's dtype: keys and values are packed
straight into the host's pages, and read back from them, by the kernels that serve a packed pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from kvtuner.runtime_loader.host_tier.pages import ALIGNMENT
from kvtuner.runtime_loader.host_tier.transfer import in_blocks, pages_of
from kvtuner.runtime_loader.kernels import launch
from kvtuner.runtime_loader.kernels.pages import copy_pages
from kvtuner.runtime_loader.kernels.side import KernelSide
from kvtuner.runtime_loader.packed_attention import StoredRows

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.host_tier.pages import HostPages
    from kvtuner.runtime_loader.host_tier.transfer import DeviceSide, Layers

BLOCK_WORDS: Final = 512
SPAN_FIELDS: Final = 5


class TritonMover:
    """See the module.

    Args:
        layers: keys and values of the rank's layers, all packed or none.
        pages: on the host, in memory that the device can address.
        device: of the layers.
    """

    name = "triton"

    def __init__(self, layers: Layers, pages: HostPages, device: torch.device) -> None:
        self._layers, self._pages = layers, pages
        self._packed = all(side.packed for sides in layers for side in sides)
        if self._packed:
            spans = [self._span(layer, side) for layer in range(len(layers)) for side in (0, 1)]
            self._spans = torch.tensor(spans, dtype=torch.int64, device=device)
            self._device = layers[0][0].raw.view(-1, ALIGNMENT).view(torch.int64)
            self._host = pages.buffer.view(torch.int64)
        else:
            self._hosts = [tuple(self._host_side(side, device) for side in sides) for sides in layers]

    def backup(self, host_slots: Tensor, device_slots: Tensor) -> None:
        """See `PageMover.backup`."""
        if self._packed:
            self._copy(host_slots, device_slots, 0, 2 * len(self._layers), to_host=True)
            return
        for host, device in in_blocks(host_slots, device_slots, self._pages.layout.page_size):
            for layer, ((keys, values), (k_host, v_host)) in enumerate(zip(self._layers, self._hosts, strict=True)):
                launch.store(
                    k_host, v_host, self._places(layer, 0, host), keys.buffer[device], values.buffer[device],
                    self._places(layer, 1, host),
                )  # fmt: skip

    def load(self, layer: int, host_slots: Tensor, device_slots: Tensor) -> None:
        """See `PageMover.load`."""
        if self._packed:
            self._copy(host_slots, device_slots, 2 * layer, 2, to_host=False)
            return
        for host, device in in_blocks(host_slots, device_slots, self._pages.layout.page_size):
            for side, (of_device, of_host) in enumerate(zip(self._layers[layer], self._hosts[layer], strict=True)):
                buffer = of_device.buffer
                states = buffer.new_empty((len(device), *buffer.shape[1:]))
                count = torch.full((1,), len(device), dtype=torch.int64, device=buffer.device)
                launch.read(of_host, self._places(layer, side, host), count, states)
                buffer[device] = states

    def _span(self, layer: int, side: int) -> tuple[int, ...]:
        """See `copy_pages`: from the first layer's keys on the device, and from the host's buffer."""
        layout, rows = self._pages.layout, self._layers[layer][side].raw
        page_bytes = layout.page_size * layout.row_bytes[layer][side]
        device = rows.data_ptr() - self._layers[0][0].raw.data_ptr()
        sizes = (device, page_bytes, layout.offset(layer, side), layout.stride(layer, side), page_bytes)
        assert all(size % ALIGNMENT == 0 for size in sizes)
        return tuple(size // ALIGNMENT for size in sizes)

    def _copy(self, host_slots: Tensor, device_slots: Tensor, first: int, num_spans: int, *, to_host: bool) -> None:
        page_size = self._pages.layout.page_size
        host, device = pages_of(host_slots, page_size), pages_of(device_slots, page_size)
        if len(host):
            copy_pages[(len(host), num_spans)](
                self._spans, host, device, self._device, self._host, first,
                TO_HOST=to_host, FIELDS=SPAN_FIELDS, BLOCK=BLOCK_WORDS,
            )  # fmt: skip

    def _host_side(self, side: DeviceSide, device: torch.device) -> KernelSide:
        """The host buffer as rows of `ALIGNMENT` bytes: wherever a row begins, one of these does."""
        units = self._pages.buffer.view(-1, ALIGNMENT)
        if side.format.spec is None:
            units = units.view(side.buffer.dtype)
        return KernelSide.of(StoredRows(units, side.format), device)

    def _places(self, layer: int, side: int, slots: Tensor) -> Tensor:
        """Where tokens of host slots lie in the buffer, in units of `ALIGNMENT` bytes."""
        layout = self._pages.layout
        page, token = slots // layout.page_size, slots % layout.page_size
        places = page * layout.stride(layer, side) + token * layout.row_bytes[layer][side]
        return (places + layout.offset(layer, side)) // ALIGNMENT
