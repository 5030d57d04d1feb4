"""Storages below the host pool: every page sealed on its way out and checked on its way in."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.host_tier.stored_page import fault_of, seal
from kvtuner.runtime_loader.sglang.compat.hierarchical_cache import (
    HiCacheFile,
    HiCacheStorage,
    is_mooncake,
    remove_objects,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from kvtuner.runtime_loader.host_tier.stored_page import Fault
    from kvtuner.runtime_loader.sglang.hicache.host_pool import PackedHostPool

STORAGES: Final = ("file", "juicefs", "mooncake", "dynamic")
"""Backends that pages of this kind were tried with; `dynamic` is the user's own."""
_3FS: Final = "takes keys for as long as values, or puts pages into the host pool before they can be checked"
FILE_VARIABLE: Final = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
JUICEFS_FOLDER: Final = "kvtuner-hicache"
KEY_DIGITS: Final = 24
LONGEST_NAME: Final = 255
ABANDONED_S: Final = 3600
"""The age of a temporary file that nobody writes any more."""
_OF_THE_PROCESS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say nothing about the file."""

logger: Final = logging.getLogger("kvtuner")


def is_zero_copy(backend: str | None, config: Mapping[str, Any]) -> bool:
    """Whether a storage reads and writes the host pool's own memory."""
    return backend == "mooncake" or (backend == "dynamic" and bool(config.get("interface_v1", 0)))


def check_storage(backend: str, config: Mapping[str, Any]) -> None:
    """Refuse a storage that was never tried, or is not there, on the machine that will use it."""
    if backend == "lmcache":
        raise ServingError(
            "--hicache-storage-backend lmcache: LMCache is no storage below HiCache's host pages; use --enable-lmcache"
            " in place of --enable-hierarchical-cache, or --hicache-storage-backend file"
        )
    if backend not in STORAGES:
        reason = _3FS if backend == "hf3fs" else "was never tried with quantized pages"
        raise ServingError(f"--hicache-storage-backend {backend} {reason}; use one of {', '.join(STORAGES)}")
    if backend == "juicefs":
        _juicefs_folder(config)


def _juicefs_folder(config: Mapping[str, Any]) -> str:
    mount_point = config.get("mount_point")
    example = '--hicache-storage-backend-config \'{"mount_point": "/mnt/jfs"}\''
    if not isinstance(mount_point, str):
        raise ServingError(f"--hicache-storage-backend juicefs needs to know where it is mounted: {example}")
    if not os.path.ismount(mount_point):
        raise ServingError(
            f"nothing is mounted at {mount_point}: pages would fill the disk below it; mount the filesystem first, or"
            ' use --hicache-storage-backend file with {"file_storage_path": ...}'
        )
    if not os.access(mount_point, os.W_OK | os.X_OK):
        raise ServingError(f"{mount_point} cannot be written to; mount it with write access")
    if os.environ.get(FILE_VARIABLE):
        raise ServingError(f"{FILE_VARIABLE} would take the place of {mount_point}; unset it")
    return os.path.join(mount_point, JUICEFS_FOLDER)


def prepare_storage(backend: str, config: Any, host_pool: PackedHostPool) -> tuple[str, Any]:
    """Return SGLang's name and configuration of a storage, which is checked and made ready on this machine."""
    own = dict(config.extra_config or {})
    check_storage(backend, own)
    if is_zero_copy(backend, own) != host_pool.zero_copy:
        raise ServingError(
            f"the host pool was not laid out for {backend}: restart with --hicache-storage-backend {backend}"
        )
    if backend != "juicefs":
        return backend, config
    folder = _juicefs_folder(own)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ServingError(f"{folder} cannot be made: {error}") from error
    return "file", replace(config, extra_config={**own, "file_storage_path": folder})


def checked(backend: Any, host_pool: PackedHostPool) -> CheckedStorage:
    """Return a storage that believes nothing."""
    # Under the name of SGLang's class, which its answers show.
    named = type(type(backend).__name__, (CheckedStorage,), {})
    storage: CheckedStorage = named(backend, host_pool)
    return storage


