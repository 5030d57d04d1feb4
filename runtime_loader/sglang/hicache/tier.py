"""The tiers of a rank below its device: it builds SGLang's host pool, opens its storages, and hears of new weights.

Pages that move are counted on the server's /metrics.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import ServingError
from kvtuner.precision import NATIVE_BITS
from kvtuner.runtime_loader.host_tier.stored_page import FAULTS
from kvtuner.runtime_loader.host_tier.transfer import DeviceSide, token_bytes
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
from kvtuner.runtime_loader.sglang.hicache.host_pool import PackedHostPool, check_host_pool
from kvtuner.runtime_loader.sglang.hicache.page_identity import PageIdentity
from kvtuner.runtime_loader.sglang.process_state import refusing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtuner.runtime_loader.host_tier.stored_page import Fault
    from kvtuner.runtime_loader.host_tier.transfer import Layers, Work
    from kvtuner.runtime_loader.sglang.compat.parallel import ParallelRanks
    from kvtuner.runtime_loader.sglang.hicache.page_identity import PageSource

logger: Final = logging.getLogger("kvtuner")

_TRANSFERS: Final = "kvtuner_hicache_seconds", "Seconds of transfers between device and host, quantizing included."
WORK_SECONDS: Final[dict[Work, tuple[str, str, dict[str, str]]]] = {
    "backup": (*_TRANSFERS, {"direction": "backup"}),
    "load": (*_TRANSFERS, {"direction": "load"}),
    "quantize": ("kvtuner_hicache_quantize_seconds", "Seconds of quantizing within backups.", {}),
    "dequantize": ("kvtuner_hicache_dequantize_seconds", "Seconds of dequantizing within loads.", {}),
}
"""The name, help and labels of the counter of each kind of work."""


class TierMetrics:
    """Counters of one rank's host tier, given the bytes of one token below the device and in the served dtype."""

    def __init__(self, labels: Mapping[str, str], page_size: int, token_bytes: int, unquantized_bytes: int) -> None:
        self.labels, self._page_size = dict(labels), page_size
        self.token_bytes, self.unquantized_bytes = token_bytes, unquantized_bytes
        for direction in ("backup", "load"):
            self.moved(direction, 0)
        for work in WORK_SECONDS:
            self.took(work, 0.0)
        for fault in FAULTS:
            self.refused(fault, 0)

    def moved(self, direction: str, num_tokens: int) -> None:
        """Count pages that were moved down (backup) or up (load)."""
        labels = {**self.labels, "direction": direction}
        pages, num_bytes = num_tokens // self._page_size, num_tokens * self.token_bytes
        saved = max(num_tokens * self.unquantized_bytes - num_bytes, 0)
        add_to_counter("kvtuner_hicache_pages", "Pages moved between device and host.", labels, pages)
        add_to_counter("kvtuner_hicache_bytes", "Bytes moved between device and host.", labels, num_bytes)
        add_to_counter(
            "kvtuner_hicache_bytes_saved", "Bytes that the served dtype would have moved more.", labels, saved
        )

    def took(self, work: Work, seconds: float) -> None:
        """Count the seconds of a transfer, or of quantizing within it."""
        name, what, own = WORK_SECONDS[work]
        add_to_counter(name, what, {**self.labels, **own}, seconds)

    def refused(self, fault: Fault, count: int) -> None:
        """Count stored pages that were not what they should be."""
        labels = {**self.labels, "fault": fault}
        add_to_counter("kvtuner_hicache_pages_refused", "Stored pages that were read and not believed.", labels, count)


