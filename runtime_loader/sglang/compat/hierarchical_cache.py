"""SGLang's hierarchical cache: who builds the host pool, what it must do, and who opens a storage."""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS, get_allocator_type
from sglang.srt.runtime_context import get_memory

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.compat.hooks import AROUND, check_leading, install
from kvtuner.runtime_loader.sglang.process_state import refusing

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["HiCacheFile", "HiCacheStorage", "HostKVCache"]  # handed on

_ASSEMBLER: Final = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler"
_FACTORY: Final = "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory"
_HOST_POOL: Final = "sglang.srt.mem_cache.pool_host.base.HostKVCache"
_ALLOCATE: Final = "sglang.srt.mem_cache.pool_host.common.alloc_with_host_register"
_ALLOCATE_TAKES: Final = ("dims", "dtype", "device", "pin_memory", "allocator", "registration_granularity_bytes")
# The methods that `PackedHostPool` overrides, with the parameters that SGLang gives by position.
_OVERRIDDEN: Final = {
    "get_size_per_token": (),
    "init_kv_buffer": (),
    "load_to_device_per_layer": ("device_pool", "host_indices", "device_indices", "layer_id", "io_backend"),
    "backup_from_device_all_layer": ("device_pool", "host_indices", "device_indices", "io_backend"),
    "get_data_page": ("index", "flat"),
    "get_dummy_flat_data_page": (),
    "set_from_flat_data_page": ("index", "data_page"),
    "prepare_transfer_indices": ("host_indices", "device_indices", "io_backend"),
    "clear": (),
}
_WEIGHTS: Final = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
# Whether an update opens a session of changes or closes one; None for a change by itself.
_UPDATES: Final = {
    "update_weights_from_disk": None,
    "update_weights_from_distributed": None,
    "update_weights_from_tensor": None,
    "update_weights_from_ipc": None,
    "check_weights": None,
    "begin_weight_update": True,
    "end_weight_update": False,
}
_RESETS: Final = "reset_tensors"
_FILE: Final = "sglang.srt.mem_cache.hicache_storage.HiCacheFile"
# What `PageFiles` overrides or calls.
_FILE_USED: Final = {
    "get": ("key", "target_location", "target_sizes"),
    "set": ("key", "value"),
    "_get_suffixed_key": ("key",),
    "clear": (),
}

