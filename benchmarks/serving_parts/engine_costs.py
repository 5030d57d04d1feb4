"""What a step of the engine costs by context, by hits and by requests, and how much of it is not the model's."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvtuner.runtime_loader.engine.generation import SamplingParameters
from serving_parts.subject import OWN, PACKED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.runtime_loader.engine.local_engine import LocalEngine
    from serving_parts.subject import Subject

    Table = dict[str, dict[str, float]]

STEPS = 30
LONG_PROMPT = 2048
CHUNK = 512
SHORT_PROMPT = 64


def decoding_after(subject: Subject, contexts: Sequence[int], rounds: int) -> Table:
    """Processor ms of a decoding step of 4 requests after so many tokens, by either cache, in turns."""
    table: Table = {}
    for length in contexts:
        times: dict[str, list[float]] = {OWN: [], PACKED: []}
        for _ in range(rounds):
            for name, profile in ((OWN, None), (PACKED, subject.profile)):
                with subject.engine(profile, 4, prefix_cache_tokens=0, chunk_tokens=2048) as engine:
                    start_decoding(engine, 4, length)
                    times[name] += [step.whole for step in timed_steps(engine)]
        table[f"{length:,} tokens"] = {name: statistics.median(each) for name, each in times.items()}
    return table


def hit_first_tokens(subject: Subject, rounds: int) -> Table:
    """Processor ms to the first token of a long prompt of which a share is in the prefix cache.

    *Of a whole prompt* is what the tokens behind that share take where nothing is a hit: later ones read more.
    """
    rng, one = random.Random(0), SamplingParameters(max_tokens=1)
    shares = (0.0, 0.25, 0.5, 0.75, 0.97)
    times: dict[tuple[str, float], list[float]] = {}
    for _ in range(rounds):
        prompt = [rng.randrange(2, 500) for _ in range(LONG_PROMPT)]
        for name, profile in ((OWN, None), (PACKED, subject.profile)):
            with subject.engine(profile, 4, chunk_tokens=CHUNK) as engine:
                engine.submit(prompt, one)
                chunks = [step.whole for step in timed_steps(engine, LONG_PROMPT // CHUNK)]
            for share in shares:
                num_hits = round(share * LONG_PROMPT)
                with subject.engine(profile, 4, chunk_tokens=CHUNK) as engine:
                    if share:
                        engine.generate([prompt[:num_hits]], one)
                    start = time.process_time()
                    engine.generate([prompt], one)
                    times.setdefault((name, share), []).append(1e3 * (time.process_time() - start))
                first, within = divmod(num_hits, CHUNK)
                left = sum(chunks[first + 1 :]) + chunks[first] * (1 - within / CHUNK)
                times.setdefault((f"{name}, of a whole prompt", share), []).append(left)
    names = list(dict.fromkeys(name for name, _ in times))
    return {
        f"{100 * share:.0f}%": {name: statistics.median(times[name, share]) for name in names} for share in shares
    }  # fmt: skip


def own_cost(subject: Subject, counts: Sequence[int]) -> Table:
    """Processor ms of a decoding step of so many requests, and of its parts that are not the model's forward.

    The scheduler's is all but the choice of the next tokens and their text: which requests run, their pages, the
    numbers of the step on the device, and the notes of what is stored.
    """
    table: Table = {}
    for count in counts:
        with subject.engine(None, count, prefix_cache_tokens=0, chunk_tokens=4096) as engine:
            start_decoding(engine, count, SHORT_PROMPT)
            steps = timed_steps(engine)
        whole = statistics.median(step.whole for step in steps)
        outside = statistics.median(step.whole - step.model for step in steps)
        scheduler = statistics.median(step.whole - step.model - step.answers for step in steps)
        table[str(count)] = {
            "step": whole, "outside of the model": outside, "share %": 100 * outside / whole, "scheduler": scheduler,
            "its share %": 100 * scheduler / whole,
        }  # fmt: skip
    return table


def start_decoding(engine: LocalEngine, count: int, length: int) -> None:
    """Let so many requests come to where each has one token in a step."""
    rng = random.Random(0)
    ids = [
        engine.submit(
            [rng.randrange(2, 500) for _ in range(length)],
            SamplingParameters(max_tokens=2 * STEPS + 40, ignore_eos=True),
        )
        for _ in range(count)
    ]
    generations = [engine.generation(each) for each in ids]
    while not all(generation.decodes for generation in generations):
        engine.step()


@dataclass(frozen=True)
class TimedStep:
    """The processor ms of a step, of the model's forward in it, and of its choice of tokens with their text."""

    whole: float
    model: float
    answers: float


def timed_steps(engine: LocalEngine, num_steps: int = STEPS) -> list[TimedStep]:
    """The times of some steps."""
    parts: tuple[tuple[Any, str], ...] = ((engine._runner, "run"), (engine, "_answer"))
    spent: dict[str, float] = {}

    def timed(name: str, call: Any, *arguments: Any) -> Any:
        start = time.process_time()
        result = call(*arguments)
        spent[name] = 1e3 * (time.process_time() - start)
        return result

    for holder, name in parts:
        setattr(holder, name, partial(timed, name, getattr(holder, name)))
    steps = []
    for _ in range(num_steps):
        spent["_answer"] = 0.0  # a chunk that does not end its prompt chooses none
        start = time.process_time()
        engine.step()
        steps.append(TimedStep(1e3 * (time.process_time() - start), spent["run"], spent["_answer"]))
    for holder, name in parts:
        delattr(holder, name)
    return steps
