"""What a rank keeps below its device: the host pool for SGLang, what makes pages its own, and what it says of them."""

from __future__ import annotations

import itertools
import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtuner.errors import ServingError
from kvtuner.precision import NATIVE_BITS
from kvtuner.runtime_loader.host_tier.stored_page import FAULTS
from kvtuner.runtime_loader.host_tier.transfer import DeviceSide, TorchMover
from kvtuner.runtime_loader.row_format import rank_formats
from kvtuner.runtime_loader.sglang.compat.hierarchical_cache import (
    extra_config,
    host_options,
    on_host_pool,
    on_new_weights,
    on_storage,
)
from kvtuner.runtime_loader.sglang.compat.metrics import add_to_counter, set_gauge
from kvtuner.runtime_loader.sglang.compat.parallel import ranks, tell_all
from kvtuner.runtime_loader.sglang.hicache.checked_storage import (
    KEY_DIGITS,
    PageFiles,
    checked,
    is_zero_copy,
    prepare_storage,
)
from kvtuner.runtime_loader.sglang.hicache.host_pool import PackedHostPool
from kvtuner.runtime_loader.sglang.hicache.page_identity import PageIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtuner.runtime_loader.host_tier.pages import HostPages
    from kvtuner.runtime_loader.host_tier.stopwatch import Timed, Work
    from kvtuner.runtime_loader.host_tier.stored_page import Fault
    from kvtuner.runtime_loader.host_tier.transfer import Layers, PageMover
    from kvtuner.runtime_loader.sglang.compat.hierarchical_cache import HostOptions
    from kvtuner.runtime_loader.sglang.compat.parallel import ParallelRanks
    from kvtuner.runtime_loader.sglang.hicache.page_identity import TieredRank


logger: Final = logging.getLogger("kvtuner")


_TRANSFERS: Final = "kvtuner_hicache_seconds", "Seconds of transfers between device and host, quantizing included."
WORK_SECONDS: Final[dict[Work, tuple[str, str, dict[str, str]]]] = {
    "backup": (*_TRANSFERS, {"direction": "backup"}),
    "load": (*_TRANSFERS, {"direction": "load"}),
    "quantize": ("kvtuner_hicache_quantize_seconds", "Seconds of quantizing within backups.", {}),
    "dequantize": ("kvtuner_hicache_dequantize_seconds", "Seconds of dequantizing within loads.", {}),
}
"""Name, help and labels of what counts the seconds of each."""


class TierMetrics:
    """Counts of what moves below the device, on /metrics.

    Args:
        labels: of this rank.
        page_size: tokens of a page.
        token_bytes: of one token below the device.
        unquantized_bytes: of one token in the served dtype.
    """

    def __init__(self, labels: Mapping[str, str], page_size: int, token_bytes: int, unquantized_bytes: int) -> None:
        self.labels, self._page_size = dict(labels), page_size
        self._token_bytes, self._unquantized_bytes = token_bytes, unquantized_bytes
        for direction in ("backup", "load"):
            self.moved(direction, 0)
        for work in WORK_SECONDS:
            self.took(work, 0.0)
        for fault in FAULTS:
            self.refused(fault, 0)

    def moved(self, direction: str, num_tokens: int) -> None:
        """Pages were moved down (backup) or up (load)."""
        labels = {**self.labels, "direction": direction}
        pages, kept = num_tokens // self._page_size, num_tokens * self._token_bytes
        spared = num_tokens * self._unquantized_bytes - kept
        add_to_counter("kvtuner_hicache_pages", "Pages moved between device and host.", labels, pages)
        add_to_counter("kvtuner_hicache_bytes", "Bytes moved between device and host.", labels, kept)
        add_to_counter(
            "kvtuner_hicache_bytes_saved", "Bytes that the served dtype would have moved more.", labels, max(spared, 0)
        )

    def took(self, work: Work, seconds: float) -> None:
        """A transfer took that long, or what of it is more than copying."""
        name, what, own = WORK_SECONDS[work]
        add_to_counter(name, what, {**self.labels, **own}, seconds)

    def refused(self, fault: Fault, count: int) -> None:
        """Stored pages were not what they should be."""
        labels = {**self.labels, "fault": fault}
        add_to_counter("kvtuner_hicache_pages_refused", "Stored pages that were read and not believed.", labels, count)


_rank: TieredRank | None = None


def install(refusing: Any) -> None:
    """Hook this process's host pools and storages.

    Raises:
        ServingError: a seam that another plugin has, or that is gone.
    """
    on_host_pool(_build, refusing)
    on_storage(PageFiles, partial(_open, refusing))
    on_new_weights(_suspend)


