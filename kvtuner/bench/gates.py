"""Gates that figures can be those of a model that generates: each passes, fails, or is skipped.

A server that answers from a recording, counts tokens that it never sent, or finds every prompt in its cache gives
figures as good as one likes; no run with such figures ends well.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final, Literal

from kvtuner.bench.load_metrics import LoadResult, num_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.bench.client import RequestResult

GateVerdict = Literal["passed", "failed", "not asked"]
FAILED: Final = "failed"
SKIPPED: Final = "not asked"
"""The verdict of a gate that the server's answers cannot decide."""
Outcome = tuple[bool | None, str]
"""Whether a check passed, None where it is skipped, and the figures or the reason."""

LEAST_ANSWERED: Final = 0.99
LEAST_COUNTED: Final = 0.5
"""The share of reported tokens; a text has fewer where several of them are one when it is tokenized again."""
# The loads must differ by more than the growth that is asked: fixed costs and noise hide part of an honest growth.
LENGTH_RATIO: Final = 8
FIRST_TOKEN_GROWTH: Final = 1.1
OUTPUT_RATIO: Final = 4
LATENCY_GROWTH: Final = 1.5
LEAST_OF_POOL: Final = 0.98  # a pool holds whole pages
MOST_CACHED: Final = 0.1
MOST_CACHED_OF_LOAD: Final = 0.25
MIN_SHORT_PROMPT: Final = 64  # tokens; shorter prompts take a server's fixed costs rather than their own


_KV_POOL: Final = "the KV pool is as large as asked"
_WAYS_OUT: Final = {
    "requests are answered": "read the server's log, then ask for less at once (--concurrency, --batches, --lengths)"
    " or wait longer (--timeout)",
    "reported tokens are in the text": "ask the server for one answer and count its tokens; send to SGLang itself, not"
    " to what stands before it",
    "prompts were new to the server": "send to a server that nobody else uses, with nothing before it that keeps"
    " answers",
    "time to the first token grows with the prompt": "see that the model itself answers, with nothing before it that"
    " keeps answers; then measure on an idle machine, with longer --lengths",
    "latency grows with the output": "see that the model itself answers, with nothing before it that keeps answers;"
    " then measure on an idle machine, with longer --outputs",
    "tokens per second are below what memory allows": "give the bandwidth of the server's own GPU as"
    " --memory-bandwidth; where that was right, something else than this model answers",
    _KV_POOL: "ask for less --kv-memory, or leave more to the pool: --server-args '--mem-fraction-static 0.9'",
}


@dataclass(frozen=True, slots=True)
class Gate:
    """A claim that is checked, its verdict, and as `detail` the figures that decide it, or why it is skipped."""

    name: str
    verdict: GateVerdict
    detail: str

    @property
    def way_out(self) -> str:
        """What to do where it fails."""
        return _WAYS_OUT[self.name]


def all_gates(results: Sequence[LoadResult], bound: float | None, no_bound: str) -> list[Gate]:
    """Check all loads of one server.

    The bound is the tokens per second of one request that the machine's memory allows; None for the reason `no_bound`.
    """
    sent = [request for result in results for request in result.sent]
    good = [request for result in results for request in result.good]
    outcomes = {
        "requests are answered": _all_answered(sent),
        "reported tokens are in the text": _all_counted(good),
        "prompts were new to the server": _new_prompts(results),
        "time to the first token grows with the prompt": _first_token_grows(results),
        "latency grows with the output": _latency_grows(results),
        "tokens per second are below what memory allows": _below_bound(good, bound, no_bound),
    }
    return [_gate(name, outcome) for name, outcome in outcomes.items()]


def kv_pool_gate(tokens_asked: int, tokens_that_fit: int | None) -> Gate:
    """Check that a server's KV pool is as large as asked: SGLang takes less where memory is short."""
    outcome: Outcome = None, "the server does not say how large it is"
    if tokens_that_fit is not None:
        is_as_large = tokens_that_fit >= LEAST_OF_POOL * tokens_asked
        outcome = is_as_large, f"{tokens_that_fit:,} tokens of {tokens_asked:,} asked"
    return _gate(_KV_POOL, outcome)


