"""`PageMover` by Triton kernels that reach into pinned host memory, on the stream of the transfer.

A device pool of rows: one launch moves the pages of all layers. One in the model's dtype: a block of tokens at a time
is packed into rows on the device, or read back from there, and the rows move: host memory is touched once, in long
pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from kvtuner.runtime_loader.host_tier.pages import ALIGNMENT
from kvtuner.runtime_loader.host_tier.transfer import block_tokens, in_blocks, pages_of, untimed
from kvtuner.runtime_loader.kernels import NAME, launch
from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
from kvtuner.runtime_loader.kernels.store_and_read_rows import copy_pages
from kvtuner.runtime_loader.packed_attention import PackedRows

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.host_tier.pages import HostPages
    from kvtuner.runtime_loader.host_tier.transfer import DeviceSide, Layers, Timed

BLOCK_WORDS: Final = 512
SPAN_FIELDS: Final = 5


class TritonMover:
    """`PageMover` by kernels, on the device of the layers, of which all are packed or none.

    The pages lie in memory that the device can address; `timed` is the context around quantizing and dequantizing.
    """

    name = NAME

    def __init__(self, layers: Layers, pages: HostPages, timed: Timed = untimed) -> None:
        self._device = device = layers[0][0].buffer.device
        self._down: _Rows | _Staging
        self._up: _Rows | _Staging
        if all(side.packed for sides in layers for side in sides):
            self._down = self._up = _Rows([[side.raw for side in sides] for sides in layers], pages, device)
        else:  # one for each direction, which run on streams of their own
            self._down, self._up = (_Staging(layers, pages, device, timed) for _ in range(2))

    def place(self, slots: Tensor) -> Tensor:
        """See `PageMover.place`: on the device, without waiting for it."""
        if slots.is_cuda or self._device.type != "cuda":
            return slots.to(self._device)
        return slots.pin_memory().to(self._device, non_blocking=True)

    def backup(self, host_slots: Tensor, device_slots: Tensor) -> None:
        """See `PageMover.backup`."""
        self._down.backup(host_slots, device_slots)

    def load(self, layer: int, host_slots: Tensor, device_slots: Tensor) -> None:
        """See `PageMover.load`."""
        self._up.load(layer, host_slots, device_slots)


class _Rows:
    """Device rows of keys and values by layer, uint8 [slots, row_bytes]: the host holds the same bytes."""

    def __init__(self, rows: list[list[Tensor]], pages: HostPages, device: torch.device) -> None:
        self._layout, self._num_layers = pages.layout, len(rows)
        base = rows[0][0]
        spans = [
            self._span(layer, side, own, base) for layer, sides in enumerate(rows) for side, own in enumerate(sides)
        ]
        self._spans = torch.tensor(spans, dtype=torch.int64, device=device)
        self._base = base.view(-1, ALIGNMENT).view(torch.int64)
        self._host = pages.buffer.view(torch.int64)

    def backup(self, host_slots: Tensor, device_slots: Tensor) -> None:
        self.copy(host_slots, device_slots, 0, self._num_layers, to_host=True)

    def load(self, layer: int, host_slots: Tensor, device_slots: Tensor) -> None:
        self.copy(host_slots, device_slots, layer, 1, to_host=False)

    def copy(
        self, host_slots: Tensor, device_slots: Tensor, first_layer: int, num_layers: int, *, to_host: bool
    ) -> None:
        page_size = self._layout.page_size
        host, device = pages_of(host_slots, page_size), pages_of(device_slots, page_size)
        if len(host):
            copy_pages[(len(host), 2 * num_layers)](
                self._spans, host, device, self._base, self._host, 2 * first_layer,
                TO_HOST=to_host, FIELDS=SPAN_FIELDS, BLOCK=BLOCK_WORDS,
            )  # fmt: skip

    def _span(self, layer: int, side: int, rows: Tensor, base: Tensor) -> tuple[int, ...]:
        """See `copy_pages`: distances from the first layer's keys, and from the host's buffer."""
        layout = self._layout
        page_bytes = layout.page_size * layout.row_bytes[layer][side]
        distance = rows.data_ptr() - base.data_ptr()
        sizes = (distance, page_bytes, layout.offset(layer, side), layout.stride(layer, side), page_bytes)
        assert all(size % ALIGNMENT == 0 for size in sizes)
        return tuple(size // ALIGNMENT for size in sizes)


class _Staging:
    """Buffers on the device in which one layer's block of tokens becomes rows, or is read back from them."""

    def __init__(self, layers: Layers, pages: HostPages, device: torch.device, timed: Timed) -> None:
        self._layers, self._timed, layout = layers, timed, pages.layout
        self._page_size, self._block = layout.page_size, block_tokens(layout.page_size)
        shared: dict[Any, Tensor] = {}

        def staging(side: DeviceSide, side_index: int) -> Tensor:
            spec = side.format.spec
            kind = (side_index, side.row_bytes, spec and (spec.bits, spec.group_size, spec.word_bits))
            if kind not in shared:
                # Zeros, which bytes of a row stay that no kernel writes: layers of one format may share a buffer.
                shared[kind] = torch.zeros(self._block, side.row_bytes, dtype=torch.uint8, device=device)
            return shared[kind]

        rows = [[staging(side, side_index) for side_index, side in enumerate(sides)] for sides in layers]
        self._sides = [
            [_kernel_side(side, staged) for side, staged in zip(sides, of_layer, strict=True)]
            for sides, of_layer in zip(layers, rows, strict=True)
        ]
        self._rows_of = _Rows(rows, pages, device)
        self._places = torch.arange(self._block, device=device)
        self._counts = torch.arange(self._block + 1, device=device)

    def backup(self, host_slots: Tensor, device_slots: Tensor) -> None:
        for host, device in in_blocks(host_slots, device_slots, self._page_size):
            places = self._places[: len(device)]
            for layer, ((keys, values), (k_rows, v_rows)) in enumerate(zip(self._layers, self._sides, strict=True)):
                with self._timed("quantize"):
                    launch.store(k_rows, v_rows, places, keys.buffer[device], values.buffer[device])
                self._rows_of.copy(host, places, layer, 1, to_host=True)

    def load(self, layer: int, host_slots: Tensor, device_slots: Tensor) -> None:
        for host, device in in_blocks(host_slots, device_slots, self._page_size):
            places, count = self._places[: len(device)], self._counts[len(device) :][:1]
            self._rows_of.copy(host, places, layer, 1, to_host=False)
            with self._timed("dequantize"):
                for side, rows in zip(self._layers[layer], self._sides[layer], strict=True):
                    states = side.buffer.new_empty((len(device), *side.buffer.shape[1:]))
                    launch.read(rows, places, count, states)
                    side.buffer[device] = states


def _kernel_side(side: DeviceSide, rows: Tensor) -> KernelSide:
    if side.format.spec is None:
        rows = rows.view(side.buffer.dtype).view(len(rows), *side.buffer.shape[1:])
    return KernelSide.of(PackedRows(rows, side.format))
