"""The host pool of one rank, pages of packed rows whatever its device pool holds, and its self-test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.host_tier.pages import HostPages, PageLayout
from kvtuner.runtime_loader.host_tier.stored_page import HEADER_BYTES
from kvtuner.runtime_loader.host_tier.transfer import Stopwatch, TorchMover, token_bytes
from kvtuner.runtime_loader.sglang.compat.hierarchical_cache import HostKVCache, allocate, allocator_type

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.host_tier.pages import Order
    from kvtuner.runtime_loader.host_tier.transfer import DeviceSide, Layers, MakeMover
    from kvtuner.runtime_loader.sglang.compat.hierarchical_cache import HostOptions
    from kvtuner.runtime_loader.sglang.hicache.page_identity import PageIdentity
    from kvtuner.runtime_loader.sglang.hicache.tier import TierMetrics

ORDER_OF_LAYOUT: Final[dict[str, Order]] = {
    "layer_first": "layer_first",
    "page_first": "page_first",
    "page_first_direct": "page_first",
}
"""The order of each of SGLang's layouts; the direct one differs in how SGLang copies, which is ours here."""


class PackedHostPool(HostKVCache):  # type: ignore[misc]  # sglang is not typed
    """SGLang's host pool with pages of packed rows in one buffer of bytes.

    Args:
        identity: The identity that pages must have to be read.
        zero_copy: Whether a storage reads the buffer itself; headers then lie in it.
    """

    def __init__(
        self,
        device_pool: Any,
        layers: Layers,
        identity: PageIdentity,
        metrics: TierMetrics,
        options: HostOptions,
        *,
        page_size: int,
        label: str = "kv",
        zero_copy: bool = False,
        make_mover: MakeMover = TorchMover,
    ) -> None:
        self.identity, self.metrics, self.zero_copy = identity, metrics, zero_copy
        self.device_layers, self._make_mover = layers, make_mover
        self.layer_num = self.target_layer_num = len(layers)
        self.transfer_device = torch.device(device_pool.device)
        self._order = ORDER_OF_LAYOUT[options.layout]
        self._row_bytes = token_bytes(layers)
        self._header_bytes = HEADER_BYTES if zero_copy else 0
        if zero_copy and self._order != "page_first":
            raise ServingError(
                f"--hicache-storage-backend {options.storage} reads whole pages from the host pool; serve with"
                " --hicache-mem-layout page_first"
            )
        self._timed = Stopwatch(self.transfer_device, metrics.took)
        # SGLang's constructor allocates, by `init_kv_buffer`, and so comes last.
        super().__init__(
            dtype=torch.uint8,
            device_capacity_tokens=device_pool.size,
            size_per_token=self._size_per_token(page_size),
            start_layer=device_pool.start_layer,
            end_layer=device_pool.end_layer,
            host_to_device_ratio=options.ratio,
            host_size=options.size_gb,
            page_size=page_size,
            layout=options.layout,
            pin_memory=self.transfer_device.type == "cuda",
            device="cpu",
            allocator_type=allocator_type(),
            pool_label=label,
        )
        self.is_ready = True

    def _size_per_token(self, page_size: int) -> int:
        return sum(map(sum, self._row_bytes)) + -(-self._header_bytes // page_size)

    def get_size_per_token(self) -> int:
        """Bytes of one token in host memory: its rows in all layers, and a share of a header where there is one."""
        return self._size_per_token(self.page_size)

    def get_ksize_per_token(self) -> int:
        """Bytes of one token's keys, headers apart."""
        return sum(keys for keys, _ in self._row_bytes)

    def init_kv_buffer(self) -> Tensor:
        """Allocate the buffer, uint8."""
        layout = PageLayout(self.page_size, self._row_bytes, self.page_num, self._order, self._header_bytes)
        buffer = allocate(self, layout.buffer_bytes, self.transfer_device, layout.record_bytes)
        self.pages = HostPages(layout, buffer)
        self.mover = self._make_mover(self.device_layers, self.pages, self._timed)
        return buffer

    def prepare_transfer_indices(
        self, host_indices: Tensor, device_indices: Tensor, io_backend: str
    ) -> tuple[Tensor, Tensor]:
        """Indices where the mover wants them."""
        # SGLang asks once for a transfer of all layers.
        return self.mover.place(host_indices), self.mover.place(device_indices)

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: Tensor, device_indices: Tensor, io_backend: str
    ) -> None:
        """Copy whole pages down, on the current stream."""
        self.metrics.moved("backup", len(host_indices))
        with self._timed("backup"):
            self.mover.backup(host_indices, device_indices)

    def load_to_device_per_layer(
        self, device_pool: Any, host_indices: Tensor, device_indices: Tensor, layer_id: int, io_backend: str, *,
        is_draft: bool = False,
    ) -> None:  # fmt: skip
        """Copy whole pages of one layer, by its number on this rank, up, on the current stream."""
        if layer_id == 0:
            self.metrics.moved("load", len(host_indices))
        with self._timed("load"):
            self.mover.load(layer_id, host_indices, device_indices)

    def get_data_page(self, index: Any, flat: bool = True) -> Tensor:
        """A page as it is stored, by its first slot: room for a header, then its bytes."""
        stored = self.get_dummy_flat_data_page()
        self.pages.get(int(index) // self.page_size, stored[HEADER_BYTES:])
        return stored

    def get_dummy_flat_data_page(self) -> Tensor:
        """Return room for a page as it is stored."""
        return torch.zeros(HEADER_BYTES + self.pages.layout.page_bytes, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: Any, data_page: Tensor) -> None:
        """Put a stored page, which was found right, where its first slot says."""
        self.pages.set(int(index) // self.page_size, data_page[HEADER_BYTES:])

    def record_at(self, index: Any) -> Tensor:
        """A page with its header, in the buffer itself, by its first slot."""
        return self.pages.record(int(index) // self.page_size)

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes of two objects for each page: the header with all keys, and all values."""
        assert self.zero_copy
        layout = self.pages.layout
        key_bytes = layout.header_bytes + layout.key_bytes
        addresses: list[int] = []
        sizes: list[int] = []
        for first in indices[:: self.page_size].tolist():
            start = self.kv_buffer.data_ptr() + first // self.page_size * layout.record_bytes
            addresses += [start, start + key_bytes]
            sizes += [key_bytes, layout.record_bytes - key_bytes]
        return addresses, sizes

    def clear(self) -> None:
        """Forget all pages."""
        super().clear()
        # Weights may have changed since; but not where SGLang's constructor clears.
        if getattr(self, "is_ready", False):
            self.identity.refresh()


@dataclass(frozen=True, slots=True, eq=False)
class _TestedPage:
    """One page of a layer's keys (side 0) or values (1), and what each end must hold of it."""

    layer: int
    side: int
    device: DeviceSide
    before: Tensor  # what the device held, [page_size, ...]
    rows: Tensor  # what the host must hold, uint8 [page_size, row_bytes]
    after: Tensor  # what the device must read back, [page_size, ...]

    @classmethod
    def write(cls, layer: int, side: int, device: DeviceSide, page_size: int, random: torch.Generator) -> _TestedPage:
        """Write a random page into the device's first."""
        shape = (page_size, *device.buffer.shape[1:])
        if device.packed and device.buffer.dtype == torch.uint8:
            page = torch.randint(256, shape, dtype=torch.uint8, generator=random)
        else:
            page = torch.randn(shape, generator=random).to(device.buffer.dtype)
        page = page.to(device.buffer.device)
        if device.moves_as_it_is:
            rows, after = page.view(torch.uint8).view(page_size, -1), page
        else:
            rows = device.format.pack(page)
            after = device.format.unpack(rows, page.dtype)
        before = device.buffer[:page_size].clone()
        device.buffer[:page_size] = page
        return cls(layer, side, device, before, rows.cpu(), after)


def check_host_pool(pool: PackedHostPool) -> None:
    """Move a page of each layer down and up again, and refuse what differs from `quant.py`."""
    # The page is the device's padding, which no request owns, and the host's last.
    random, page_size, num_layers = torch.Generator().manual_seed(0), pool.page_size, len(pool.device_layers)
    slots = torch.arange(page_size)
    host_slots, device_slots = pool.prepare_transfer_indices(
        slots + (pool.page_num - 1) * page_size, slots.to(pool.transfer_device), "kernel"
    )
    pages = [
        _TestedPage.write(layer, side, device, page_size, random)
        for layer, sides in enumerate(pool.device_layers)
        for side, device in enumerate(sides)
    ]
    pool.mover.backup(host_slots, device_slots)
    _wait(pool.transfer_device)
    for page in pages:
        if not torch.equal(pool.pages.rows(page.layer, page.side)[-1], page.rows):
            raise _failed(pool, page, "does not hold what quant.py makes of it")
        page.device.buffer[:page_size] = 0
    for layer in range(num_layers):
        pool.mover.load(layer, host_slots, device_slots)
    _wait(pool.transfer_device)
    for page in pages:
        if not torch.equal(page.device.buffer[:page_size], page.after):
            raise _failed(pool, page, "does not come back as it was stored")
        page.device.buffer[:page_size] = page.before
        pool.pages.rows(page.layer, page.side)[-1] = 0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _failed(pool: PackedHostPool, page: _TestedPage, what: str) -> ServingError:
    return ServingError(
        f"the self-test of the host tier failed: a page of {('keys', 'values')[page.side]} of layer"
        f" {pool.start_layer + page.layer} {what}; report this, and serve without --enable-hierarchical-cache"
    )
