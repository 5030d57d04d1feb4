"""Puts servers under loads, one scheme to store the cache after another, and journals the result of every request."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from kvtuner.bench.client import RequestResult
from kvtuner.bench.load_metrics import LoadResult, MeasurementCost, SchemeRun
from kvtuner.bench.loads import Capacity, Load, LoadOptions, check_prompts, cut_prompts, plan_loads
from kvtuner.journal import Journal
from kvtuner.progress.bar import ProgressBar
from kvtuner.run_folder import RunFolder, canonical_json, sha256_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.bench.load_target import Target

JOURNAL: Final = "requests.jsonl"
MEASUREMENT_VERSION: Final = 2
"""The version of the measurement; increase it when the same load would be sent, or timed, otherwise."""
MAX_WARM_UP_TOKENS: Final = 8
"""The tokens that an unmeasured request generates at most."""
UNLIMITED: Final = Capacity(sys.maxsize, None, None)
"""A capacity that all loads fit."""


class BenchWork:
    """The loads that every scheme is sent with the same prompts, and the journal of what was sent before.

    Prompts are cut from the stream of tokens, at places that the seed draws. A server's key is the hash of what decides
    answers and times besides the load.
    """

    def __init__(self, folder: RunFolder, options: LoadOptions, stream: Sequence[int], seed: str) -> None:
        self.options, self.seed = options, seed
        self._stream, self._journal = stream, Journal(folder, JOURNAL, None)

    def check(self) -> None:
        """Check as `check_prompts` does for every load that a server could be sent, however much it holds."""
        tokens = set(self._stream)
        loads, _ = plan_loads(self.options, UNLIMITED)
        for load in loads:
            check_prompts(tokens, load.prompt_tokens, load.requests)

    def prompts(self, load: Load) -> list[list[int]]:
        """The prompts of a load: the same whatever else is sent."""
        seed = f"{self.seed} {canonical_json(asdict(load))}"
        return cut_prompts(self._stream, seed, load.prompt_tokens, load.requests)

    def server(self, server_key: str) -> dict[str, Any] | None:
        """The record of a server; None before it was there."""
        record = self._journal.get(_key(server_key))
        return None if record is None else record["server"]

    def put_server(self, server_key: str, name: str, server: dict[str, Any]) -> None:
        """Keep a server's record, plain JSON values."""
        if self.server(server_key) != server:
            self._journal.append({"key": _key(server_key), "scheme": name, "server": server})

    def result(self, server_key: str, load: Load) -> LoadResult | None:
        """The result of a load; None before it was sent."""
        record = self._journal.get(_key(server_key, asdict(load), self.seed))
        if record is None:
            return None
        sent = tuple(RequestResult(**request) for request in record["sent"])
        return LoadResult(load, sent, record["usage"], MeasurementCost(**record["harness"]))

    def put_result(self, server_key: str, name: str, result: LoadResult) -> None:
        """Keep the result of a load."""
        record = asdict(result)
        key, cost = _key(server_key, record["load"], self.seed), record.pop("cost")
        self._journal.append({"key": key, "scheme": name, **record, "harness": cost._asdict()})


def _key(server_key: str, *load: Any) -> str:
    return sha256_of([MEASUREMENT_VERSION, server_key, *load])


def replay(capacity: Capacity, work: BenchWork, *, server_key: str) -> SchemeRun | None:
    """The run that the journal holds of a server that was the same; None where a load is missing."""
    loads, left_out = plan_loads(work.options, capacity)
    results = [result for load in loads if (result := work.result(server_key, load)) is not None]
    return None if len(results) < len(loads) else SchemeRun(tuple(results), tuple(left_out))


def run_loads(target: Target, work: BenchWork, *, server_key: str, name: str) -> SchemeRun:
    """Send the loads that fit and were not sent before, and keep their results.

    Before the first load of a shape the same is sent once, unmeasured: kernels are compiled, memory is touched.
    """
    loads, left_out = plan_loads(work.options, target.record.capacity)
    results: list[LoadResult] = []
    warm_shapes: set[tuple[int, int]] = set()
    reason_gone = None
    for load in ProgressBar(loads, desc=name, unit="load"):
        result = work.result(server_key, load)
        if result is None and reason_gone is not None:
            # Not journalled: the same command sends it, once the server is there again.
            unsent = RequestResult(load.prompt_tokens, load.output_tokens, error=f"the server was gone: {reason_gone}")
            result = LoadResult(load, (unsent,) * load.requests, {})
        if result is None:
            shape = (load.prompt_tokens, load.in_flight)
            if shape not in warm_shapes:
                _warm_up(target, work, load)
                warm_shapes.add(shape)
            result = _measure(target, load, work.prompts(load))
            work.put_result(server_key, name, result)
            reason_gone = target.reason_gone() if len(result.good) < load.requests else None
        results.append(result)
    return SchemeRun(tuple(results), tuple(left_out))


def _warm_up(target: Target, work: BenchWork, load: Load) -> None:
    output = min(load.output_tokens, MAX_WARM_UP_TOKENS)
    # A round of its own draws prompts of its own, so that the measured ones stay new to the server.
    short_load = replace(load, output_tokens=output, requests=load.in_flight, round=-1)
    target.client.send(short_load, work.prompts(short_load))


def _measure(target: Target, load: Load, prompts: Sequence[Sequence[int]]) -> LoadResult:
    started = time.perf_counter()
    target.empty_prefix_cache()
    send_started, cpu_started = time.perf_counter(), time.process_time()
    with target.watching() as usage:
        sent = target.client.send(load, prompts)
    seconds, cpu_seconds = time.perf_counter() - send_started, time.process_time() - cpu_started
    result = LoadResult(load, tuple(sent), usage)
    between_s = send_started - started + max(0.0, seconds - result.duration_s)
    return replace(result, cost=MeasurementCost(result.duration_s, between_s, cpu_seconds))
