"""What answers the loads of engine.py: the engine, transformers' generate in padded batches, servers over HTTP."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.streamers import BaseStreamer

from kvtuner.bench.loads import Load
from kvtuner.runtime_loader.engine.generation import SamplingParameters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvtuner.bench.client import Client
    from kvtuner.runtime_loader.engine.local_engine import LocalEngine

    Asked = tuple[list[int], int]
    """A prompt, and the tokens that are generated after it."""


@dataclass
class Answered:
    """A load that was answered: its useful tokens, times in seconds, and the most bytes of keys and values."""

    tokens: int
    wall_s: float
    cpu_s: float | None
    ttft_s: list[float] = field(default_factory=list)
    kv_bytes: int | None = None


def by_engine(engine: LocalEngine, asked: Sequence[Asked]) -> Answered:
    """All requests at once; the engine runs as many together as it has slots."""
    shape, most_pages = engine.pool.shape, 0
    first: dict[str, float] = {}
    start, cpu = time.perf_counter(), time.process_time()
    for prompt, num_tokens in asked:
        engine.submit(prompt, SamplingParameters(max_tokens=num_tokens, ignore_eos=True))
    while engine.has_requests:
        for delta in engine.step():
            first.setdefault(delta.request_id, time.perf_counter() - start)
        state = engine.state
        most_pages = max(most_pages, state.num_pages - state.num_free_pages - state.num_idle_pages)
    wall, used = time.perf_counter() - start, time.process_time() - cpu
    kv_bytes = most_pages * shape.page_size * shape.bytes_per_token + shape.copies_bytes
    return Answered(sum(count for _, count in asked), wall, used, list(first.values()), kv_bytes)


class _FirstToken(BaseStreamer):
    """The time of a batch's first tokens; what it is given before is the prompts."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the next tokens of all."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Take the end."""


def by_generate(model: Any, asked: Sequence[Asked], at_once: int, bytes_per_token: int) -> Answered:
    """Batches in their order, prompts padded on the left, each as long as its longest answer."""
    ttft, most_bytes = [], 0
    start, cpu = time.perf_counter(), time.process_time()
    for begin in range(0, len(asked), at_once):
        batch = asked[begin : begin + at_once]
        width, num_tokens = max(len(prompt) for prompt, _ in batch), max(count for _, count in batch)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
        streamer = _FirstToken()
        model.generate(
            ids, attention_mask=mask, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
            pad_token_id=0, streamer=streamer,
        )  # fmt: skip
        ttft += [streamer.times[1] - start] * len(batch)
        most_bytes = max(most_bytes, len(batch) * (width + num_tokens) * bytes_per_token)
    wall, used = time.perf_counter() - start, time.process_time() - cpu
    return Answered(sum(count for _, count in asked), wall, used, ttft, most_bytes)


def by_continuous_batching(model: Any, asked: Sequence[Asked], at_once: int) -> Answered:
    """Transformers' own continuous batching, with room for all; it tells no time of first tokens that is asked here."""
    pages = -(-sum(len(prompt) + count for prompt, count in asked) // 256) + 2 * len(asked)
    settings = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=512, max_requests_per_batch=at_once)
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    open_manager = model.continuous_batching_context_manager
    with open_manager(generation_config=greedy, continuous_batching_config=settings) as manager:
        start, cpu = time.perf_counter(), time.process_time()
        for number, (prompt, count) in enumerate(asked):
            manager.add_request(prompt, request_id=str(number), max_new_tokens=count)
        left = len(asked)
        while left:
            result = manager.get_result(timeout=600)
            if result is None or result.error:
                raise RuntimeError(f"continuous batching ended: {result and result.error}")
            left -= result.is_finished()
        wall, used = time.perf_counter() - start, time.process_time() - cpu
    return Answered(sum(count for _, count in asked), wall, used)


def by_client(client: Client, asked: Sequence[Asked], at_once: int) -> Answered:
    """Requests of one length over HTTP, by SGLang's client; the processor time is not known of a server."""
    load = Load("concurrency", len(asked[0][0]), asked[0][1], at_once, len(asked))
    sent = client.send(load, [prompt for prompt, _ in asked])
    # Servers go on behind an end, but words of random weights may be fewer tokens when they are read again.
    errors = [request.error for request in sent if request.error is not None]
    if errors := [error for error in errors if not error.startswith("ended after about")]:
        raise RuntimeError(errors[0])
    wall = max(request.started_s + request.latency_s for request in sent)
    return Answered(load.output_tokens * len(sent), wall, None, [request.ttft_s or 0.0 for request in sent])


@contextlib.contextmanager
def local_server(folder: Path, profile: Path | None, at_once: int) -> Iterator[str]:
    """The URL of `kvtuner serve-local` until the block ends."""
    command = [
        sys.executable, "-m", "kvtuner", "serve-local", "--model", str(folder), "--served-model-name", "model",
        "--port", "0", "--json", "--device", "cpu", "--max-requests", str(at_once), "--prefix-cache-tokens", "0",
        *(() if profile is None else ("--profile", str(profile))),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
