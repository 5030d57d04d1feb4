"""Figures of a load from the results of its requests; failures stay in every denominator. Knows no servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.bench.client import RequestResult
    from kvtuner.bench.loads import Load

PERCENTILES: Final = (50, 90, 99)
INSTANT_S: Final = 1e-9
"""The duration of loads that no server was there for."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The seconds at `PERCENTILES` of requests, or tokens, that came; None where none did."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """The quantiles of any number of values."""
        if not len(values):
            return cls(None, None, None)
        return cls(*(float(value) for value in np.percentile(values, PERCENTILES)))

    def to_json(self) -> dict[str, float | None]:
        """Plain JSON values."""
        return {"p50": self.p50, "p90": self.p90, "p99": self.p99}


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A load and the results of its requests.

    Attributes:
        load: The load.
        sent: The result of each request.
        usage: The usage of the machine, by the names of `kvtuner.bench.usage`; empty where it was not watched.
    """

    load: Load
    sent: tuple[RequestResult, ...]
    usage: dict[str, float]

    @property
    def good(self) -> tuple[RequestResult, ...]:
        """The requests that were answered whole."""
        return tuple(each for each in self.sent if each.error is None)

    @property
    def duration_s(self) -> float:
        """The time from the first request to the last answer, or failure."""
        return max(each.started_s + each.latency_s for each in self.sent)


def num_tokens(sent: RequestResult) -> int:
    """The number of generated tokens: as the server reports it, else as counted in the text."""
    return sent.retokenized_tokens if sent.reported_tokens is None else sent.reported_tokens


def figures(answered: Sequence[LoadResult]) -> dict[str, Any]:
    """Figures of all rounds of the same load, as plain JSON values.

    Seconds are of requests that were answered whole, throughput counts their tokens over the whole time; the share of
    them, `success_rate`, is of all that were sent. Time per output token leaves out the first, of one request; time
    between tokens is of single gaps.
    """
    load = answered[0].load
    sent = [each for one in answered for each in one.sent]
    good = [each for one in answered for each in one.good]
    duration = max(sum(one.duration_s for one in answered), INSTANT_S)
    tokens = sum(map(num_tokens, good))
    return {
        "kind": load.kind,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
        "concurrency": load.concurrency,
        "rounds": len(answered),
        "sent": len(sent),
        "answered": len(good),
        "success_rate": len(good) / len(sent),
        "duration_s": duration,
        "requests_per_s": len(good) / duration,
        "output_tokens_per_s": tokens / duration,
        "tokens_per_s": (tokens + sum(each.prompt_tokens for each in good)) / duration,
        "ttft_s": Quantiles.of([each.ttft_s for each in good if each.ttft_s is not None]).to_json(),
        "tpot_s": Quantiles.of([seconds for each in good if (seconds := per_token_s(each)) is not None]).to_json(),
        "itl_s": Quantiles.of([gap for each in good for gap in each.gaps_s]).to_json(),
        "e2e_s": Quantiles.of([each.latency_s for each in good]).to_json(),
        "errors": sorted({each.error for each in sent if each.error is not None})[:5],
        **_usage(answered),
    }


def per_token_s(sent: RequestResult) -> float | None:
    """The mean time of a token after the first."""
    tokens = num_tokens(sent)
    return (sent.latency_s - sent.ttft_s) / (tokens - 1) if sent.ttft_s is not None and tokens > 1 else None


def _usage(answered: Sequence[LoadResult]) -> dict[str, float]:
    """The usage of all rounds: the most of bytes, the mean of shares."""
    names = sorted({name for one in answered for name in one.usage})
    values = {name: [one.usage[name] for one in answered if name in one.usage] for name in names}
    return {name: max(v) if name.endswith("_bytes") else float(np.mean(v)) for name, v in values.items()}
