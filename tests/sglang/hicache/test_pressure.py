"""A thousand requests under eviction, by every layout, policy and topology."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import Serve

    from kvtuner.exported_configs.profile.profile import Profile


@pytest.mark.full
@pytest.mark.parametrize(
    ("page_size", "flags", "variables"),
    [
        (1, ("--hicache-mem-layout", "layer_first", "--hicache-write-policy", "write_back"), {}),
        (16, ("--hicache-io-backend", "direct", "--hicache-write-policy", "write_through_selective"), {}),
        (64, ("--hicache-mem-layout", "layer_first", "--hicache-io-backend", "direct"), {}),
        (16, ("--pp-size", "2"), {}),
        (
            16,
            ("--hicache-storage-prefetch-policy", "timeout"),
            {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05", "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.2"},
        ),
    ],
    ids=["page 1, write_back", "direct, selective", "page 64, layer_first", "PP 2", "slow and failing"],
)
def test_a_thousand_requests_under_eviction(
    page_size: int,
    flags: tuple[str, ...],
    variables: dict[str, str],
    served: tuple[Path, Profile, Path],
    asking: Any,
    tiers: Callable[..., tuple[str, ...]],
    serve: Serve,
    tmp_path: Path,
) -> None:
    folder, _, _ = served
    with serve(folder, *tiers(tmp_path / "pages", page_size), *flags, **variables) as server:
        found = asking.soak(server, 1000)
        assert found["device"] > 0
        assert found["host"] > 0
        assert asking.overflowed(server, page_size)
    with serve(folder, *tiers(tmp_path / "pages", page_size), *flags, **variables) as server:
        found = asking.each(server)
        assert found["storage"] > 0


@pytest.mark.full
def test_requests_aborted_while_their_pages_come_from_storage(
    served: tuple[Path, Profile, Path], asking: Any, tiers: Callable[..., tuple[str, ...]], serve: Serve, tmp_path: Path
) -> None:
    folder, _, _ = served
    flags = tiers(tmp_path / "pages")
    with serve(folder, *flags) as server:
        asking.each(server)
    slow = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.5"}
    with serve(folder, *flags, "--log-level", "debug", **slow) as server, ThreadPoolExecutor(4) as pool:
        for number, ids in enumerate(asking.requests[::2]):
            body = {"input_ids": ids, "rid": f"left-{number}", "sampling_params": {"max_new_tokens": 4}}
            left = pool.submit(server.post, "/generate", body)
            time.sleep(0.1 + number % 8 * 0.1)
            server.post("/abort_request", {"rid": body["rid"]})
            assert left.result()["meta_info"]["finish_reason"]["type"] in ("abort", "length")
        assert server.log.count("Abort queued request") > 5, "none was left while it waited for its pages"
        assert asking.some(3).each(server)["storage"] > 100
        asking.soak(server, 40)
        server.flush()
        assert json.loads(server.get("/v1/loads"))["loads"][0]["num_used_tokens"] == 0


@pytest.mark.full
def test_two_nodes(
    served: tuple[Path, Profile, Path],
    asking: Any,
    tiers: Callable[..., tuple[str, ...]],
    serve: Serve,
    apart: Any,
    tmp_path: Path,
) -> None:
    folder, _, _ = served
    for pages in range(2):
        with serve(
            folder, *tiers(tmp_path / "pages"), "--tp-size", "2", places=apart, GLOO_SOCKET_IFNAME="eth0"
        ) as server:
            found = asking.soak(server, 100) if not pages else asking.each(server)
        assert found["storage" if pages else "host"] > 0
