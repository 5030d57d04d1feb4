"""SGLang's rules of memory against figures worked out by hand; tests/sglang compares them with SGLang's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtuner.pipeline.planning.server_memory import CacheCost, ServerMemory

H100_MIB = 81_559
EXACT = CacheCost(65_536, 0, 65_536, 0)


def with_pool(num_bytes: int, context_length: int, requests: int) -> ServerMemory:
    """A server whose weights leave so many bytes."""
    empty = ServerMemory(H100_MIB, 0, context_length, max_running_requests=requests)
    return replace(empty, weights_bytes=empty.pool_bytes - num_bytes)


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "requests", "reserved"),
    [
        # 512 MiB, 1.5 for each token of a chunk, 128 for each rank, 2 for each request of a graph, 8 for each graph.
        (1, 1, None, 512 + 1.5 * 8192 + 128 + 2 * 256 + 8 * 58),
        (1, 1, 4, 512 + 1.5 * 8192 + 128 + 2 * 4 + 8 * 58),
        (3, 1, None, 512 + 1.5 * 8192 + 3 * 128 + 2 * 256 + 8 * 58),
        (4, 1, None, 512 + 1.5 * 8192 + 4 * 128 + 2 * 512 + 8 * 58),
        (1, 2, None, 512 + 1.5 * 8192 + 2 * 128 + 2 * 256),
    ],
)
def test_weights_and_cache_have_what_is_not_reserved_in_thousandths(
    tp_size: int, pp_size: int, requests: int | None, reserved: float
) -> None:
    share = ServerMemory(H100_MIB, 0, 4096, tp_size, pp_size, requests).static_fraction
    assert share * 1000 == pytest.approx(round(share * 1000), abs=1e-9)
    assert abs(share - (1 - reserved / H100_MIB)) <= 0.0005


def test_no_more_requests_run_than_have_two_tokens_each() -> None:
    assert ServerMemory(H100_MIB, 0, 4096, max_running_requests=8).request_slots(9, EXACT) == 4
    assert ServerMemory(H100_MIB, 0, 4096, max_running_requests=8).request_slots(100, EXACT) == 8
    assert ServerMemory(H100_MIB, 0, 4096).request_slots(1000, EXACT) == 500


def test_a_server_refuses_copies_that_take_more_than_half_of_the_memory() -> None:
    server = with_pool(1_000_000, 64, requests=9)  # and a slot more, for what pads a graph
    assert server.tokens(CacheCost(100, 50_000, 100, 50_000)) == 5_000
    assert server.tokens(CacheCost(100, 50_001, 100, 50_001)) == 0
