"""Gates that figures can be those of a model that generates: each passes, fails, or cannot be asked.

A server that answers from a recording, counts tokens that it never sent, or finds every prompt in its cache gives
figures as good as one likes; no run with such figures ends well.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal

from kvtuner.bench.metrics import num_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.bench.client import RequestResult
    from kvtuner.bench.metrics import LoadResult

Verdict = Literal["passed", "failed", "not asked"]

LEAST_ANSWERED: Final = 0.99
LEAST_COUNTED: Final = 0.5
"""The share of reported tokens; a text has fewer where several of them are one when it is tokenized again."""
LENGTH_RATIO: Final = 8
FIRST_TOKEN_GROWTH: Final = 1.1
OUTPUT_RATIO: Final = 4
LATENCY_GROWTH: Final = 1.5
LEAST_OF_POOL: Final = 0.98
"""A pool holds whole pages."""
MOST_CACHED: Final = 0.1
MOST_CACHED_OF_LOAD: Final = 0.25
ABOUT_SHORT: Final = 64
"""Prompts below this take a server's fixed costs rather than their own."""


@dataclass(frozen=True, slots=True)
class Gate:
    """A check of figures, and its verdict.

    Attributes:
        name: The claim that is checked.
        verdict: The verdict.
        words: The figures that decide it, or the reason why it cannot be asked.
    """

    name: str
    verdict: Verdict
    words: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def all_gates(answered: Sequence[LoadResult], bound: float | None, no_bound: str) -> list[Gate]:
    """Check all loads of one server.

    Args:
        answered: The loads with the results of their requests.
        bound: The tokens per second of one request that the machine's memory allows; None where it is not known.
        no_bound: The reason why it is not known.
    """
    return [
        _answered(answered),
        _counted(answered),
        _new_prompts(answered),
        _first_token_grows(answered),
        _latency_grows(answered),
        _below_bound(answered, bound, no_bound),
    ]


def kv_pool_gate(asked: int, tokens_that_fit: int | None) -> Gate:
    """Check that a server's KV pool is as large as asked: SGLang takes less where memory is short."""
    name = "the KV pool is as large as asked"
    if tokens_that_fit is None:
        return Gate(name, "not asked", "the server does not say how large it is")
    words = f"{tokens_that_fit:,} tokens of {asked:,} asked"
    return _gate(name, tokens_that_fit >= LEAST_OF_POOL * asked, words)


def _gate(name: str, passed: bool, words: str) -> Gate:
    return Gate(name, "passed" if passed else "failed", words)


def _answered(answered: Sequence[LoadResult]) -> Gate:
    sent = [each for one in answered for each in one.sent]
    good = sum(each.error is None for each in sent)
    reasons = sorted({each.error for each in sent if each.error})
    why = f"; such as: {reasons[0]}" if reasons else ""
    return _gate("requests are answered", good >= LEAST_ANSWERED * len(sent), f"{good} of {len(sent)}{why}")


def _counted(answered: Sequence[LoadResult]) -> Gate:
    """Check the tokens that a server reports; where it reports none, those in the text count."""
    name = "reported tokens are in the text"
    reporting = [each for one in answered for each in one.good if each.reported_tokens is not None]
    if not reporting:
        return Gate(name, "not asked", "the server reports none; those in the text are counted")
    reported = sum(each.reported_tokens or 0 for each in reporting)
    counted = sum(each.retokenized_tokens for each in reporting)
    return _gate(
        name,
        counted >= LEAST_COUNTED * reported,
        f"{counted:,} in the text, {reported:,} reported",
    )


def _new_prompts(answered: Sequence[LoadResult]) -> Gate:
    name = "prompts were new to the server"
    known = [each for one in answered for each in one.good if each.cached_tokens is not None]
    if not known:
        return Gate(name, "not asked", "the server does not say what it found in its cache")
    shares = [_cached_share(one.good) for one in answered if any(each.cached_tokens is not None for each in one.good)]
    words = (
        f"{100 * _cached_share(known):.1f}% of their tokens were in its cache, {100 * max(shares):.1f}% of one load's"
    )
    return _gate(name, _cached_share(known) <= MOST_CACHED and max(shares) <= MOST_CACHED_OF_LOAD, words)


def _cached_share(sent: Sequence[RequestResult]) -> float:
    return float(sum(each.cached_tokens or 0 for each in sent) / sum(each.prompt_tokens for each in sent))


def _first_token_grows(answered: Sequence[LoadResult]) -> Gate:
    """Check that prefilling takes time by the length of a prompt: the quickest longest one exceeds the usual one."""
    name = "time to the first token grows with the prompt"
    times = _by_tokens(answered, "prompt", "prompt_tokens", lambda each: each.ttft_s)
    short = min((length for length in times if length >= ABOUT_SHORT), default=None)
    longest = max(times, default=0)
    if short is None or longest < LENGTH_RATIO * short:
        return Gate(name, "not asked", f"needs prompts of {ABOUT_SHORT} tokens and more, and {LENGTH_RATIO} times that")
    usual, quickest = median(times[short]), min(times[longest])
    return _gate(
        name,
        quickest > FIRST_TOKEN_GROWTH * usual,
        f"{1e3 * usual:.1f} ms at {short:,} tokens, {1e3 * quickest:.1f} ms or more at {longest:,}",
    )


def _latency_grows(answered: Sequence[LoadResult]) -> Gate:
    """Check that tokens are generated one after another."""
    name = "latency grows with the output"
    times = _by_tokens(answered, "output", "output_tokens", lambda each: each.latency_s)
    least, most = min(times, default=0), max(times, default=0)
    if not least or most < OUTPUT_RATIO * least:
        return Gate(name, "not asked", f"needs outputs of which one is {OUTPUT_RATIO} times another")
    usual, quickest = median(times[least]), min(times[most])
    return _gate(
        name,
        quickest > LATENCY_GROWTH * usual,
        f"{1e3 * usual:.1f} ms for {least} tokens, {1e3 * quickest:.1f} ms or more for {most}",
    )


def _below_bound(answered: Sequence[LoadResult], bound: float | None, no_bound: str) -> Gate:
    """Check that every token of a request can have read all weights once."""
    name = "tokens per second are below what memory allows"
    rates = [num_tokens(each) / each.latency_s for one in answered for each in one.good if each.latency_s > 0]
    if bound is None or not rates:
        return Gate(name, "not asked", no_bound if bound is None else "nothing was answered")
    return _gate(name, max(rates) <= bound, f"{max(rates):,.1f} of one request at most, {bound:,.0f} possible")


def _by_tokens(answered: Sequence[LoadResult], kind: str, attribute: str, seconds: Any) -> dict[int, list[float]]:
    times: dict[int, list[float]] = {}
    for one in answered:
        values = [seconds(each) for each in one.good]
        if one.load.kind == kind and any(values):
            times.setdefault(getattr(one.load, attribute), []).extend(value for value in values if value is not None)
    return times
