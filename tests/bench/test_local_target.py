"""What answers in this process does as it is asked, and its times are in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.bench.loads import Load
from kvtuner.bench.local_target import EngineTarget, GenerateTarget
from kvtuner.runtime_loader.engine.local_engine import LocalEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fixture_types import LoadTiny

    from kvtuner.bench.client import RequestResult

PROMPTS = [[2 + number] * 12 for number in range(5)]


@pytest.fixture
def engine(load_tiny: LoadTiny) -> Iterator[LocalEngine]:
    loaded = load_tiny()
    with LocalEngine(loaded.model, loaded.tokenizer, attention="torch") as engine:
        yield engine


def check_times(results: list[RequestResult], num_tokens: int) -> None:
    for result in results:
        assert result.error is None
        assert result.reported_tokens == num_tokens
        assert result.ttft_s is not None
        assert 0 < result.ttft_s <= result.latency_s
        assert result.latency_s == pytest.approx(result.ttft_s + sum(result.gaps_s))
        assert len(result.gaps_s) == num_tokens - 1


def test_an_engine_has_as_many_in_flight_as_asked(engine: LocalEngine) -> None:
    target = EngineTarget(engine, "tiny", 60)
    results = target.client.send(Load("concurrency", 12, 4, 2, 5), PROMPTS)
    check_times(results, 4)
    starts = [result.started_s for result in results]
    ends = sorted(result.started_s + result.latency_s for result in results)
    assert starts[0] <= starts[1] < ends[0] <= starts[2], "the third waits for the first to end"
    # The same again is in the prefix cache, until that is emptied.
    again = target.client.send(Load("concurrency", 12, 4, 5, 5), [[9] * 40])
    assert again[0].cached_tokens == 0
    assert target.client.send(Load("concurrency", 12, 4, 5, 5), [[9] * 40])[0].cached_tokens == 32
    target.empty_prefix_cache()
    assert target.client.send(Load("concurrency", 12, 4, 5, 5), [[9] * 40])[0].cached_tokens == 0
    assert target.reason_gone() is None


def test_an_engine_that_takes_too_long_is_named(engine: LocalEngine) -> None:
    target = EngineTarget(engine, "tiny", 1e-9)
    results = target.client.send(Load("concurrency", 12, 400, 5, 5), PROMPTS)
    assert {result.error for result in results} == {"no answer within 1e-09 s"}
    assert engine.state.num_running == 0


def test_generate_answers_one_after_another(load_tiny: LoadTiny) -> None:
    loaded: Any = load_tiny()
    before = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation("sdpa")
    target = GenerateTarget(loaded.model, loaded.tokenizer, "tiny", context_length=512, most_requests=16, timeout_s=60)
    results = target.client.send(Load("concurrency", 12, 4, 2, 5), PROMPTS)
    check_times(results, 4)
    starts = [result.started_s for result in results]
    assert starts[0] == pytest.approx(starts[1], abs=1e-3)
    assert results[1].ttft_s > results[0].latency_s, "the second in flight waits for the first"
    assert target.record.tokens_that_fit is None
    late = GenerateTarget(loaded.model, loaded.tokenizer, "tiny", context_length=512, most_requests=16, timeout_s=1e-9)
    (result,) = late.send(Load("concurrency", 12, 400, 1, 1), PROMPTS[:1])
    assert "of 400 tokens within 1e-09 s" in str(result.error)
    loaded.model.set_attn_implementation(before)


def test_what_generate_raises_is_raised(load_tiny: LoadTiny) -> None:
    loaded = load_tiny()
    target = GenerateTarget(loaded.model, loaded.tokenizer, "tiny", context_length=512, most_requests=16, timeout_s=60)
    with pytest.raises(IndexError):
        target.send(Load("concurrency", 1, 4, 1, 1), [[10**6]])
