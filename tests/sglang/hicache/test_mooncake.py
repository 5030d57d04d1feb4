"""A real Mooncake store over TCP holds pages of packed rows: across servers, and damaged.

Needs the package mooncake-transfer-engine-non-cuda (and the system's libibverbs), which no other test does.
"""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fixture_types import MixedLayers, ModelFolder, ProfileOf, Prompts, SaveProfile, Serve
    from sglang_server import Server

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("mooncake") is None, reason="pip install mooncake-transfer-engine-non-cuda"
    ),
]

SEGMENT = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1:" + sys.argv[1], sys.argv[2], 256 << 20, 16 << 20, "tcp", "", sys.argv[3]) == 0
print("ready", flush=True)
for line in sys.stdin:
    key = line.strip()
    data = bytearray(store.get(key))
    data[-1] ^= 1
    deadline = time.time() + 30
    while store.remove(key) != 0:  # while a lease of its last reader runs
        assert time.time() < deadline, key
        time.sleep(0.1)
    assert store.put(key, bytes(data)) == 0
    print("spoilt", flush=True)
"""


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@pytest.fixture
def keys_url() -> list[str]:
    """Return the URL at which the master of this test lists its keys, once it runs."""
    return []


@pytest.fixture
def master(keys_url: list[str], tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A master, whose metadata server and address are part of what a server is told."""
    import mooncake

    rpc, metrics, metadata = free_ports(3)
    keys_url.append(f"http://127.0.0.1:{metrics}/get_all_keys")
    command = [
        str(Path(mooncake.__file__).parent / "mooncake_master"), f"--rpc_port={rpc}", f"--metrics_port={metrics}",
        "--enable_http_metadata_server=true", f"--http_metadata_server_port={metadata}",
    ]  # fmt: skip
    with (tmp_path / "master.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)
    try:
        time.sleep(2)
        assert process.poll() is None, (tmp_path / "master.log").read_text()
        yield {
            "master_server_address": f"127.0.0.1:{rpc}", "metadata_server": f"http://127.0.0.1:{metadata}/metadata",
            "protocol": "tcp", "local_hostname": "127.0.0.1", "global_segment_size": "0", "prefetch_threshold": 1,
        }  # fmt: skip
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def segment(master: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Who holds the memory: a process that outlives the servers."""
    words = (str(free_ports(1)[0]), master["metadata_server"], master["master_server_address"])
    process = subprocess.Popen(
        [sys.executable, "-c", SEGMENT, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        read_until(process, "ready")
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    while word not in (line := process.stdout.readline()):
        assert line, f"the segment ended before {word}"


def test_pages_outlive_their_server_in_mooncake_and_damaged_ones_are_computed_again(
    master: dict[str, Any],
    segment: subprocess.Popen[str],
    keys_url: list[str],
    model_folder: ModelFolder,
    profile_of: ProfileOf,
    mixed_layers: MixedLayers,
    save_profile: SaveProfile,
    prompts: Prompts,
    serve: Serve,
) -> None:
    from transformers import AutoConfig

    folder = model_folder("llama-gqa", num_hidden_layers=4)
    config = AutoConfig.from_pretrained(folder)
    profile = save_profile(profile_of(config, mixed_layers(config)))
    requests = prompts(*range(100, 180, 16), seed=2)
    flags = (
        "--kvtuner-profile", str(profile), "--kvtuner-attend", "cache", "--enable-hierarchical-cache",
        "--page-size", "16", "--hicache-ratio", "3", "--enable-cache-report", "--enable-metrics",
        "--hicache-storage-backend", "mooncake", "--hicache-storage-backend-config", json.dumps(master),
        "--hicache-storage-prefetch-policy", "wait_complete",
    )  # fmt: skip

    def ask(server: Server) -> tuple[list[Any], int]:
        answers = [server.generate([ids], 8)[0] for ids in requests]
        found = [answer["meta_info"].get("cached_tokens_details") or {} for answer in answers]
        return [answer["output_ids"] for answer in answers], sum(each.get("storage", 0) for each in found)

    with serve(folder, *flags) as server:
        first, found = ask(server)
        assert found == 0
        time.sleep(2)
    with serve(folder, *flags) as server:
        again, found = ask(server)
        assert again == first
        assert found > 400
        assert faults(server) == {}
    with urlopen(keys_url[0], timeout=60) as answer:
        keys = answer.read().decode().split()
    assert len(keys) % 2 == 0
    for key in [each for each in keys if each.endswith("_v")][::4]:
        assert segment.stdin is not None
        segment.stdin.write(f"{key}\n")
        segment.stdin.flush()
        read_until(segment, "spoilt")
    for start in range(2):
        with serve(folder, *flags) as server:
            again, found = ask(server)
            assert again == first
            assert bool(faults(server)) == (start == 0)
            assert set(faults(server)) <= {"checksum"}
            time.sleep(2)


def faults(server: Server) -> dict[str, float]:
    """Refused pages by what was wrong with them."""
    lines = re.findall(r'kvtuner_hicache_pages_refused_total{.*fault="(\w+)".*} (\S+)', server.get("/metrics"))
    return {fault: float(count) for fault, count in lines if float(count)}
