"""A real server of LMCache keeps packed rows, of layers of every width, and gives them to servers of the same profile.

Needs the package lmcache, which no other test does.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from sglang_server import environment, free_port
from transformers import AutoConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fixture_types import MixedLayers, ModelFolder, ProfileOf, Prompts, Refused, SaveProfile, Serve
    from sglang_server import Server

CHUNK = 32
"""Tokens that LMCache keeps or drops together."""
CONFIG = """
mp_host: 127.0.0.1
mp_port: {port}
extra_config:
  lmcache.mp.mp_transfer_mode: lmcache_driven
"""


@pytest.fixture
def flags(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """What a server of SGLang is told, while LMCache's runs."""
    port, config = free_port(), tmp_path / "lmcache.yaml"
    config.write_text(CONFIG.format(port=port))
    command = [
        sys.executable, "-m", "lmcache.v1.multiprocess.server", "--port", str(port), "--host", "127.0.0.1",
        "--chunk-size", str(CHUNK), "--l1-size-gb", "0.5", "--eviction-policy", "LRU",
    ]  # fmt: skip
    with (tmp_path / "lmcache.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment(LMCACHE_TRACK_USAGE="false")
        )
    try:
        yield ("--enable-lmcache", "--lmcache-config-file", str(config), "--page-size", "16", "--enable-cache-report")
    finally:
        process.kill()
        process.wait()


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("lmcache") is None, reason="pip install lmcache==0.5.6")
def test_rows_outlive_their_server_and_are_found_by_the_same_profile_alone(
    flags: tuple[str, ...], model_folder: ModelFolder, profile_of: ProfileOf, mixed_layers: MixedLayers,
    save_profile: SaveProfile, prompts: Prompts, serve: Serve,
) -> None:  # fmt: skip
    folder = model_folder("llama-gqa", num_hidden_layers=4)
    config = AutoConfig.from_pretrained(folder)
    layers = mixed_layers(config)
    profile, other = (save_profile(profile_of(config, each)) for each in (layers, [*layers[:-1], layers[0]]))
    requests = prompts(*range(100, 180, 16), seed=2)
    small = ("--max-total-tokens", "512", "--max-running-requests", "1")

    def ask(server: Server) -> tuple[list[Any], int]:
        answers = [server.generate([ids], 8)[0] for ids in requests]
        found = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
        return [answer["output_ids"] for answer in answers], found

    def served(path: Path, *options: str) -> tuple[str, ...]:
        return ("--kvtuner-profile", str(path), "--kvtuner-attend", "cache", *flags, *options)

    # On a processor LMCache moves the pool to other memory, whose address compiled attention has by then.
    torch = {"KVTUNER_ATTENTION": "torch"}
    reading = ("--kvtuner-profile", str(profile), "--kvtuner-attend", "cache", "--page-size", "16")
    with serve(folder, *reading, **torch) as server:
        alone, found = ask(server)
        assert found == 0
    most = sum(len(ids) // CHUNK * CHUNK for ids in requests)
    with serve(folder, *served(profile), *small, **torch) as server:
        assert ask(server) == (alone, 0)
        assert ask(server) == (alone, most)  # the pool holds three of the five at most
    with serve(folder, *served(profile), "--disable-overlap-schedule", **torch) as server:
        assert ask(server) == (alone, most)
    with serve(folder, *served(profile), *small, "--tp-size", "2", **torch) as server:
        of_two, found = ask(server)
        assert found == 0  # half of the heads in each row
        assert ask(server) == (of_two, most)
    with serve(folder, *served(other), **torch) as server:
        assert ask(server)[1] == 0
    with serve(folder, *served(profile)[:3], "fresh", *flags, **torch) as server:
        assert ask(server)[1] == 0


def test_another_release_is_refused(tmp_path: Path, model_folder: ModelFolder, refused: Refused) -> None:
    metadata = tmp_path / "lmcache-0.5.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache\nVersion: 0.5.5\n")
    flags = ("--enable-kvtuner-quant", "--kvtuner-q-group-size", "16", "--enable-lmcache")
    line = refused(model_folder(), *flags, extra_path=str(tmp_path))
    assert line.startswith("packed rows were stored in LMCache 0.5.6, but 0.5.5 is installed")
