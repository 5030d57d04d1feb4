"""Figures of a load from the results of its requests; failures stay in every denominator. Knows no servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvtuner.bench.hardware import summary_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtuner.bench.client import RequestResult
    from kvtuner.bench.loads import Load

INSTANT_S: Final = 1e-9
"""The duration of loads that no server was there for."""


class MeasurementCost(NamedTuple):
    """Seconds with requests in flight, seconds between loads, and processor time of this process in the former."""

    measured_s: float = 0.0
    between_s: float = 0.0
    client_cpu_s: float = 0.0


NO_COST: Final = MeasurementCost()


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A load, the results of its requests, the machine's usage (empty where it was not watched), and what it took."""

    load: Load
    sent: tuple[RequestResult, ...]
    usage: dict[str, float]
    cost: MeasurementCost = NO_COST

    @property
    def good(self) -> tuple[RequestResult, ...]:
        """The requests that were answered whole."""
        return tuple(request for request in self.sent if request.error is None)

    @property
    def duration_s(self) -> float:
        """The time from the first request to the last answer, or failure."""
        return max(request.started_s + request.latency_s for request in self.sent)


@dataclass(frozen=True, slots=True)
class SchemeRun:
    """The results of all loads of one scheme that were sent, and the loads that do not fit its server."""

    results: tuple[LoadResult, ...]
    left_out: tuple[Load, ...]

    def rows(self) -> list[dict[str, Any]]:
        """The figures of each load, all its rounds together."""
        by_point: dict[tuple[Any, ...], list[LoadResult]] = {}
        for result in self.results:
            load = result.load
            key = (load.kind, load.prompt_tokens, load.output_tokens, load.concurrency)
            by_point.setdefault(key, []).append(result)
        return [figures(rounds) for rounds in by_point.values()]

    def rounds(self) -> list[dict[str, Any]]:
        """The figures of each round of stability."""
        return [figures([result]) for result in self.results if result.load.kind == "stability"]

    def harness(self) -> dict[str, float]:
        """The cost of measuring all of them, as plain JSON values, and its shares of the measured time."""
        cost = MeasurementCost(*map(sum, zip(*(result.cost for result in self.results), strict=True)))
        measured = cost.measured_s or float("nan")  # no load was sent
        return {
            **cost._asdict(),
            "overhead": cost.between_s / measured,
            "client_cpu": cost.client_cpu_s / measured,
        }


def num_tokens(request: RequestResult) -> int:
    """The number of generated tokens: as the server reports it, else as counted in the text."""
    return request.retokenized_tokens if request.reported_tokens is None else request.reported_tokens


def figures(results: Sequence[LoadResult]) -> dict[str, Any]:
    """Figures of all rounds of the same load, as plain JSON values.

    Seconds are of requests that were answered whole, throughput counts their tokens over the whole time; the share of
    them, `success_rate`, is of all that were sent. Time per output token leaves out the first, of one request; time
    between tokens is of single gaps.
    """
    load = results[0].load
    sent = [request for result in results for request in result.sent]
    good = [request for result in results for request in result.good]
    duration = max(sum(result.duration_s for result in results), INSTANT_S)
    tokens = sum(map(num_tokens, good))
    return {
        "kind": load.kind,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
        "concurrency": load.concurrency,
        "rounds": len(results),
        "sent": len(sent),
        "answered": len(good),
        "success_rate": len(good) / len(sent),
        "duration_s": duration,
        "requests_per_s": len(good) / duration,
        "output_tokens_per_s": tokens / duration,
        "tokens_per_s": (tokens + sum(request.prompt_tokens for request in good)) / duration,
        "ttft_s": _percentiles(request.ttft_s for request in good),
        "tpot_s": _percentiles(map(_seconds_per_token, good)),
        "itl_s": _percentiles(gap for request in good for gap in request.gaps_s),
        "e2e_s": _percentiles(request.latency_s for request in good),
        "errors": sorted({request.error for request in sent if request.error is not None})[:5],
        **summary_of(result.usage for result in results),
    }


def _percentiles(seconds: Iterable[float | None]) -> dict[str, float | None]:
    """The median, P90 and P99 of the seconds that are known; None where none are."""
    measured = [value for value in seconds if value is not None]
    values = map(float, np.percentile(measured, (50, 90, 99))) if measured else (None,) * 3
    return dict(zip(("p50", "p90", "p99"), values, strict=True))


def _seconds_per_token(request: RequestResult) -> float | None:
    """The mean time of a token after the first."""
    tokens = num_tokens(request)
    return (request.latency_s - request.ttft_s) / (tokens - 1) if request.ttft_s is not None and tokens > 1 else None
