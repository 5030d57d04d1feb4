"""Every gate against figures that a model generates, and against those that it cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvtuner.bench.client import RequestResult
from kvtuner.bench.gates import Gate, all_gates
from kvtuner.bench.load_metrics import LoadResult, figures
from kvtuner.bench.loads import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ANSWERED, COUNTED, NEW, GROWS, LONGER, BOUND = range(6)


def sent(load: Load, *, started_s: float = 0.0) -> RequestResult:
    """A record of a server that takes 1 ms for each 10 prompt tokens, and 5 ms for each generated one."""
    first, gap = load.prompt_tokens * 1e-4 + 0.01, 0.005
    gaps = (gap,) * (load.output_tokens - 1)
    return RequestResult(
        load.prompt_tokens, load.output_tokens, load.output_tokens, load.output_tokens, 0,
        started_s, first, first + sum(gaps), gaps, None,
    )  # fmt: skip


def honest() -> list[LoadResult]:
    loads = [Load("prompt", length, 16, 1, 3) for length in (10, 100, 1000, 4000)]
    loads += [Load("output", 100, tokens, 1, 3) for tokens in (16, 64, 256)]
    return [LoadResult(load, tuple(sent(load) for _ in range(load.requests)), {}) for load in loads]


def changed(one: LoadResult, change: Callable[[RequestResult], RequestResult]) -> LoadResult:
    return replace(one, sent=tuple(map(change, one.sent)))


def gates(answered: Sequence[LoadResult], bound: float | None = 1000.0) -> list[Gate]:
    return all_gates(answered, bound, "nobody measured it")


def test_honest_figures_pass_all_of_them() -> None:
    assert [gate.verdict for gate in gates(honest())] == ["passed"] * 6


def constant_time(one: RequestResult) -> RequestResult:
    """The seed's report: 2 ms whatever the length."""
    return replace(one, ttft_s=0.002, latency_s=0.0025, gaps_s=(0.0005,))


def test_constant_time_fails_three_gates() -> None:
    found = gates([changed(one, constant_time) for one in honest()])
    assert [found[index].verdict for index in (GROWS, LONGER, BOUND)] == ["failed"] * 3
    assert "2.0 ms at 100 tokens, 2.0 ms or more at 4,000" in found[GROWS].detail


def test_a_first_token_that_is_sometimes_slow_does_not_pass_for_growth() -> None:
    def noisy(one: LoadResult) -> LoadResult:
        times = (0.002, 0.004, 0.05)
        return replace(one, sent=tuple(replace(s, ttft_s=t) for s, t in zip(one.sent, times, strict=True)))

    assert gates([noisy(one) for one in honest()])[GROWS].verdict == "failed"


@pytest.mark.parametrize("in_the_text", [0, 1, 5])
def test_tokens_that_are_not_in_the_text_fail(in_the_text: int) -> None:
    found = gates([changed(one, lambda s: replace(s, retokenized_tokens=in_the_text)) for one in honest()])
    assert found[COUNTED].verdict == "failed"


@pytest.mark.parametrize("factor", [0.6, 0.9, 3.0])
def test_text_that_is_tokenized_otherwise_passes(factor: float) -> None:
    def other(one: RequestResult) -> RequestResult:
        return replace(one, retokenized_tokens=round(one.asked_tokens * factor))

    assert gates([changed(one, other) for one in honest()])[COUNTED].verdict == "passed"


def test_prompts_from_the_cache_fail() -> None:
    found = gates([changed(one, lambda s: replace(s, cached_tokens=s.prompt_tokens // 2)) for one in honest()])
    assert found[NEW].verdict == "failed"


def test_one_load_from_the_cache_is_not_hidden_by_longer_ones() -> None:
    answered = honest()
    answered[1] = changed(answered[1], lambda s: replace(s, cached_tokens=s.prompt_tokens))
    assert gates(answered)[NEW].verdict == "failed"


def test_one_failure_in_a_hundred_passes_and_two_do_not() -> None:
    load = Load("concurrency", 100, 16, 4, 100)
    good = [sent(load) for _ in range(100)]
    for failures, verdict in ((1, "passed"), (2, "failed")):
        mixed = [replace(one, error="cut") for one in good[:failures]] + good[failures:]
        found = gates([LoadResult(load, tuple(mixed), {})])[ANSWERED]
        assert (found.verdict, found.detail) == (verdict, f"{100 - failures} of 100; such as: cut")


def test_what_cannot_be_asked_says_why() -> None:
    load = Load("prompt", 100, 16, 1, 2)
    silent = replace(sent(load), reported_tokens=None, cached_tokens=None)
    found = gates([LoadResult(load, (silent, silent), {})], bound=None)
    assert [gate.verdict for gate in found] == ["passed"] + ["not asked"] * 5
    assert found[BOUND].detail == "nobody measured it"
    assert "8 times" in found[GROWS].detail


def test_nothing_answered_fails_rather_than_passes() -> None:
    found = gates([changed(one, lambda s: replace(s, error="gone", ttft_s=None)) for one in honest()])
    assert found[ANSWERED].verdict == "failed"
    assert "passed" not in {gate.verdict for gate in found}


def test_failures_stay_in_the_denominator_and_out_of_the_times() -> None:
    load = Load("concurrency", 100, 11, 2, 4)
    good = [sent(load, started_s=start) for start in (0.0, 0.0, 0.1)]
    slow = replace(sent(load), error="no answer within 9 s", latency_s=9.0, ttft_s=None, gaps_s=())
    found = figures([LoadResult(load, (*good, slow), {})])
    assert (found["sent"], found["answered"], found["success_rate"]) == (4, 3, 0.75)
    assert found["duration_s"] == 9.0
    assert found["output_tokens_per_s"] == pytest.approx(33 / 9)
    assert found["e2e_s"]["p99"] == pytest.approx(good[0].latency_s)
    assert found["errors"] == ["no answer within 9 s"]


def test_a_load_that_nobody_answered_has_no_times() -> None:
    load = Load("batch", 100, 11, 2, 2)
    gone = replace(sent(load), error="gone", latency_s=0.0, ttft_s=None, gaps_s=())
    found = figures([LoadResult(load, (gone, gone), {})])
    assert found["ttft_s"] == {"p50": None, "p90": None, "p99": None}
    assert found["requests_per_s"] == 0
