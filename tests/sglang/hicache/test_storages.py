"""Storages of every kind below real servers: mounted, read-only, gone, shared, somebody's own; sizes by themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fixture_types import ProfileOf, Prompts, SaveProfile, Serve

    from kvtuner.exported_configs.profile.profile import Profile

pytestmark = pytest.mark.full


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A filesystem in memory, mounted in a folder."""
    folder = tmp_path / "jfs"
    folder.mkdir()
    if os.geteuid() != 0 or run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)):
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        run("umount", "-l", str(folder))


def run(*command: str) -> int:
    return subprocess.run(command, capture_output=True).returncode


def with_storage(flags: tuple[str, ...], backend: str, **config: Any) -> tuple[str, ...]:
    own = json.dumps({**config, "prefetch_threshold": 1})
    return (
        *flags, "--hicache-storage-backend", backend, "--hicache-storage-backend-config", own,
        "--hicache-storage-prefetch-policy", "wait_complete",
    )  # fmt: skip


def test_a_mounted_filesystem_that_turns_read_only_and_goes_away(
    served: tuple[Path, Profile, Path],
    asking: Any,
    tiers: Callable[..., tuple[str, ...]],
    serve: Serve,
    mounted: Path,
    prompts: Prompts,
) -> None:
    folder, _, _ = served
    flags = with_storage(tiers(), "juicefs", mount_point=str(mounted))
    with serve(folder, *flags) as server:
        asking.each(server)
    pages = mounted / "kvtuner-hicache"
    written = set(pages.iterdir())
    assert written
    with serve(folder, *flags) as server:
        assert asking.each(server)["storage"] > 500
        assert run("mount", "-o", "remount,ro", str(mounted)) == 0
        server.generate(prompts(*[150] * 4, seed=91), 4)  # for which there is no room on the disk
        asking.soak(server, 60)
        assert set(pages.iterdir()) == written
        assert run("umount", "-l", str(mounted)) == 0
        server.flush()
        server.generate(prompts(*[150] * 4, seed=92), 4)
        assert asking.each(server)["storage"] == 0
        assert not any(mounted.iterdir()), "pages fill the disk below the mount"
    refused = subprocess.run(
        [sys.executable, "-c", CHECK, str(mounted)], capture_output=True, text=True, timeout=120, env=served_env()
    )
    assert "nothing is mounted at" in refused.stderr


CHECK = """
import sys
from kvtuner.runtime_loader.sglang.hicache.checked_storage import check_storage
check_storage("juicefs", {"mount_point": sys.argv[1]})
"""


def served_env() -> dict[str, str]:
    root = Path(__file__).resolve().parents[3]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "examples" / "sglang_on_cpu"), str(root)])}


def test_two_servers_of_different_profiles_share_a_folder_at_once(
    served: tuple[Path, Profile, Path],
    asking: Any,
    tiers: Callable[..., tuple[str, ...]],
    serve: Serve,
    profile_of: ProfileOf,
    save_profile: SaveProfile,
    tmp_path: Path,
) -> None:
    folder, _, _ = served
    config = AutoConfig.from_pretrained(folder)
    other = save_profile(profile_of(config, [LayerQuantization(8, 8)] * 4))
    pages = tmp_path / "pages"
    with serve(folder, *tiers(pages)) as one, serve(folder, *tiers(pages, profile=other)) as two:
        for server in (one, two):
            assert sum(asking.sources(each)["storage"] for each in asking.answered(server).truth) == 0
        theirs = asking.answered(two)
        with ThreadPoolExecutor(2) as pool:
            for found in pool.map(lambda pair: pair[0].soak(pair[1], 80), ((asking, one), (theirs, two))):
                assert found["host"] > 0
        for server, own in ((one, asking), (two, theirs)):
            server.flush()
            assert own.each(server)["storage"] > 500
            assert asking.metric(server, "kvtuner_hicache_pages_refused_total") == 0


