"""Puts servers under loads, one scheme after another, and journals the result of every request."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from tqdm import tqdm

from kvtuner.bench.client import RequestResult
from kvtuner.bench.gates import Gate, all_gates
from kvtuner.bench.loads import Capacity, Load, LoadOptions, plan_loads
from kvtuner.bench.metrics import LoadResult, figures
from kvtuner.bench.prompts import Prompts
from kvtuner.journal import Journal
from kvtuner.run_folder import canonical_json, sha256_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.bench.load_target import LoadTarget
    from kvtuner.run_folder import RunFolder

JOURNAL: Final = "requests.jsonl"
BENCHING: Final = 2
"""Raised whenever the same load would be sent, or timed, otherwise."""
WARM_OUTPUT: Final = 8
"""The tokens that an unmeasured request generates at most."""
LARGEST: Final = Capacity(sys.maxsize, None, None)
"""A capacity that all loads fit."""


@dataclass(frozen=True, slots=True)
class MeasurementCost:
    """The time that measuring itself took.

    Attributes:
        measured_s: The seconds in which requests were in flight.
        between_s: The seconds between the loads.
        client_cpu_s: The processor time of this process while requests were in flight.
    """

    measured_s: float
    between_s: float
    client_cpu_s: float

    def __add__(self, other: MeasurementCost) -> MeasurementCost:
        return MeasurementCost(
            self.measured_s + other.measured_s,
            self.between_s + other.between_s,
            self.client_cpu_s + other.client_cpu_s,
        )

    def to_json(self) -> dict[str, float]:
        """Plain JSON values."""
        measured = self.measured_s or float("nan")
        shares = {"overhead": self.between_s / measured, "client_cpu": self.client_cpu_s / measured}
        return {**asdict(self), **shares}


NOTHING: Final = MeasurementCost(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class SchemeRun:
    """All loads of one scheme.

    Attributes:
        answered: The loads with the results of their requests.
        left_out: The loads that do not fit.
        harness: The cost of measuring all of them.
    """

    answered: tuple[LoadResult, ...]
    left_out: tuple[Load, ...]
    harness: MeasurementCost

    def rows(self) -> list[dict[str, Any]]:
        """The figures of each load, all its rounds together."""
        kinds: dict[tuple[Any, ...], list[LoadResult]] = {}
        for one in self.answered:
            load = one.load
            kinds.setdefault((load.kind, load.prompt_tokens, load.output_tokens, load.concurrency), []).append(one)
        return [figures(ones) for ones in kinds.values()]

    def rounds(self) -> list[dict[str, Any]]:
        """The figures of each round of stability."""
        return [figures([one]) for one in self.answered if one.load.kind == "stability"]

    def gates(self, bound: float | None, no_bound: str) -> list[Gate]:
        """The gates over all loads; see `kvtuner.bench.gates.all_gates`."""
        return all_gates(self.answered, bound, no_bound)


class LoadJournal:
    """The results of loads, so that none is sent twice.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._journal = Journal(folder, JOURNAL, None)

    def server(self, server_key: str) -> dict[str, Any] | None:
        """The record of a server; None before it was there."""
        record = self._journal.get(_key(server_key))
        return None if record is None else record["server"]

    def put_server(self, server_key: str, name: str, server: dict[str, Any]) -> None:
        """Keep a server's record, plain JSON values."""
        if self.server(server_key) != server:
            self._journal.append({"key": _key(server_key), "way": name, "server": server})

    def get(self, server_key: str, load: Load, seed: str) -> tuple[LoadResult, MeasurementCost] | None:
        """The result of a load, and what measuring it took; None before it was sent.

        Args:
            server_key: What decides answers and times besides the load.
            load: The load.
            seed: The seed of its prompts.
        """
        record = self._journal.get(_key(server_key, load.to_json(), seed))
        if record is None:
            return None
        sent = tuple(map(RequestResult.from_json, record["sent"]))
        return LoadResult(load, sent, record["usage"]), MeasurementCost(**record["harness"])

    def put(self, server_key: str, name: str, seed: str, result: LoadResult, cost: MeasurementCost) -> None:
        """Keep the result of a load."""
        load = result.load.to_json()
        self._journal.append(
            {
                "key": _key(server_key, load, seed),
                "way": name,
                "load": load,
                "sent": [each.to_json() for each in result.sent],
                "usage": result.usage,
                "harness": asdict(cost),
            }
        )