def begin(rank: TieredRank, device_pool: Any) -> None:
    """Say what this rank serves, once its device pool is built and before SGLang sizes the host's."""
    global _rank
    _rank = rank
    if not rank.packed:
        # SGLang sizes host pools to fit by what the device pool takes, which is more.
        per_token = sum(side.row_bytes for sides in _layers(rank, device_pool) for side in sides)
        device_pool.host_capacity_bytes = per_token * device_pool.size


_pools: Final[list[PackedHostPool]] = []
_opened = itertools.count()
_starting = False
"""Whether the next storage is opened by the server's own start, which then ends with one line where it cannot be."""


def _suspend(session: bool | None) -> None:
    for pool in _pools:
        pool.identity.suspend(session=session)


def _open(refusing: Any, create: Callable[[str, Any], Any], backend: str, config: Any, host_pool: Any) -> Any:
    """Open a storage at start, or when it is attached to a running server; on all ranks or on none.

    Raises:
        ServingError: a storage that cannot be used on this or another rank.
    """
    if not isinstance(host_pool, PackedHostPool):
        return create(backend, config)
    assert _rank is not None
    global _starting
    number, guard, _starting = next(_opened), refusing if _starting else nullcontext, False
    with guard():
        verdict, opened, reason = "ready", None, None
        try:
            opened = create(*prepare_storage(backend, config, host_pool))
        except Exception as error:  # whatever a storage raises: the others must hear of it
            verdict, reason = str(error) or type(error).__name__, error
        # SGLang goes on with collectives, in which ranks would wait for one that does not come.
        words = tell_all(f"kvtuner/storage/{number}", verdict, _rank.agreement_s)
        for rank, word in words.items():
            if word != "ready":
                if opened is not None and hasattr(opened, "close"):
                    opened.close()
                silent = f"rank {rank} does not answer whether it can use storage {backend}"
                raise ServingError(word or silent) from reason
        return checked(opened, host_pool)


def _build(device_pool: Any, *, page_size: int, label: str, size_gb: float | None) -> PackedHostPool:
    if _rank is None:
        raise ServingError("SGLang builds a host pool before it built the device's; drop --enable-hierarchical-cache")
    rank, here, options = _rank, ranks(), host_options()
    if size_gb is not None:
        options = replace(options, size_gb=size_gb)
    layers = _layers(rank, device_pool)
    unquantized = rank.config.dtype.itemsize * sum(
        side.format.num_heads * side.format.head_dim for sides in layers for side in sides
    )
    per_token = sum(side.row_bytes for sides in layers for side in sides)
    labels = {"digest": rank.profile.digest, "tp_rank": str(here.tp_rank), "pp_rank": str(here.pp_rank)}
    global_ids = range(device_pool.start_layer, device_pool.start_layer + len(layers))
    own = extra_config(options.extra) if options.storage else {}
    pool = PackedHostPool(
        device_pool,
        layers,
        PageIdentity(rank, here, global_ids, page_size),
        TierMetrics(labels, page_size, per_token, unquantized),
        options,
        page_size=page_size,
        label=label,
        zero_copy=is_zero_copy(options.storage, own),
        mover=_mover(rank, torch.device(device_pool.device)),
    )
    self_test(pool)
    global _starting
    _pools.append(pool)
    _starting = options.storage is not None
    announce(pool, rank, here, options, per_token, unquantized)
    return pool


def _layers(rank: TieredRank, device_pool: Any) -> Layers:
    here = ranks()
    global_ids = range(device_pool.start_layer, device_pool.start_layer + device_pool.layer_num)
    formats = rank_formats(rank.profile, global_ids, tp_rank=here.tp_rank, tp_size=here.tp_size)
    buffers = zip(device_pool.k_buffer, device_pool.v_buffer, strict=True)
    layers = [
        (DeviceSide(k, entry.k, rank.packed), DeviceSide(v, entry.v, rank.packed))
        for (k, v), entry in zip(buffers, formats, strict=True)
    ]
    for sides in () if rank.packed else layers:
        for side in sides:
            shape = (side.format.num_heads, side.format.head_dim)
            if side.buffer.dtype != rank.config.dtype or side.buffer.shape[1:] != shape:
                raise ServingError(
                    f"this model's KV pool holds {side.buffer.dtype} {tuple(side.buffer.shape[1:])} for a token, not"
                    f" {rank.config.dtype} {shape}; serve without --enable-kvtuner-hicache"
                )
    return layers


