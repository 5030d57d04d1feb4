"""`PageMover` by Triton kernels that reach into pinned host memory, on the stream of the transfer.

A device pool of rows: one launch of a few programs moves the pages of all layers. One in the model's dtype: a block of
tokens at a time is packed on the device into rows of all layers, or read back from those of one, and the rows move:
host memory is touched once, in long pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton

from kvtuner.runtime_loader.host_tier.pages import ALIGNMENT
from kvtuner.runtime_loader.host_tier.transfer import block_tokens, in_blocks, pages_of, untimed
from kvtuner.runtime_loader.kernels import NAME
from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
from kvtuner.runtime_loader.kernels.launch import read_to_places
from kvtuner.runtime_loader.kernels.launch_settings import EXACT
from kvtuner.runtime_loader.kernels.pages.copy_pages import copy_pages
from kvtuner.runtime_loader.kernels.pages.store_layers import store_layers
from kvtuner.runtime_loader.kernels.storing.launch_store import store_facts
from kvtuner.runtime_loader.packed_attention import PackedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvtuner.runtime_loader.host_tier.pages import HostPages
    from kvtuner.runtime_loader.host_tier.transfer import DeviceSide, Layers, Timed
    from kvtuner.runtime_loader.kernels.kernel_side import Facts

COPY_PROGRAMS: Final = 8
"""The programs that copy, which wait for the bus most of the time."""
COPY_WARPS: Final = 16
TILE_WORDS: Final = 4096
"""The words of 8 bytes that a program has on their way: those of all programs cover the delay of the bus."""
MOST_WORDS: Final = 512
"""The most words of one page among them."""
SPAN_FIELDS: Final = 5
STAGING_BYTES: Final = 64 << 20
"""The most bytes of rows that are staged on the device on their way down, but for one page."""


class TritonMover:
    """`PageMover` by kernels, on the device of the layers, of which all are packed or none.

    The pages lie in memory that the device can address; `timed` is the context around quantizing and dequantizing.
    """

    name = NAME

    def __init__(self, layers: Layers, pages: HostPages, timed: Timed = untimed) -> None:
        self._device = layers[0][0].buffer.device
        self._rows: _Rows | None = None
        if all(side.packed for sides in layers for side in sides):
            self._rows = _Rows([[side.raw for side in sides] for sides in layers], pages, range(len(layers)))
        else:  # buffers of each direction, which run on streams of their own
            self._down = _Quantizing(layers, pages, timed)
            self._up = _Dequantizing(layers, pages, timed)
        self._num_layers = len(layers)

    def place(self, slots: Tensor) -> Tensor:
        """See `PageMover.place`: on the device, without waiting for it."""
        if slots.is_cuda or self._device.type != "cuda":
            return slots.to(self._device)
        return slots.pin_memory().to(self._device, non_blocking=True)

    def backup(self, host_slots: Tensor, device_slots: Tensor) -> None:
        """See `PageMover.backup`."""
        if self._rows is None:
            self._down.backup(host_slots, device_slots)
        else:
            self._rows.copy(host_slots, device_slots, range(self._num_layers), to_host=True)

    def load(self, layer: int, host_slots: Tensor, device_slots: Tensor) -> None:
        """See `PageMover.load`."""
        if self._rows is None:
            self._up.load(layer, host_slots, device_slots)
        else:
            self._rows.copy(host_slots, device_slots, range(layer, layer + 1), to_host=False)


class _Rows:
    """Device rows of keys and values, uint8 [slots, row_bytes], by layer of `layer_ids`: the host holds the same."""

    def __init__(self, rows: Sequence[Sequence[Tensor]], pages: HostPages, layer_ids: Sequence[int]) -> None:
        self._layout, base = pages.layout, rows[0][0]
        spans = [
            self._span(layer, side, own, base)
            for layer, sides in zip(layer_ids, rows, strict=True)
            for side, own in enumerate(sides)
        ]
        self._spans = torch.tensor(spans, dtype=torch.int64, device=base.device)
        self._base = base.view(-1).view(torch.int64)
        self._host = pages.buffer.view(torch.int64)
        longest = max(span[-1] for span in spans) * ALIGNMENT // 8
        self._words = min(MOST_WORDS, triton.next_power_of_2(longest))

    def copy(self, host_slots: Tensor, device_slots: Tensor, places: range, *, to_host: bool) -> None:
        """Copy whole pages of the layers at some places in the list."""
        page_size = self._layout.page_size
        host, device = pages_of(host_slots, page_size), pages_of(device_slots, page_size)
        if len(host):
            copy_pages[(COPY_PROGRAMS,)](
                self._spans, host, device, self._base, self._host, 2 * places.start, 2 * len(places), len(host),
                TO_HOST=to_host, **copy_facts(self._words), num_warps=COPY_WARPS,
            )  # fmt: skip

    def _span(self, layer: int, side: int, rows: Tensor, base: Tensor) -> tuple[int, ...]:
        """See `copy_pages`: distances from the first layer's keys, and from the host's buffer."""
        layout = self._layout
        page_bytes = layout.page_size * layout.row_bytes[layer][side]
        sizes = (page_bytes, layout.offset(layer, side), layout.stride(layer, side), page_bytes)
        return (_distance(rows, base), *(_in_units(size) for size in sizes))


def copy_facts(words: int) -> Facts:
    """The copying kernel's constants, but for the direction, with tiles of so many words of a page."""
    return {"FIELDS": SPAN_FIELDS, "PAGES": TILE_WORDS // words, "WORDS": words}


class _Quantizing:
    """Staged rows of all layers, into which a block of tokens is quantized on its way down."""

    def __init__(self, layers: Layers, pages: HostPages, timed: Timed) -> None:
        self._timed, layout = timed, pages.layout
        self._page_size, self._num_layers = layout.page_size, len(layers)
        self._block = block_tokens(layout.page_size, STAGING_BYTES // layout.token_bytes)
        rows = _staged(layers, self._block)
        self._rows, self._slots = _Rows(rows, pages, range(len(layers))), _staged_slots(rows)
        groups: dict[object, list[int]] = {}
        sides = [
            [_kernel_side(side, staged) for side, staged in zip(*each, strict=True)]
            for each in zip(layers, rows, strict=True)
        ]
        for layer, (of_layer, (keys, values)) in enumerate(zip(layers, sides, strict=True)):
            strides = tuple(side.buffer.stride() for side in of_layer)
            groups.setdefault((strides, *sorted(store_facts(keys, values).items())), []).append(layer)
        self._groups = [
            _Group([layers[layer] for layer in group], [sides[layer] for layer in group]) for group in groups.values()
        ]

    def backup(self, host_slots: Tensor, device_slots: Tensor) -> None:
        for host, device in in_blocks(host_slots, device_slots, self._page_size, self._block):
            with self._timed("quantize"):
                for group in self._groups:
                    group.store(device)
            self._rows.copy(host, self._slots[: len(device)], range(self._num_layers), to_host=True)


class _Group:
    """Layers of one format, which one launch quantizes."""

    def __init__(self, layers: Sequence[Sequence[DeviceSide]], sides: Sequence[Sequence[KernelSide]]) -> None:
        (self._keys, self._values), (keys, values) = layers[0], sides[0]
        self._staged, self._num_layers = (keys, values), len(layers)
        bases = (self._keys.buffer, self._values.buffer, keys.rows, values.rows)
        places = [
            [_distance(own, base) for own, base in zip((k.buffer, v.buffer, *rows), bases, strict=True)]
            for (k, v), rows in zip(layers, [(k.rows, v.rows) for k, v in sides], strict=True)
        ]
        self._places = torch.tensor(places, dtype=torch.int64, device=self._keys.buffer.device)
        k_sides = [k for k, _ in sides]
        self._mu = torch.stack([k.mu for k in k_sides]) if "centered" in keys.steps else keys.mu
        self._inverse = torch.stack([k.inverse for k in k_sides]) if "balanced" in keys.steps else keys.inverse

    def store(self, slots: Tensor) -> None:
        """Quantize device slots [tokens] of all these layers into the first staged rows."""
        (keys, values), k, v = self._staged, self._keys.buffer, self._values.buffer
        facts = store_facts(keys, values)
        grid = (triton.cdiv(len(slots), facts["TOKENS"]), keys.num_heads, 2 * self._num_layers)
        store_layers[grid](
            self._places, k, k.stride(0), k.stride(1), keys.rows, self._mu, self._inverse, v, v.stride(0), v.stride(1),
            values.rows, slots, len(slots), UNIT=_unit(k), K_UNIT=_unit(keys.rows), V_UNIT=_unit(values.rows),
            **facts, **EXACT,
        )  # fmt: skip


class _Dequantizing:
    """Staged rows of one layer, from which a block of tokens is read back on its way up."""

    def __init__(self, layers: Layers, pages: HostPages, timed: Timed) -> None:
        self._layers, self._timed, self._page_size = layers, timed, pages.layout.page_size
        self._block = block_tokens(self._page_size)
        largest = max(sum(side.row_bytes for side in sides) for sides in layers)
        staging = torch.zeros(self._block * largest, dtype=torch.uint8, device=layers[0][0].buffer.device)
        rows = [_staged([sides], self._block, staging)[0] for sides in layers]
        self._sides = [
            [_kernel_side(side, staged) for side, staged in zip(*each, strict=True)]
            for each in zip(layers, rows, strict=True)
        ]
        self._rows, self._slots = _Rows(rows, pages, range(len(layers))), _staged_slots(rows)
        # On the device: the one that a launch reads is the first of those behind so many tokens.
        self._counts = torch.arange(self._block + 1, dtype=torch.int32, device=staging.device)

    def load(self, layer: int, host_slots: Tensor, device_slots: Tensor) -> None:
        k, v = (side.buffer for side in self._layers[layer])
        keys, values = self._sides[layer]
        for host, device in in_blocks(host_slots, device_slots, self._page_size, self._block):
            self._rows.copy(host, self._slots[: len(device)], range(layer, layer + 1), to_host=False)
            with self._timed("dequantize"):
                read_to_places(keys, values, self._slots[: len(device)], device, self._counts[len(device) :], k, v)


def _staged(layers: Layers, block: int, staging: Tensor | None = None) -> list[list[Tensor]]:
    """Rows of `block` tokens by layer, uint8 [block, row_bytes] for keys and values, side by side in one buffer."""
    sizes = [block * side.row_bytes for sides in layers for side in sides]
    if staging is None:
        # Zeros, which bytes of a row stay that no kernel writes.
        staging = torch.zeros(sum(sizes), dtype=torch.uint8, device=layers[0][0].buffer.device)
    pieces = [piece.view(block, -1) for piece in staging[: sum(sizes)].split(sizes)]
    return [pieces[first : first + 2] for first in range(0, len(pieces), 2)]


def _staged_slots(rows: list[list[Tensor]]) -> Tensor:
    return torch.arange(len(rows[0][0]), device=rows[0][0].device)


def _kernel_side(side: DeviceSide, rows: Tensor) -> KernelSide:
    if side.format.spec is None:
        rows = rows.view(side.buffer.dtype).view(len(rows), *side.buffer.shape[1:])
    return KernelSide.of(PackedRows(rows, side.format))


def _unit(tensor: Tensor) -> int:
    """Elements of a distance of 1."""
    return ALIGNMENT // tensor.element_size()


def _distance(own: Tensor, base: Tensor) -> int:
    return _in_units(own.data_ptr() - base.data_ptr())


def _in_units(num_bytes: int) -> int:
    assert num_bytes % ALIGNMENT == 0
    return num_bytes // ALIGNMENT
