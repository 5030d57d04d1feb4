"""The self-test of a host pool: one page down and up again, compared with what `quant.py` makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtuner.errors import ServingError

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.host_tier.transfer import DeviceSide
    from kvtuner.runtime_loader.sglang.hicache.host_pool import PackedHostPool


@dataclass(frozen=True, slots=True, eq=False)
class _TestedPage:
    """One page of a layer's keys (side 0) or values (1), and what each end must hold of it.

    Attributes:
        before: What the device held, [page_size, ...].
        rows: What the host must hold, uint8 [page_size, row_bytes].
        after: What the device must read back.
    """

    layer: int
    side: int
    device: DeviceSide
    before: Tensor
    rows: Tensor
    after: Tensor

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


def self_test(pool: PackedHostPool) -> None:
    """Move one page down and up again, compare both with what `quant.py` makes of it, and clear it.

    The page is the device's padding, which no request owns, and the host's last.

    Raises:
        ServingError: The page of a layer differs; the first such layer is named.
    """
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
