"""A larger CUDA graph is recommended where a packed pool lets more requests run than graphs were captured for."""

from __future__ import annotations

import logging

import pytest

from kvtuner.runtime_loader.sglang.graph_advice import recommend_graph, recommended_graph


@pytest.mark.parametrize(
    ("captured", "running", "stored", "wanted"),
    [
        (256, 4096, 28, 928),  # 256 * 100 / 28 is 914.3, in steps of 32
        (256, 300, 28, 300),  # no more than run
        (256, 256, 28, None),
        (512, 200, 28, None),
        (0, 4096, 28, None),  # without graphs
        (256, 4096, 100, None),  # of 16 bits everywhere
        (5, 9, 50, 9),
    ],
)
def test_it_is_for_as_many_times_the_requests_as_bf16_takes_the_bytes(
    captured: int, running: int, stored: int, wanted: int | None
) -> None:
    assert recommended_graph(captured, running, stored, 100) == wanted


def test_the_log_has_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvtuner"):
        recommend_graph(256, 2048, 25, 100)
        recommend_graph(512, 200, 25, 100)
    (record,) = caplog.records
    assert record.getMessage().endswith("add --cuda-graph-max-bs-decode 1024")