def _gate(name: str, outcome: Outcome) -> Gate:
    passed, detail = outcome
    return Gate(name, SKIPPED if passed is None else "passed" if passed else FAILED, detail)


def _all_answered(sent: Sequence[RequestResult]) -> Outcome:
    good = sum(request.error is None for request in sent)
    reason = min((request.error for request in sent if request.error), default=None)
    why = f"; such as: {reason}" if reason else ""
    return good >= LEAST_ANSWERED * len(sent), f"{good} of {len(sent)}{why}"


def _all_counted(good: Sequence[RequestResult]) -> Outcome:
    """Check the tokens that a server reports; where it reports none, those in the text count."""
    reporting = [request for request in good if request.reported_tokens is not None]
    if not reporting:
        return None, "the server reports none; those in the text are counted"
    reported = sum(request.reported_tokens or 0 for request in reporting)
    counted = sum(request.retokenized_tokens for request in reporting)
    return counted >= LEAST_COUNTED * reported, f"{counted:,} in the text, {reported:,} reported"


def _new_prompts(results: Sequence[LoadResult]) -> Outcome:
    with_cache_counts = [
        result.good for result in results if any(request.cached_tokens is not None for request in result.good)
    ]
    if not with_cache_counts:
        return None, "the server does not say what it found in its cache"
    share = _cached_share([r for good in with_cache_counts for r in good if r.cached_tokens is not None])
    most = max(map(_cached_share, with_cache_counts))
    detail = f"{100 * share:.1f}% of their tokens were in its cache, {100 * most:.1f}% of one load's"
    return share <= MOST_CACHED and most <= MOST_CACHED_OF_LOAD, detail


def _cached_share(requests: Sequence[RequestResult]) -> float:
    cached = sum(request.cached_tokens or 0 for request in requests)
    return cached / sum(request.prompt_tokens for request in requests)


def _first_token_grows(results: Sequence[LoadResult]) -> Outcome:
    """Check that prefilling takes time by the length of a prompt: the quickest longest one exceeds the usual one."""
    times = _times(results, "prompt", "prompt_tokens", "ttft_s")
    short = min((length for length in times if length >= MIN_SHORT_PROMPT), default=None)
    longest = max(times, default=0)
    if short is None or longest < LENGTH_RATIO * short:
        return None, f"needs prompts of {MIN_SHORT_PROMPT} tokens and more, and {LENGTH_RATIO} times that"
    usual, quickest = median(times[short]), min(times[longest])
    detail = f"{1e3 * usual:.1f} ms at {short:,} tokens, {1e3 * quickest:.1f} ms or more at {longest:,}"
    return quickest > FIRST_TOKEN_GROWTH * usual, detail


def _latency_grows(results: Sequence[LoadResult]) -> Outcome:
    """Check that tokens are generated one after another."""
    times = _times(results, "output", "output_tokens", "latency_s")
    least, most = min(times, default=0), max(times, default=0)
    if not least or most < OUTPUT_RATIO * least:
        return None, f"needs outputs of which one is {OUTPUT_RATIO} times another"
    usual, quickest = median(times[least]), min(times[most])
    detail = f"{1e3 * usual:.1f} ms for {least} tokens, {1e3 * quickest:.1f} ms or more for {most}"
    return quickest > LATENCY_GROWTH * usual, detail


def _times(results: Sequence[LoadResult], kind: str, size: str, seconds: str) -> dict[int, list[float]]:
    """The seconds of answered requests, by the tokens that loads of a kind differ in."""
    times: dict[int, list[float]] = {}
    for result in results:
        measured = [value for request in result.good if (value := getattr(request, seconds)) is not None]
        if result.load.kind == kind and measured:
            times.setdefault(getattr(result.load, size), []).extend(measured)
    return times


def _below_bound(good: Sequence[RequestResult], bound: float | None, no_bound: str) -> Outcome:
    """Check that every token of a request can have read all weights once."""
    # Of one request alone: tokens of several requests in flight share one reading of the weights.
    rates = [num_tokens(request) / request.latency_s for request in good if request.latency_s > 0]
    if bound is None:
        return None, no_bound
    if not rates:
        return None, "nothing was answered"
    return max(rates) <= bound, f"{max(rates):,.1f} of one request at most, {bound:,.0f} possible"
