"""A server's metrics have the names that the dashboard and alerts of examples/monitoring ask for, and count."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Callable

MONITORING = Path(__file__).resolve().parents[3] / "examples" / "monitoring"
LACKING = {"sglang:is_cuda_graph", "sglang:hicache_host_used_tokens", "sglang:hicache_host_total_tokens"}
"""What an engine without graphs and host tiers does not have."""


def samples(served: Any) -> dict[str, float]:
    """The sum of every metric over its labels, by name."""
    sums: dict[str, float] = {}
    text = httpx.get(f"{served.url}/metrics", trust_env=False).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


def test_every_metric_of_dashboard_and_alerts_is_there(served: Any) -> None:
    served.post("/v1/completions", {"prompt": "the fox", "max_tokens": 2})
    asked = set()
    for file in ("dashboard.json", "alerts.yml"):
        asked |= set(re.findall(r"sglang:\w+", (MONITORING / file).read_text(encoding="utf-8")))
    assert len(asked) > 15
    assert asked - samples(served).keys() == LACKING


def test_counts_are_those_of_what_was_asked(serve: Callable[..., Any]) -> None:
    with serve(page_size=4) as served:
        body = {"prompt": list(range(2, 42)), "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        for _ in range(2):
            assert served.post("/v1/completions", body).status_code == 200
        assert served.post("/v1/completions", {}).status_code == 400
        assert served.post("/nowhere", {}).status_code == 404
        seen = samples(served)
        assert seen["sglang:num_requests_total"] == 2
        assert seen["sglang:num_aborted_requests_total"] == 0
        assert seen["sglang:prompt_tokens_total"] == 80
        assert seen["sglang:cached_tokens_total"] == 36
        assert seen["sglang:generation_tokens_total"] == 10
        assert seen["sglang:time_to_first_token_seconds_count"] == 2
        assert seen["sglang:inter_token_latency_seconds_count"] == 8
        assert seen["sglang:e2e_request_latency_seconds_count"] == 2
        assert seen["sglang:http_responses_total"] == 4
        assert seen["sglang:http_requests_active"] == 1, "the one that asks"
        assert seen["sglang:kv_evictable_tokens"] == 44
        assert seen["sglang:kv_available_tokens"] + 44 == seen["sglang:max_total_num_tokens"]
        assert seen["kvtuner_kv_bytes_per_token"] == served.engine.pool.shape.bytes_per_token
        text = httpx.get(f"{served.url}/metrics", trust_env=False).text
        assert 'status_code="404"' in text
        assert "nowhere" not in text, "paths of clients would be endless"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_running_requests_show_while_they_run(path: str, served: Any) -> None:
    body: dict[str, Any] = {"max_tokens": 450, "ignore_eos": True, "stream": True}
    body |= {"prompt": "the fox"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    with httpx.Client(trust_env=False) as client, client.stream("POST", served.url + path, json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        seen = samples(served)
        assert seen["sglang:num_running_reqs"] == 1
        assert 0 < seen["sglang:token_usage"] < 1
        assert seen["sglang:kv_used_tokens"] > 0
    assert served.is_idle()