class HostTier:
    """The tiers of one rank below its device."""

    def __init__(self) -> None:
        self._source: PageSource | None = None
        self._pools: list[PackedHostPool] = []
        self._num_opened = 0
        # A storage that the server's own start opens ends it with one line; who attaches a later one gets the error.
        self._is_starting = False

    def install(self) -> None:
        """Hook this process's host pools, storages and changes of weights."""
        on_host_pool(self.build)
        on_storage(PageFiles, self.open)
        on_new_weights(self.suspend)

    def begin(self, source: PageSource, device_pool: Any) -> None:
        """Take what this rank serves, once its device pool is built and before SGLang sizes the host's."""
        self._source = source
        if not source.packed:
            # SGLang sizes host pools to fit by what the device pool takes, which is more.
            per_token = sum(map(sum, token_bytes(layers_of(source, device_pool))))
            device_pool.host_capacity_bytes = per_token * device_pool.size

    def build(self, device_pool: Any, *, page_size: int, label: str, size_gb: float | None) -> PackedHostPool:
        """Build, test and announce the host pool of a device pool."""
        source, here, options = self._source, ranks(), host_options()
        if source is None:
            raise ServingError(
                "SGLang builds a host pool before it built the device's; drop --enable-hierarchical-cache"
            )
        if size_gb is not None:
            options = replace(options, size_gb=size_gb)
        layers = layers_of(source, device_pool)
        unquantized = source.config.dtype.itemsize * sum(
            side.format.num_heads * side.format.head_dim for sides in layers for side in sides
        )
        per_token = sum(map(sum, token_bytes(layers)))
        labels = {"digest": source.profile.digest, "tp_rank": str(here.tp_rank), "pp_rank": str(here.pp_rank)}
        global_ids = range(device_pool.start_layer, device_pool.start_layer + len(layers))
        storage_options = extra_config(options.extra) if options.storage else {}
        pool = PackedHostPool(
            device_pool,
            layers,
            PageIdentity(source, here, global_ids, page_size),
            TierMetrics(labels, page_size, per_token, unquantized),
            options,
            page_size=page_size,
            label=label,
            zero_copy=is_zero_copy(options.storage, storage_options),
            make_mover=source.make_mover,
        )
        check_host_pool(pool)
        self._pools.append(pool)
        self._is_starting = options.storage is not None
        _announce(pool, source, here, options.storage)
        return pool

    def open(self, create: Callable[[str, Any], Any], backend: str, config: Any, host_pool: Any) -> Any:
        """Open a storage at start, or when it is attached to a running server; on all ranks or on none."""
        if not isinstance(host_pool, PackedHostPool):
            return create(backend, config)
        guard, self._is_starting = refusing if self._is_starting else nullcontext, False
        with guard():
            verdict, storage, reason = "ready", None, None
            try:
                storage = create(*prepare_storage(backend, config, host_pool))
            except Exception as error:  # whatever a storage raises: the others must hear of it
                verdict, reason = str(error) or type(error).__name__, error
            for rank, word in self._tell(verdict).items():
                if word != "ready":
                    if storage is not None and hasattr(storage, "close"):
                        storage.close()
                    silent = f"rank {rank} does not answer whether it can use storage {backend}"
                    raise ServingError(word or silent) from reason
            return checked(storage, host_pool)

    def _tell(self, verdict: str) -> dict[int, str | None]:
        # SGLang goes on with collectives, in which ranks would wait for one that does not come.
        assert self._source is not None
        number, self._num_opened = self._num_opened, self._num_opened + 1
        return dict(tell_all(f"kvtuner/storage/{number}", verdict, self._source.agreement_s))

    def suspend(self, session: bool | None) -> None:
        """Leave storages alone until the cache is flushed: weights are about to change."""
        for pool in self._pools:
            pool.identity.suspend(session=session)


def layers_of(source: PageSource, device_pool: Any) -> Layers:
    """Return the keys and values of a device pool's layers, as they move to the host, or refuse another pool."""
    here = ranks()
    global_ids = range(device_pool.start_layer, device_pool.start_layer + device_pool.layer_num)
    formats = rank_formats(source.profile, global_ids, tp_rank=here.tp_rank, tp_size=here.tp_size)
    buffers = zip(device_pool.k_buffer, device_pool.v_buffer, strict=True)
    layers = [
        (DeviceSide(k, layer.k, source.packed), DeviceSide(v, layer.v, source.packed))
        for (k, v), layer in zip(buffers, formats, strict=True)
    ]
    for sides in () if source.packed else layers:
        for side in sides:
            shape = (side.format.num_heads, side.format.head_dim)
            if side.buffer.dtype != source.config.dtype or side.buffer.shape[1:] != shape:
                raise ServingError(
                    f"this model's KV pool holds {side.buffer.dtype} {tuple(side.buffer.shape[1:])} for a token, not"
                    f" {source.config.dtype} {shape}; serve without --enable-kvtuner-hicache"
                )
    return layers


def _announce(pool: PackedHostPool, source: PageSource, here: ParallelRanks, storage: str | None) -> None:
    per_token = pool.metrics.token_bytes
    native = NATIVE_BITS // 8 * pool.metrics.unquantized_bytes // source.config.dtype.itemsize
    in_native = pool.page_num * pool.pages.layout.record_bytes // native
    device = (
        "packed rows as on the device" if source.packed else f"quantized below a device pool of {source.config.dtype}"
    )
    lines = [
        f"host tier of rank {here.world_rank} (TP {here.tp_rank}/{here.tp_size}, stage {here.pp_rank})"
        f" by profile {source.profile.digest} of {source.profile.model.id}",
        f"  {device}; pages of {pool.page_size} tokens, {pool.layout}, moved by {pool.mover.name}, self-test passed",
        f"  {per_token:,} bytes per token, {native:,} in bf16 ({native / per_token:.2f}x)",
        f"  {pool.size:,} tokens, in bytes that hold {in_native:,} in bf16",
        f"  storage {storage or 'none'}, keys with {(pool.identity.digest or b'').hex()[:KEY_DIGITS]}",
    ]
    logger.info("\n".join(lines))
    gauges = {
        "kvtuner_hicache_bytes_per_token": ("Bytes of one token below the device of this rank.", per_token),
        "kvtuner_hicache_bytes_per_token_bf16": ("The same in bf16.", native),
        "kvtuner_hicache_capacity_tokens": ("Tokens that the host pool holds.", pool.size),
        "kvtuner_hicache_capacity_tokens_bf16": ("Tokens that its bytes would hold in bf16.", in_native),
    }
    for name, (what, value) in gauges.items():
        set_gauge(name, what, pool.metrics.labels, value)