def _mover(rank: TieredRank, device: torch.device) -> Callable[[Layers, HostPages, Timed], PageMover]:
    if not rank.kernels:
        return TorchMover
    from kvtuner.runtime_loader.kernels.page_mover import TritonMover

    return lambda layers, pages, timed: TritonMover(layers, pages, device, timed)


def self_test(pool: PackedHostPool) -> None:
    """Move one page down and up again, compare both with what `quant.py` makes of it, and clear it.

    The page is the device's padding, which no request owns, and the host's last.

    Raises:
        ServingError: names the first layer whose page differs.
    """
    generator, page_size = torch.Generator().manual_seed(0), pool.page_size
    slots = torch.arange(page_size)
    host_slots, device_slots = pool.prepare_transfer_indices(
        slots + (pool.page_num - 1) * page_size, slots.to(pool.transfer_device), "kernel"
    )
    before, rows, after = [], [], []
    for sides in pool.device_layers:
        for side in sides:
            shape = (page_size, *side.buffer.shape[1:])
            if side.packed and side.buffer.dtype == torch.uint8:
                page = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
            else:
                page = torch.randn(shape, generator=generator).to(side.buffer.dtype)
            page = page.to(side.buffer.device)
            quantized = not side.moves_as_it_is
            packed = side.format.pack(page) if quantized else page.view(torch.uint8).view(page_size, -1)
            before.append(side.buffer[:page_size].clone())
            rows.append(packed.cpu())
            after.append(side.format.unpack(packed, page.dtype) if quantized else page)
            side.buffer[:page_size] = page
    pool.mover.backup(host_slots, device_slots)
    _settle(pool.transfer_device)
    places = [(layer, side) for layer in range(len(pool.device_layers)) for side in (0, 1)]
    for (layer, name), expected in zip(places, rows, strict=True):
        if not torch.equal(pool.pages.rows(layer, name)[-1], expected):
            raise _failed(pool, layer, name, "does not hold what quant.py makes of it")
        pool.device_layers[layer][name].buffer[:page_size] = 0
    for layer in range(len(pool.device_layers)):
        pool.mover.load(layer, host_slots, device_slots)
    _settle(pool.transfer_device)
    for (layer, name), expected, old in zip(places, after, before, strict=True):
        buffer = pool.device_layers[layer][name].buffer
        if not torch.equal(buffer[:page_size], expected):
            raise _failed(pool, layer, name, "does not come back as it was stored")
        buffer[:page_size] = old
        pool.pages.rows(layer, name)[-1] = 0


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _failed(pool: PackedHostPool, layer: int, side: int, what: str) -> ServingError:
    return ServingError(
        f"the self-test of the host tier failed: a page of {('keys', 'values')[side]} of layer"
        f" {pool.start_layer + layer} {what}; report this, and serve without --enable-hierarchical-cache"
    )


def announce(
    pool: PackedHostPool,
    rank: TieredRank,
    here: ParallelRanks,
    options: HostOptions,
    token_bytes: int,
    unquantized: int,
) -> None:
    """Say in the log what this rank keeps below its device, and set its metrics."""
    native = NATIVE_BITS // 8 * unquantized // rank.config.dtype.itemsize
    in_native = pool.page_num * pool.pages.layout.record_bytes // native
    device = "packed rows as on the device" if rank.packed else f"quantized below a device pool of {rank.config.dtype}"
    lines = [
        f"host tier of rank {here.world_rank} (TP {here.tp_rank}/{here.tp_size}, stage {here.pp_rank})"
        f" by profile {rank.profile.digest} of {rank.profile.model.id}",
        f"  {device}; pages of {pool.page_size} tokens, {pool.layout}, moved by {pool.mover.name}, self-test passed",
        f"  {token_bytes:,} bytes per token, {native:,} in bf16 ({native / token_bytes:.2f}x)",
        f"  {pool.size:,} tokens, in bytes that hold {in_native:,} in bf16",
        f"  storage {options.storage or 'none'}, keys with {(pool.identity.digest or b'').hex()[:KEY_DIGITS]}",
    ]
    logger.info("\n".join(lines))
    gauges = {
        "kvtuner_hicache_bytes_per_token": ("Bytes of one token below the device of this rank.", token_bytes),
        "kvtuner_hicache_bytes_per_token_bf16": ("The same in bf16.", native),
        "kvtuner_hicache_capacity_tokens": ("Tokens that the host pool holds.", pool.size),
        "kvtuner_hicache_capacity_tokens_bf16": ("Tokens that its bytes would hold in bf16.", in_native),
    }
    for name, (what, value) in gauges.items():
        set_gauge(name, what, pool.metrics.labels, value)