allocator_type = get_allocator_type


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The server's options below the device, as SGLang names them.

    Attributes:
        ratio: The host tokens per device token.
        size_gb: The size of the host pool in 10**9 bytes; 0 where the ratio decides it.
        extra: The storage's own options, as the user wrote them.
    """

    ratio: float
    size_gb: float
    layout: str
    storage: str | None
    extra: str | None


def host_options() -> HostOptions:
    """Return the options that SGLang published in this process."""
    memory = get_memory()
    return HostOptions(
        ratio=memory.hicache_ratio,
        size_gb=memory.hicache_size,
        layout=memory.hicache_mem_layout,
        storage=memory.hicache_storage_backend,
        extra=memory.hicache_storage_backend_extra_config,
    )


def extra_config(text: str | None) -> dict[str, Any]:
    """Read the storage's own options as SGLang does: JSON, or a file after an @."""
    flag = "--hicache-storage-backend-extra-config"
    try:
        parsed, *_ = HybridCacheController.parse_storage_backend_extra_config(text)
    except (OSError, ValueError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ServingError(f"{flag} cannot be read ({error}); it is a JSON object, or @ and a file's name") from error
    if not isinstance(parsed, dict):
        raise ServingError(f"{flag} must be a JSON object, not {text!r}")
    return parsed


def allocate(pool: Any, num_bytes: int, device: torch.device, record_bytes: int) -> Tensor:
    """Host memory of a pool, zeroed by the system, that the device reaches.

    SGLang registers large pools piece by piece: a piece is whole records, and ends where a page of the system does, of
    which no part may be registered twice.
    """
    buffer: Tensor = ALLOC_MEMORY_FUNCS[device.type](
        (num_bytes,), dtype=torch.uint8, device="cpu", pin_memory=pool.pin_memory, allocator=pool.allocator,
        registration_granularity_bytes=math.lcm(record_bytes, mmap.PAGESIZE),
    )  # fmt: skip
    return buffer


def on_host_pool(make: Callable[..., Any]) -> None:
    """Let `make` build the host pool of a device pool: `make(device_pool, page_size=, label=, size_gb=)`."""

    def build(
        original: Callable[..., Any], *, kv_pool: Any, page_size: int, use_mla: bool | None = None,
        override_kv_cache_dim: int | None = None, host_size: float | None = None,
        mtp_draft_device_pools: tuple[Any, ...] = (), pool_label: str = "kv",
    ) -> Any:  # fmt: skip
        with refusing():
            if mtp_draft_device_pools:
                raise ServingError(
                    "a quantized host tier does not hold the rows of drafts; drop --speculative-algorithm"
                )
            return make(kv_pool, page_size=page_size, label=pool_label, size_gb=host_size)

    check_leading(_ALLOCATE, *_ALLOCATE_TAKES)
    for name, parameters in _OVERRIDDEN.items():
        check_leading(f"{_HOST_POOL}.{name}", "self", *parameters)
    install(f"{_ASSEMBLER}.build_kv_host_pool", build, AROUND, "kv_pool", "page_size", "host_size", "pool_label")


def on_storage(file_class: type, opened: Callable[[Callable[[str, Any], Any], str, Any, Any], Any]) -> None:
    """Let `opened(create, backend, config, host_pool)` open storages, and files be of `file_class`.

    `create(backend, config)` opens one as SGLang does.
    """

    def create_backend(
        original: Callable[..., Any],
        cls: Any,
        backend_name: str,
        storage_config: Any,
        mem_pool_host: Any,
        **kwargs: Any,
    ) -> Any:
        def create(name: str, config: Any) -> Any:
            return original(cls, name, config, mem_pool_host, **kwargs)

        return opened(create, backend_name, storage_config, mem_pool_host)

    for name, parameters in _FILE_USED.items():
        check_leading(f"{_FILE}.{name}", "self", *parameters)
    install(f"{_FACTORY}.create_backend", create_backend, AROUND, "backend_name", "storage_config", "mem_pool_host")
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    # SGLang imports a backend by the loader that is registered, so that the class cannot be replaced in its module.
    registered = StorageBackendFactory._registry.get("file")
    if registered is None:
        raise ServingError("this SGLang has no storage backend file; install a version that kvtuner is tested with")
    registered["loader"] = lambda: file_class


def on_new_weights(before: Callable[[bool | None], None]) -> None:
    """Call `before` before any weight of a model that is served changes.

    Its argument is whether that opens a session of changes (True) or closes one (False).
    """

    def hook(session: bool | None) -> Callable[..., Any]:
        def update(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
            if getattr(recv_req, "action", _RESETS) == _RESETS:  # checks that only look have another
                before(session)
            return original(self, recv_req)

        return update

    for name, session in _UPDATES.items():
        install(f"{_WEIGHTS}.{name}", hook(session), AROUND, "recv_req")


def is_mooncake(backend: Any) -> bool:
    """Whether a storage is Mooncake's, which keeps two objects for a page."""
    return type(backend).__module__.startswith("sglang.srt.mem_cache.storage.mooncake_store.")


def remove_objects(backend: Any, key: str) -> bool:
    """Remove both objects of a page from Mooncake's store, whoever reads them, and return whether they are gone."""
    store, suffix = backend.store, backend.mha_suffix
    (tagged,) = backend._tag_keys([key])
    return [store.remove(f"{tagged}_{suffix}_{part}", force=True) for part in "kv"] == [0, 0]
