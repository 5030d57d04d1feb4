"""The metrics of a server, by SGLang's names, so that its dashboards and alerts take this one for one of theirs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator

    from prometheus_client.metrics_core import Metric
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from kvtuner.runtime_loader.engine.async_engine import AnswerStream, AsyncEngine
    from kvtuner.runtime_loader.engine.generation import Delta

SECONDS: Final = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
"""The buckets of first tokens and whole answers, as SGLang has them."""
TOKEN_SECONDS: Final = (
    0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.100, 0.200, 0.400,
    0.600, 0.800, 1, 2, 4, 6, 8,
)  # fmt: skip
OTHER_PATHS: Final = "other"
"""The endpoint of requests to paths that are not there, whose names would be endless."""


class _EngineCollector(Collector):
    """The counts of an engine, read when they are asked for."""

    def __init__(self, front: AsyncEngine, model: str) -> None:
        self._front, self._model = front, model

    def collect(self) -> Iterator[Metric]:
        """The metrics of the engine's state now."""
        state, pool = self._front.state, self._front.engine.pool
        page_size = pool.shape.page_size
        used = state.num_pages - state.num_free_pages - state.num_idle_pages
        for name, what, value in (
            ("sglang:num_running_reqs", "Requests that run.", state.num_running),
            ("sglang:num_queue_reqs", "Requests that wait.", state.num_waiting),
            ("sglang:token_usage", "Share of the KV pool that running requests hold.", used / state.num_pages),
            ("sglang:max_total_num_tokens", "Tokens that the KV pool holds.", state.num_pages * page_size),
            ("sglang:kv_used_tokens", "Tokens of running requests' pages.", used * page_size),
            (
                "sglang:kv_evictable_tokens",
                "Tokens of idle pages.",
                state.num_idle_pages * page_size,
            ),
            ("sglang:kv_available_tokens", "Tokens of free pages.", state.num_free_pages * page_size),
            ("sglang:num_retracted_reqs", "Retractions until now.", state.num_retracted),
            ("kvtuner_kv_bytes_per_token", "Stored bytes of one token.", pool.shape.bytes_per_token),
            ("kvtuner_kv_capacity_tokens", "Tokens that the pool holds.", state.num_pages * page_size),
        ):
            gauge = GaugeMetricFamily(name, what, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
        computed, cached = state.num_prompt_tokens, state.num_cached_tokens
        for name, what, values in (
            ("sglang:prompt_tokens", "Tokens of prompts.", {"": computed + cached}),
            ("sglang:generation_tokens", "Tokens of answers.", {"": state.num_answer_tokens}),
            ("sglang:cached_tokens", "Tokens of prompts that the prefix cache had.", {"": cached}),
            (
                "sglang:realtime_tokens",
                "Tokens by how they were had.",
                {"prefill_compute": computed, "prefill_cache": cached, "decode": state.num_answer_tokens},
            ),
            (
                "sglang:prefill_effective_tokens",
                "Tokens of prompts by where they were.",
                {"input": computed, "device_hit": cached},
            ),
        ):
            modes = [mode for mode in values if mode]
            counter = CounterMetricFamily(name, what, labels=("model_name", "mode") if modes else ("model_name",))
            for mode, value in values.items():
                counter.add_metric((self._model, mode) if mode else (self._model,), value)
            yield counter
        engine = self._front.engine
        served = {
            "model_name": self._model,
            "digest": "" if engine.profile is None else engine.profile.digest,
            "attention": engine.attention,
            "attend": engine.options.attend,
        }
        info = GaugeMetricFamily("kvtuner_info", "How the profile is served.", labels=tuple(served))
        info.add_metric(tuple(served.values()), 1)
        yield info


class ServerMetrics:
    """The metrics of one server."""

    def __init__(self, front: AsyncEngine, model: str) -> None:
        self._model, self._registry = model, CollectorRegistry()
        self._registry.register(_EngineCollector(front, model))
        registry, names = self._registry, ("model_name",)
        self._first_token = Histogram(
            "sglang:time_to_first_token_seconds", "Seconds to the first token.", names, registry=registry,
            buckets=SECONDS,
        )  # fmt: skip
        self._between_tokens = Histogram(
            "sglang:inter_token_latency_seconds", "Seconds between tokens.", names, registry=registry,
            buckets=TOKEN_SECONDS,
        )  # fmt: skip
        self._whole = Histogram(
            "sglang:e2e_request_latency_seconds", "Seconds of whole answers.", names, registry=registry,
            buckets=SECONDS,
        )  # fmt: skip
        self._finished = Counter("sglang:num_requests", "Requests that ended.", names, registry=registry)
        self._aborted = Counter("sglang:num_aborted_requests", "Requests given up.", names, registry=registry)
        endpoint = ("endpoint", "method")
        self._http = Counter("sglang:http_requests", "HTTP requests.", endpoint, registry=registry)
        self._active = Gauge("sglang:http_requests_active", "HTTP requests now.", endpoint, registry=registry)
        self._responses = Counter(
            "sglang:http_responses", "HTTP responses.", (*endpoint, "status_code"), registry=registry
        )  # fmt: skip
        for metric in (self._first_token, self._between_tokens, self._whole, self._finished, self._aborted):
            metric.labels(model)  # there from the start, so that rates are

    def text(self) -> bytes:
        """All metrics, as Prometheus reads them."""
        return generate_latest(self._registry)

    async def watch(self, stream: AnswerStream) -> AsyncIterator[Delta]:
        """The deltas of an answer, whose times are noted; one that is left before its end was given up."""
        start = last = time.perf_counter()
        is_whole = False
        try:
            async for delta in stream:
                now = time.perf_counter()
                if delta.token_ids:
                    metric = self._first_token if last == start else self._between_tokens
                    metric.labels(self._model).observe(now - last)
                    last = now
                is_whole = delta.finish_reason in ("stop", "length")
                if is_whole:
                    self._whole.labels(self._model).observe(now - start)
                yield delta
        finally:
            self._finished.labels(self._model).inc()
            if not is_whole:
                self._aborted.labels(self._model).inc()

    def counting(self, app: ASGIApp, paths: Collection[str]) -> ASGIApp:
        """An application whose HTTP requests are counted, by path where it is one of its own."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            labels = (scope["path"] if scope["path"] in paths else OTHER_PATHS, scope["method"])

            async def note(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._responses.labels(*labels, str(message["status"])).inc()
                await send(message)

            self._http.labels(*labels).inc()
            with self._active.labels(*labels).track_inprogress():
                await app(scope, receive, note)

        return counted
