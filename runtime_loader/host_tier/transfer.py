"""Pages between a device and the host: what moves them, one that does in plain torch, and the seconds that it takes.

Two kinds of device pools: one that holds rows, which move as they are, and one in the model's dtype, whose keys and
values become rows on their way down and are read back on their way up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from kvtuner.runtime_loader.row_format import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from kvtuner.runtime_loader.host_tier.pages import HostPages
    from kvtuner.runtime_loader.row_format import RowFormat

Work = Literal["backup", "load", "quantize", "dequantize"]
"""The kinds of work: a transfer down or up, and the parts of it that are more than copying."""
Timed = Callable[[Work], AbstractContextManager[None]]


def untimed(_: Work) -> AbstractContextManager[None]:
    """Time nothing: a `Stopwatch` that nobody reads."""
    return nullcontext()


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSide:
    """Keys or values of one layer on the device.

    Attributes:
        buffer: [slots, row_bytes] uint8, or [slots, num_heads, head_dim] in the model's dtype.
        packed: Whether the buffer holds rows of that format already.
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
    """The mover of a host tier's pages. Slots are whole pages, in the order of their tokens."""

    name: str

    def place(self, slots: Tensor) -> Tensor:
        """Slots where `backup` and `load` want them; once for a transfer."""

    def backup(self, host_slots: Tensor, device_slots: Tensor) -> None:
        """Copy tokens of all layers from device slots [tokens] to host slots [tokens]."""

    def load(self, layer: int, host_slots: Tensor, device_slots: Tensor) -> None:
        """Copy tokens of one layer of this rank from host slots [tokens] to device slots [tokens]."""


MakeMover = Callable[[Layers, "HostPages", "Timed"], PageMover]
"""A factory of the mover between a rank's layers and the pages on the host, which times quantizing."""


class TorchMover:
    """`PageMover` in plain torch, for layers in host memory; `timed` is the context around (de)quantizing."""

    name = "torch"

    def __init__(self, layers: Layers, pages: HostPages, timed: Timed = untimed) -> None:
        self._layers, self._pages, self._timed = layers, pages, timed

    def place(self, slots: Tensor) -> Tensor:
        """See `PageMover.place`."""
        return slots

    def backup(self, host_slots: Tensor, device_slots: Tensor) -> None:
        """See `PageMover.backup`."""
        page_size = self._pages.layout.page_size
        for host, device in in_blocks(host_slots, device_slots, page_size, block_tokens(page_size)):
            host_pages, device_pages = pages_of(host, page_size), pages_of(device, page_size)
            for layer, sides in enumerate(self._layers):
                for side_index, side in enumerate(sides):
                    target = self._pages.rows(layer, side_index)
                    # Whole pages, [pages, page_size, row_bytes // 8].
                    if side.moves_as_it_is:
                        pages = _words(side.raw.view(-1, *target.shape[1:]))[device_pages]
                    else:
                        with self._timed("quantize"):
                            pages = _words(side.format.pack(side.buffer[device]).view(-1, *target.shape[1:]))
                    _words(target)[host_pages] = pages

    def load(self, layer: int, host_slots: Tensor, device_slots: Tensor) -> None:
        """See `PageMover.load`."""
        page_size = self._pages.layout.page_size
        for host, device in in_blocks(host_slots, device_slots, page_size, block_tokens(page_size)):
            for side_index, side in enumerate(self._layers[layer]):
                source = self._pages.rows(layer, side_index)
                pages = _words(source)[pages_of(host, page_size)]
                if side.moves_as_it_is:
                    _words(side.raw.view(-1, *source.shape[1:]))[pages_of(device, page_size)] = pages
                else:
                    rows = pages.view(torch.uint8).flatten(0, 1)
                    with self._timed("dequantize"):
                        side.buffer[device] = side.format.unpack(rows, side.buffer.dtype)


def _words(pages: Tensor) -> Tensor:
    # Bytes [..., row_bytes] as words, of which there are fewer to index.
    return pages.view(torch.int64)


def block_tokens(page_size: int, most: int = BLOCK_TOKENS) -> int:
    """Tokens that move at a time, at most so many in whole pages: bounds what a transfer takes of the device."""
    return max(min(BLOCK_TOKENS, most) // page_size, 1) * page_size


def in_blocks(host_slots: Tensor, device_slots: Tensor, page_size: int, block: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Slots in blocks of so many, which are whole pages."""
    assert len(host_slots) == len(device_slots)
    assert len(host_slots) % page_size == 0
    yield from zip(host_slots.split(block), device_slots.split(block), strict=True)


def pages_of(slots: Tensor, page_size: int) -> Tensor:
    """Pages of slots that are whole pages, in their order."""
    return slots[::page_size] // page_size


def token_bytes(layers: Sequence[tuple[DeviceSide, DeviceSide]]) -> tuple[tuple[int, int], ...]:
    """Bytes of one token's rows below the device, keys and values, by layer."""
    return tuple((keys.row_bytes, values.row_bytes) for keys, values in layers)


class Stopwatch:
    """`with stopwatch("backup"): ...`, on a device, calls `took` with the work and its seconds.

    The time is that of the clock on a processor, and of the current stream on a GPU.
    """

    def __init__(self, device: torch.device, took: Callable[[Work, float], None]) -> None:
        self._on_stream, self._took = device.type == "cuda", took
        self._running: deque[tuple[Work, Any, Any]] = deque()

    @contextmanager
    def __call__(self, work: Work) -> Iterator[None]:
        """Time what is done, or put on the stream, inside."""
        if not self._on_stream:
            begun = time.perf_counter()
            yield
            self._took(work, time.perf_counter() - begun)
            return
        # On a GPU work is counted once later work begins and it is done: nothing waits for it.
        while self._running and self._running[0][2].query():
            done, first, last = self._running.popleft()
            self._took(done, first.elapsed_time(last) / 1000)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._running.append((work, first, last))