OBJECTS = '''
"""A storage of somebody's own: a page's keys and values as files, copied by address."""
import ctypes
from pathlib import Path

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage


class Objects(HiCacheStorage):
    def __init__(self, storage_config, kwargs):
        self.folder = Path(storage_config.extra_config["folder"])

    def _each(self, keys, host_indices):
        addresses, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        return zip([self.folder / f"{key}_{part}" for key in keys for part in "kv"], addresses, sizes, strict=True)

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        for path, address, size in self._each(keys, host_indices):
            path.write_bytes(ctypes.string_at(address, size))
        return [True] * len(keys)

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        there = []
        for path, address, size in self._each(keys, host_indices):
            data = path.read_bytes() if path.exists() else b""
            ctypes.memmove(address, data, min(len(data), size))
            there.append(len(data) == size)
        return [k and v for k, v in zip(there[::2], there[1::2], strict=True)]

    def exists(self, key):
        return (self.folder / f"{key}_v").exists()

    def get(self, *arguments, **more):
        raise NotImplementedError

    batch_get = set = batch_set = get
'''


def test_somebodys_own_storage_reads_and_writes_the_host_pool_itself(
    served: tuple[Path, Profile, Path], asking: Any, tiers: Callable[..., tuple[str, ...]], serve: Serve, tmp_path: Path
) -> None:
    folder, _, _ = served
    (tmp_path / "own_storage.py").write_text(OBJECTS)
    pages = tmp_path / "pages"
    pages.mkdir()
    own = {"backend_name": "objects", "module_path": "own_storage", "class_name": "Objects", "interface_v1": 1}
    flags = with_storage(tiers(), "dynamic", **own, folder=str(pages))
    path = {"PYTHONPATH": os.pathsep.join([served_env()["PYTHONPATH"], str(tmp_path)])}
    with serve(folder, *flags, **path) as server:
        assert asking.soak(server, 80)["host"] > 0
        asking.each(server)
    with serve(folder, *flags, **path) as server:
        assert asking.each(server)["storage"] > 500
        assert asking.metric(server, "kvtuner_hicache_pages_refused_total") == 0
    for number, file in enumerate(sorted(pages.iterdir())):
        data = bytearray(file.read_bytes())
        data[number % len(data)] ^= 1
        file.write_bytes(data)
    with serve(folder, *flags, **path) as server:
        assert asking.each(server)["storage"] == 0
        assert asking.metric(server, "kvtuner_hicache_pages_refused_total") > 0


@pytest.mark.parametrize("below", [(), ("--kvtuner-hicache-only",)], ids=["packed", "quantized below"])
def test_sizes_that_sglang_chooses_are_those_of_the_real_bytes(
    below: tuple[str, ...], served: tuple[Path, Profile, Path], serve: Serve
) -> None:
    folder, profile, path = served
    flags = ("--kvtuner-profile", str(path), *below, "--enable-hierarchical-cache", "--max-total-tokens", "512")
    with serve(folder, *flags) as server:
        found = server.log
    assert "HiCache auto-sizing: ratio 2.000" in found
    tokens = 2 * 512 + 1  # all fit, and a page of padding
    token_bytes = sum(profile.row_shape(1).pair_bytes(pair) for pair in profile.pairs[:-1])
    token_bytes += 2 * 4 * profile.geometry.num_kv_heads * profile.geometry.head_dim  # 16 bits, served in float32
    assert f"  {token_bytes:,} bytes per token" in found
    assert f"  {tokens:,} tokens, in bytes that hold" in found


def test_by_kernels_in_the_interpreter(
    served: tuple[Path, Profile, Path], asking: Any, tiers: Callable[..., tuple[str, ...]], serve: Serve
) -> None:
    folder, _, _ = served
    few = asking.some(8)
    with serve(folder, *tiers(), KVTUNER_ATTENTION="triton") as server:
        assert "moved by triton, self-test passed" in server.log
        for _ in range(2):
            found = few.each(server)
            server.generate(asking.requests[-4:], 2)
        assert found["host"] > 0
