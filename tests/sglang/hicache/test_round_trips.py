"""Prefixes that go to host memory and storage and come back: nothing is lost, nothing wrong is read."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.runtime_loader.host_tier.stored_page import FAULTS, HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import ModelFolder, ProfileOf, SaveProfile, Serve
    from sglang_server import Server

    from kvtuner.exported_configs.profile.profile import Profile


TOKENS = 8


def test_what_comes_back_from_host_and_storage_answers_as_if_it_had_never_left(
    served: tuple[Path, Profile, Path], asking: Any, tiers: Callable[..., tuple[str, ...]], serve: Serve, tmp_path: Path
) -> None:
    folder, profile, _ = served
    storage = tmp_path / "pages"
    with serve(folder, *tiers(storage)) as server:
        found = asking.soak(server, 150)
        assert found["device"] > 0
        assert found["host"] > 0
        assert asking.overflowed(server, 16)
        token_bytes = sum(profile.row_shape(1).pair_bytes(pair) for pair in profile.pairs[:-1])
        token_bytes += 2 * 4 * profile.geometry.num_kv_heads * profile.geometry.head_dim  # 16 bits, served in float32
        assert asking.metric(server, "kvtuner_hicache_bytes_per_token") == token_bytes
        for direction in ("backup", "load"):
            pages = asking.metric(server, "kvtuner_hicache_pages_total", direction=direction)
            assert pages > 0
            assert asking.metric(server, "kvtuner_hicache_bytes_total", direction=direction) == pages * 16 * token_bytes
            assert asking.metric(server, "kvtuner_hicache_seconds_total", direction=direction) > 0
        for work in ("quantize", "dequantize"):
            assert asking.metric(server, f"kvtuner_hicache_{work}_seconds_total") == 0  # rows move as they are
        assert asking.metric(server, "kvtuner_hicache_pages_refused_total") == 0
        server.flush()
        assert json.loads(server.get("/v1/loads"))["loads"][0]["num_used_tokens"] == 0
    files = sorted(storage.glob("*.bin"))
    assert {path.stat().st_size for path in files} == {HEADER_BYTES + 16 * token_bytes}
    with serve(folder, *tiers(storage)) as server:  # after SIGKILL
        found = asking.each(server)
        assert found["storage"] > 500
        assert asking.metric(server, "kvtuner_hicache_pages_refused_total") == 0
    spoil(files)
    with serve(folder, *tiers(storage)) as server:
        asking.each(server)
        refused = {fault: asking.metric(server, "kvtuner_hicache_pages_refused_total", fault=fault) for fault in FAULTS}
        assert all(refused.values()), refused
        assert "stored pages are not what they should be and are computed again" in server.log
        found = asking.each(server)
        shutil.rmtree(storage)
        asking.soak(server, 30, seed=1)
        server.post("/flush_cache?timeout=30")
        asking.each(server)
        assert json.loads(server.get("/v1/loads"))["loads"][0]["num_running_reqs"] == 0


def spoil(files: list[Path]) -> None:
    """Every kind of damage, on every file one of them: pages are read in any order, and only until the first fault."""
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        kind = number % 9
        if kind == 0:
            data = data[: HEADER_BYTES // 2]
        elif kind == 1:
            data = data[:-7]
        elif kind == 2:
            data += b"more"
        elif kind == 3:
            data[-(1 + number % 99)] ^= 1 << number % 8
        elif kind == 4:
            data = bytearray(len(data))
        elif kind == 5:
            data[8] ^= 3  # the version
        elif kind == 6:
            data[30] ^= 1  # the identity
        elif kind == 7:
            data = bytearray(files[number - 1].read_bytes()) if number % 2 else bytearray(data)
            data[60] ^= 0 if number % 2 else 1  # the key
        if kind == 8:
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes(data)


@pytest.mark.full
def test_tensor_parallel_ranks_keep_their_own_pages_and_read_no_others(
    served: tuple[Path, Profile, Path],
    asking: Any,
    tiers: Callable[..., tuple[str, ...]],
    serve: Serve,
    profile_of: ProfileOf,
    save_profile: SaveProfile,
    tmp_path: Path,
) -> None:
    folder, _, _ = served
    storage, two = tmp_path / "pages", ("--tp-size", "2")
    with serve(folder, *tiers(storage), *two) as server:
        assert asking.soak(server, 60)["host"] > 0
    with serve(folder, *tiers(storage), *two) as server:
        assert asking.each(server)["storage"] > 500
    config = AutoConfig.from_pretrained(folder)
    other = save_profile(profile_of(config, [LayerQuantization(8, 8)] * 4))
    with serve(folder, *tiers(storage, profile=other)) as server:
        # Another profile and another number of ranks: nothing on the same storage is theirs.
        answers = [server.generate([ids], TOKENS)[0] for ids in asking.requests]
        assert sum(asking.sources(answer)["storage"] for answer in answers) == 0
        assert asking.metric(server, "kvtuner_hicache_pages_refused_total") == 0


def admin(server: Server, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and answer of an administrator's request."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    request = Request(f"{server.url}{path}", json.dumps(body or {}).encode(), headers, method=method)
    try:
        with urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_storages_that_come_and_go_and_weights_that_change_in_a_running_server(
    served: tuple[Path, Profile, Path],
    asking: Any,
    tiers: Callable[..., tuple[str, ...]],
    serve: Serve,
    model_folder: ModelFolder,
    tmp_path: Path,
) -> None:
    folder, _, _ = served
    other = model_folder("llama-gqa", num_hidden_layers=4, seed=7)
    few = asking.some(6)
    config = json.dumps({"file_storage_path": str(tmp_path / "pages"), "prefetch_threshold": 1})
    path, attach = "/hicache/storage-backend", {
        "hicache_storage_backend_extra_config_json": config, "hicache_storage_prefetch_policy": "wait_complete"
    }  # fmt: skip
    with serve(folder, *tiers(), "--admin-api-key", "secret") as server:

        def flush() -> None:
            assert admin(server, "POST", "/flush_cache?timeout=30")[0] == 200

        def update(model: Path, *, flushes: bool) -> None:
            body = {"model_path": str(model), "flush_cache": flushes}
            assert admin(server, "POST", "/update_weights_from_disk", body)[0] == 200

        few.each(server)
        status, answer = admin(server, "PUT", path, {"hicache_storage_backend": "nixl", **attach})
        assert status == 400
        assert "--hicache-storage-backend nixl was never tried with quantized pages" in answer
        assert admin(server, "PUT", path, {"hicache_storage_backend": "file", **attach})[0] == 200
        flush()
        few.each(server)
        flush()
        assert few.each(server)["storage"] > 100
        files = set((tmp_path / "pages").glob("*.bin"))
        update(other, flushes=False)
        assert "weights change; storage is not used until the cache is flushed" in server.log
        for ids in few.requests:
            server.generate([[*ids, 7]], TOKENS)  # by keys of both weights: anything but a page for later
        assert set((tmp_path / "pages").glob("*.bin")) == files
        flush()
        changed = few.answered(server)
        assert sum(asking.sources(answer)["storage"] for answer in changed.truth) == 0
        assert [each["output_ids"] for each in changed.truth] != [each["output_ids"] for each in few.truth]
        flush()
        assert changed.each(server)["storage"] > 100
        update(folder, flushes=True)
        assert few.each(server)["storage"] > 100, "pages of the first weights are right again"
        assert asking.metric(server, "kvtuner_hicache_pages_refused_total") == 0
        assert admin(server, "DELETE", path)[0] == 200
        flush()
        assert few.each(server)["storage"] == 0