def _key(server_key: str, *load: Any) -> str:
    return sha256_of([BENCHING, server_key, *load])


@dataclass(frozen=True, slots=True)
class BenchWork:
    """The loads that every scheme is sent.

    Attributes:
        options: The loads.
        stream: The tokens that prompts are cut from.
        seed: The seed of the places; the same for every scheme, so that all are sent the same.
        journal: The journal of what was sent before.
    """

    options: LoadOptions
    stream: Sequence[int]
    seed: str
    journal: LoadJournal

    def check(self) -> None:
        """Check that the text has prompts for every load that a server could be sent, however much it holds.

        Raises:
            CorpusError: it has too few that begin differently.
        """
        prompts, (loads, _) = Prompts(self.stream, self.seed), plan_loads(self.options, LARGEST)
        for load in loads:
            prompts.check(load.prompt_tokens, load.requests)

    def prompts(self, load: Load) -> list[list[int]]:
        """The prompts of a load: the same whatever else is sent."""
        prompts = Prompts(self.stream, f"{self.seed} {canonical_json(load.to_json())}")
        return [prompts.take(load.prompt_tokens) for _ in range(load.requests)]


def replay(capacity: Capacity, work: BenchWork, *, server_key: str) -> SchemeRun | None:
    """The run that the journal holds of a server that was the same; None where a load is missing."""
    loads, left_out = plan_loads(work.options, capacity)
    results = [result for load in loads if (result := work.journal.get(server_key, load, work.seed)) is not None]
    return None if len(results) < len(loads) else _run(results, left_out)


def run_loads(target: LoadTarget, work: BenchWork, *, server_key: str, name: str) -> SchemeRun:
    """Send the loads that fit and were not sent before, and keep their results.

    Before the first load of a shape the same is sent once, unmeasured: kernels are compiled, memory is touched.

    Args:
        target: The server.
        work: The loads.
        server_key: What decides answers and times besides the load.
        name: The name of the scheme.
    """
    loads, left_out = plan_loads(work.options, target.record.capacity)
    results: list[tuple[LoadResult, MeasurementCost]] = []
    warm: set[tuple[int, int]] = set()
    gone = None
    for load in tqdm(loads, desc=name, unit="load", disable=None):
        result = work.journal.get(server_key, load, work.seed)
        if result is None and gone is not None:
            result = LoadResult(load, tuple(_never_sent(load, gone) for _ in range(load.requests)), {}), NOTHING
        if result is None:
            shape = (load.prompt_tokens, min(load.concurrency, load.requests))
            if shape not in warm:
                _warm_up(target, work, load)
                warm.add(shape)
            result = _measure(target, load, work.prompts(load))
            work.journal.put(server_key, name, work.seed, *result)
            gone = target.is_gone() if len(result[0].good) < load.requests else None
        results.append(result)
    return _run(results, left_out)


def _warm_up(target: LoadTarget, work: BenchWork, load: Load) -> None:
    lanes = min(load.concurrency, load.requests)
    same = replace(load, output_tokens=min(load.output_tokens, WARM_OUTPUT), requests=lanes, round=-1)
    target.send(same, work.prompts(same))


def _measure(target: LoadTarget, load: Load, prompts: Sequence[Sequence[int]]) -> tuple[LoadResult, MeasurementCost]:
    started = time.perf_counter()
    target.forget()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    with target.watching() as usage:
        sent = target.send(load, prompts)
    taken, taken_cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
    answered = LoadResult(load, tuple(sent), usage)
    measured = answered.duration_s
    return answered, MeasurementCost(measured, begun - started + max(0.0, taken - measured), taken_cpu)


def _run(results: Sequence[tuple[LoadResult, MeasurementCost]], left_out: Sequence[Load]) -> SchemeRun:
    return SchemeRun(
        tuple(result for result, _ in results), tuple(left_out), sum((cost for _, cost in results), start=NOTHING)
    )


def _never_sent(load: Load, reason: str) -> RequestResult:
    return RequestResult(
        prompt_tokens=load.prompt_tokens,
        asked_tokens=load.output_tokens,
        reported_tokens=None,
        retokenized_tokens=0,
        cached_tokens=None,
        started_s=0.0,
        ttft_s=None,
        latency_s=0.0,
        gaps_s=(),
        error=f"the server was gone: {reason}",
    )
