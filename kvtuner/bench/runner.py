"""Puts servers under loads, one way to store the cache after another, and journals what came of every request."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from tqdm import tqdm

from kvtuner.bench.client import RequestResult
from kvtuner.bench.gates import Gate, all_gates
from kvtuner.bench.loads import Capacity, Load, LoadOptions, plan_loads
from kvtuner.bench.metrics import LoadResult, figures
from kvtuner.bench.prompts import Prompts
from kvtuner.run_folder import canonical_json, sha256_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from kvtuner.run_folder import RunFolder

JOURNAL: Final = "requests.jsonl"
BENCHING: Final = 2
"""Raised whenever the same load would be sent, or timed, otherwise."""
WARM_OUTPUT: Final = 8
"""Tokens that an unmeasured request generates at most."""
LARGEST: Final = Capacity(sys.maxsize, None, None)
"""What all loads fit."""


class LoadTarget(Protocol):
    """A server under load.

    Attributes:
        capacity: what it holds.
    """

    capacity: Capacity

    def send(self, load: Load, prompts: Sequence[Sequence[int]]) -> list[RequestResult]:
        """See `kvtuner.bench.client.Client.send`."""
        ...

    def forget(self) -> None:
        """Empty its prefix cache, where it can be asked to."""
        ...

    def watching(self) -> AbstractContextManager[dict[str, float]]:
        """See `kvtuner.bench.usage.Observer.watching`."""
        ...

    def is_gone(self) -> str | None:
        """Why it answers no more; None where it does."""
        ...


@dataclass(frozen=True, slots=True)
class MeasurementCost:
    """What measuring itself took.

    Attributes:
        measured_s: in which requests were in flight.
        between_s: between the loads.
        client_cpu_s: processor time of this process while requests were in flight.
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
    """All that one server was sent.

    Attributes:
        answered: loads with their requests.
        left_out: loads that do not fit.
        harness: of all of them.
    """

    answered: tuple[LoadResult, ...]
    left_out: tuple[Load, ...]
    harness: MeasurementCost

    def rows(self) -> list[dict[str, Any]]:
        """Figures of each load, all its rounds together."""
        kinds: dict[tuple[Any, ...], list[LoadResult]] = {}
        for one in self.answered:
            load = one.load
            kinds.setdefault((load.kind, load.prompt_tokens, load.output_tokens, load.concurrency), []).append(one)
        return [figures(ones) for ones in kinds.values()]

    def rounds(self) -> list[dict[str, Any]]:
        """Figures of each round of stability."""
        return [figures([one]) for one in self.answered if one.load.kind == "stability"]

    def gates(self, bound: float | None, no_bound: str) -> list[Gate]:
        """See `kvtuner.bench.gates.all_gates`."""
        return all_gates(self.answered, bound, no_bound)


class Journal:
    """What came of loads, so that none is sent twice, whatever came of it.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._known = {record["key"]: record for record in folder.records(JOURNAL)}

    def server(self, way: str) -> dict[str, Any] | None:
        """What the server of a way said of itself; None before it was there."""
        record = self._known.get(_key(way))
        return None if record is None else record["server"]

    def put_server(self, way: str, name: str, said: dict[str, Any]) -> None:
        """Keep what it said, plain JSON values."""
        if self.server(way) != said:
            self._put({"key": _key(way), "way": name, "server": said})

    def get(self, way: str, load: Load, seed: str) -> tuple[LoadResult, MeasurementCost] | None:
        """What came of a load, and what measuring it took; None before it was sent.

        Args:
            way: what decides answers and times besides the load.
            load: which.
            seed: of its prompts.
        """
        record = self._known.get(_key(way, load.to_json(), seed))
        if record is None:
            return None
        sent = tuple(map(RequestResult.from_json, record["sent"]))
        return LoadResult(load, sent, record["usage"]), MeasurementCost(**record["harness"])

    def put(self, way: str, name: str, seed: str, answered: LoadResult, harness: MeasurementCost) -> None:
        """Keep it."""
        self._put(
            {
                "key": _key(way, answered.load.to_json(), seed),
                "way": name,
                "load": answered.load.to_json(),
                "sent": [each.to_json() for each in answered.sent],
                "usage": answered.usage,
                "harness": asdict(harness),
            }
        )

    def _put(self, record: dict[str, Any]) -> None:
        self._folder.append(JOURNAL, record)
        self._known[record["key"]] = record


def _key(way: str, *what: Any) -> str:
    return sha256_of([BENCHING, way, *what])


@dataclass(frozen=True, slots=True)
class BenchWork:
    """What every way is sent.

    Attributes:
        options: which loads.
        stream: tokens that prompts are cut from.
        seed: of the places; the same for every way, so that all are sent the same.
        journal: of what was sent before.
    """

    options: LoadOptions
    stream: Sequence[int]
    seed: str
    journal: Journal

    def check(self) -> None:
        """Whether the text has prompts for every load that a server could be sent, however much it holds.

        Raises:
            CorpusError: it has too few that begin differently.
        """
        prompts, (loads, _) = Prompts(self.stream, self.seed), plan_loads(self.options, LARGEST)
        for load in loads:
            prompts.check(load.prompt_tokens, load.requests)

    def prompts(self, load: Load) -> list[list[int]]:
        """Of a load: the same whatever else is sent."""
        prompts = Prompts(self.stream, f"{self.seed} {canonical_json(load.to_json())}")
        return [prompts.take(load.prompt_tokens) for _ in range(load.requests)]


def replay(capacity: Capacity, work: BenchWork, *, way: str) -> SchemeRun | None:
    """What `run_loads` found before, of a server that was the same; None where a load is missing."""
    loads, left_out = plan_loads(work.options, capacity)
    known = [found for load in loads if (found := work.journal.get(way, load, work.seed)) is not None]
    if len(known) < len(loads):
        return None
    return _run(known, left_out)


def run_loads(target: LoadTarget, work: BenchWork, *, way: str, name: str) -> SchemeRun:
    """Send what fits and was not sent before, and keep it.

    Before the first load of a shape the same is sent once, unmeasured: kernels are compiled, memory is touched.

    Args:
        target: the server.
        work: what to send.
        way: what decides answers and times besides the load.
        name: for people.
    """
    loads, left_out = plan_loads(work.options, target.capacity)
    found: list[tuple[LoadResult, MeasurementCost]] = []
    warm: set[tuple[int, int]] = set()
    gone = None
    for load in tqdm(loads, desc=name, unit="load", disable=None):
        known = work.journal.get(way, load, work.seed)
        if known is None and gone is not None:
            known = LoadResult(load, tuple(_never_sent(load, gone) for _ in range(load.requests)), {}), NOTHING
        if known is None:
            shape = (load.prompt_tokens, min(load.concurrency, load.requests))
            if shape not in warm:
                _warm_up(target, work, load)
                warm.add(shape)
            known = _measure(target, load, work.prompts(load))
            work.journal.put(way, name, work.seed, *known)
            gone = target.is_gone() if len(known[0].good) < load.requests else None
        found.append(known)
    return _run(found, left_out)


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


def _run(found: Sequence[tuple[LoadResult, MeasurementCost]], left_out: Sequence[Load]) -> SchemeRun:
    harness = NOTHING
    for _, each in found:
        harness += each
    return SchemeRun(tuple(answered for answered, _ in found), tuple(left_out), harness)


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