class CheckedStorage(HiCacheStorage):  # type: ignore[misc]  # sglang is not typed
    """A storage of a host pool's pages, sealed when written and believed only when they are what was asked for.

    A page that is not what its key says is a miss: it is counted, logged once for each batch, and removed where the
    storage can.
    """

    def __init__(self, backend: Any, host_pool: PackedHostPool) -> None:
        self._backend, self._pool = backend, host_pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_backend"], name)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Hand the host pool on."""
        self._backend.register_mem_pool_host(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Hand a named host pool on."""
        self._backend.register_mem_host_pool_v2(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        """Tell the storage that it has all host pools."""
        self._backend.on_host_pools_registered()

    def exists(self, key: str) -> bool:
        """Whether a page is stored, whatever it holds."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Count the pages from the first on that are stored, whatever they hold."""
        digest = self._pool.identity.digest
        return int(self._backend.batch_exists(_keys_of(digest, keys), extra_info)) if digest else 0

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        """Return a stored page, checked."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Tensor | None]:
        """Return stored pages, checked; None for one that is not there or not right."""
        digest = self._pool.identity.digest
        stored = self._backend.batch_get(_keys_of(digest, keys), target_locations) if digest else None
        if digest is None or stored is None:
            return [None] * len(keys)
        is_right = self._checked(digest, keys, stored)
        return [page if right else None for page, right in zip(stored, is_right, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Seal a page and store it."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Seal pages and store them."""
        digest = self._pool.identity.digest
        if digest is None:
            return False
        for key, page in zip(keys, values, strict=True):
            seal(page, digest, key)
        return bool(self._backend.batch_set(_keys_of(digest, keys), values))

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages straight into the host pool, and check them there."""
        digest = self._pool.identity.digest
        if digest is None:
            return [False] * len(keys)
        is_read = self._backend.batch_get_v1(_keys_of(digest, keys), host_indices, extra_info)
        records = zip(self._records(host_indices), is_read, strict=True)
        return self._checked(digest, keys, [record if is_there else None for record, is_there in records])

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Seal pages in the host pool, and let the storage read them there."""
        digest = self._pool.identity.digest
        if digest is None:
            return [False] * len(keys)
        for key, record in zip(keys, self._records(host_indices), strict=True):
            seal(record, digest, key)
        return list(self._backend.batch_set_v1(_keys_of(digest, keys), host_indices, extra_info))

    def clear(self) -> bool:
        """Remove this rank's pages; a storage that could only remove everybody's is left as it is."""
        if isinstance(self._inner, PageFiles):
            return self._inner.clear()
        logger.error("kvtuner: this storage can only be cleared of everybody's pages; clear it by its own tools")
        return False

    def get_stats(self) -> Any:
        """Return the storage's own statistics."""
        return self._backend.get_stats()

    @property
    def _inner(self) -> Any:
        """The storage itself, below what SGLang wraps it in for tests."""
        return getattr(self._backend, "_backend", self._backend)

    def _records(self, host_indices: Tensor) -> list[Tensor]:
        return [self._pool.record_at(index) for index in host_indices[:: self._pool.page_size].tolist()]

    def _checked(self, digest: bytes, keys: Sequence[str], pages: Sequence[Tensor | None]) -> list[bool]:
        """Return whether each page is there and right, and refuse those that are wrong."""
        faults = {
            key: fault
            for key, page in zip(keys, pages, strict=True)
            if page is not None and (fault := fault_of(page, digest, key))
        }
        if faults:
            refuse_pages(self._pool, faults)
            for stored_key in _keys_of(digest, list(faults)):
                self._discard(stored_key)
        return [page is not None and key not in faults for key, page in zip(keys, pages, strict=True)]

    def _discard(self, stored_key: str) -> None:
        if isinstance(self._inner, PageFiles):
            self._inner.discard(stored_key)
        elif is_mooncake(self._inner) and not remove_objects(self._inner, stored_key):
            logger.warning("kvtuner: Mooncake keeps a bad page, which may be in use: %s", stored_key)


def _keys_of(digest: bytes, keys: Sequence[str]) -> list[str]:
    # They end in what pages must be made by, so that those of others are not looked at.
    return [f"{key}-{digest.hex()[:KEY_DIGITS]}" for key in keys]


def refuse_pages(pool: PackedHostPool, faults: Mapping[str, Fault]) -> None:
    """Count pages that were read and not believed, by their keys, and warn of them."""
    for fault, count in Counter(faults.values()).items():
        pool.metrics.refused(fault, count)
    key, fault = next(iter(faults.items()))
    logger.warning(
        "kvtuner: %d stored pages are not what they should be and are computed again (first: %s, %s)",
        len(faults), key, fault,
    )  # fmt: skip


class PageFiles(HiCacheFile):  # type: ignore[misc]  # sglang is not typed
    """SGLang's folder of files, shared by servers of other profiles, on a disk that may break."""

    def __init__(self, storage_config: Any, *arguments: Any) -> None:
        super().__init__(storage_config, *arguments)
        try:
            os.makedirs(self.file_path, exist_ok=True)  # SGLang's first rank does, which may be on another machine
        except OSError as error:
            raise ServingError(f"{self.file_path} cannot be made: {error}") from error
        longest = len(f"{'0' * (64 + 1 + KEY_DIGITS)}{self.config_suffix}.bin".encode())
        if longest > LONGEST_NAME:
            raise ServingError(
                f"names of stored pages would take {longest} bytes, more than the {LONGEST_NAME} of a filesystem; serve"
                " with a shorter --served-model-name"
            )

    def get(self, key: str, target_location: Tensor, target_sizes: Any = None) -> Tensor | None:
        """Return a file's bytes, in `target_location` where they fit it."""
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                size = _read_fully(file, target_location.numpy().data)
                rest = file.read(1)
        except FileNotFoundError:
            self._forget(key)
            return None
        except OSError as error:
            logger.warning("kvtuner: a stored page cannot be read: %s", error)
            if error.errno not in _OF_THE_PROCESS:
                refuse_pages(self.mem_pool_host, {key: "unreadable"})
                self.discard(key)
            return None
        self._evictor.touch(self._get_suffixed_key(key), path)
        # One of the wrong length is handed on as it is, to be found wrong.
        page = target_location[:size]
        return torch.cat((page, page.new_zeros(1))) if rest else page

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page."""
        path = self._path(key)
        # SGLang's own writing does not notice that the last piece did not fit on the disk.
        for _ in range(2):  # what was there, and not whole, is written again
            if not super().set(key, value):
                return False
            try:
                if os.stat(path).st_size == value.nbytes:
                    return True
            except OSError:  # evicted since, or the disk went away: a miss, later
                return True
            self.discard(key)
        logger.warning("kvtuner: a page was not written whole, perhaps the disk is full: %s", path)
        return False

    def discard(self, key: str) -> None:
        """Remove a page, so that it can be written anew."""
        path = self._path(key)
        try:
            (os.rmdir if os.path.isdir(path) else os.remove)(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("kvtuner: a bad page stays where it is: %s", error)
        self._evictor.abort(self._get_suffixed_key(key))
        self._forget(key)

    def clear(self) -> bool:
        """Remove this rank's pages, and what killed writers left; those of other profiles, models and ranks stay."""
        digest = self.mem_pool_host.identity.digest
        mine = f"-{digest.hex()[:KEY_DIGITS]}{self.config_suffix}.bin" if digest else None
        try:
            for entry in os.scandir(self.file_path):
                with suppress(FileNotFoundError):  # of others, who clear or write too
                    is_abandoned = entry.name.endswith(".tmp") and time.time() - entry.stat().st_mtime > ABANDONED_S
                    if is_abandoned or (mine is not None and entry.name.endswith(mine)):
                        os.remove(entry)
        except OSError as error:
            logger.error("kvtuner: stored pages cannot be removed: %s", error)
            return False
        finally:
            self._evictor.clear()
            if self.metadata_cache is not None:
                self.metadata_cache.clear()
        if mine is None:
            logger.error("kvtuner: no stored page was removed: which are this server's is known after a flush")
        return mine is not None

    def _path(self, key: str) -> str:
        return os.path.join(self.file_path, f"{self._get_suffixed_key(key)}.bin")

    def _forget(self, key: str) -> None:
        if self.metadata_cache is not None:
            self.metadata_cache.remove(self._get_suffixed_key(key))


def _read_fully(file: Any, room: memoryview) -> int:
    # One read may give less than there is and fits, as on a network's filesystem.
    size = 0
    while size < len(room):
        count = file.readinto(room[size:])
        if not count:
            break
        size += count
    return size
