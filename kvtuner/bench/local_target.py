"""What answers loads in this process: the local engine, or transformers' own generate with TextIteratorStreamer."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import TextIteratorStreamer

from kvtuner import __version__
from kvtuner.bench.client import RequestResult
from kvtuner.bench.hardware import Observer
from kvtuner.bench.load_target import ServerRecord
from kvtuner.exported_configs.identity.model_identity import public_name
from kvtuner.runtime_loader.engine.generation import SamplingParameters

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from kvtuner.bench.loads import Load
    from kvtuner.runtime_loader.engine.generation import Completion
    from kvtuner.runtime_loader.engine.local_engine import LocalEngine


@dataclass(slots=True)
class _Sent:
    """A request that was sent, and when its tokens came."""

    started: float
    arrivals: list[float] = field(default_factory=list)

    def result(self, prompt: Sequence[int], load: Load, first_start: float, **facts: Any) -> RequestResult:
        """Its result, whose times count from the first request of the load."""
        gaps = [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]
        is_answered = bool(self.arrivals)
        return RequestResult(
            len(prompt),
            load.output_tokens,
            started_s=self.started - first_start,
            ttft_s=self.arrivals[0] - self.started if is_answered else None,
            latency_s=(self.arrivals[-1] if is_answered else time.perf_counter()) - self.started,
            gaps_s=tuple(gaps),
            **facts,
        )


class _InProcess:
    """What both have: they are their own clients, and end with this process."""

    def __init__(self, record: ServerRecord, tokenizer: Any) -> None:
        self.record, self._tokenizer = record, tokenizer
        self._observer = Observer(os.getpid(), record.num_gpus)

    def watching(self) -> AbstractContextManager[dict[str, float]]:
        """The machine's usage while a block runs."""
        return self._observer.watching()

    def reason_gone(self) -> str | None:
        """No reason, ever: what fails here ends this process."""
        return None

    def _num_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False)) if text else 0


class EngineTarget(_InProcess):
    """A local engine, stepped here: requests are given to it as others end, as many as are in flight."""

    def __init__(self, engine: LocalEngine, name: str, timeout_s: float) -> None:
        self._engine, self._timeout_s, profile = engine, timeout_s, engine.profile
        shape = engine.pool.shape
        record = _record(
            name, engine.model,
            page_size=shape.page_size, digest=None if profile is None else profile.digest,
            reads=None if profile is None else engine.options.attend, context=engine.context_length,
            tokens_that_fit=engine.pool.num_pages * shape.page_size, max_running_requests=shape.max_requests,
        )  # fmt: skip
        super().__init__(record, engine.tokenizer)

    @property
    def client(self) -> EngineTarget:
        """Itself."""
        return self

    def empty_prefix_cache(self) -> None:
        """Evict all that no request uses."""
        if self._engine.prefix_tree is not None:
            self._engine.prefix_tree.evict(self._engine.pool.num_pages)

    def send(self, load: Load, prompts: Sequence[Sequence[int]]) -> list[RequestResult]:
        """Answer all requests of a load; the results are in the order of prompts."""
        sampling = SamplingParameters(max_tokens=load.output_tokens, ignore_eos=True, skip_special_tokens=False)
        engine, waiting = self._engine, deque(enumerate(prompts))
        numbers: dict[str, int] = {}
        sent: dict[int, _Sent] = {}
        answers: dict[int, Completion] = {}
        while waiting or numbers:
            while waiting and len(numbers) < load.concurrency:
                number, prompt = waiting.popleft()
                sent[number] = _Sent(time.perf_counter())
                numbers[engine.submit(prompt, sampling)] = number
            running = {request_id: engine.generation(request_id) for request_id in numbers}
            deltas, now = engine.step(), time.perf_counter()
            late = [each for each, number in numbers.items() if now - sent[number].started > self._timeout_s]
            for delta in (*deltas, *filter(None, map(engine.abort, late))):
                sent[numbers[delta.request_id]].arrivals += [now] * len(delta.token_ids)
                if delta.finish_reason is not None:
                    answers[numbers.pop(delta.request_id)] = running[delta.request_id].completion()
        first = min(each.started for each in sent.values())
        return [
            self._result(prompt, load, sent[number], answers[number], first) for number, prompt in enumerate(prompts)
        ]

    def _result(
        self, prompt: Sequence[int], load: Load, sent: _Sent, answer: Completion, first_start: float
    ) -> RequestResult:
        is_late = answer.finish_reason == "abort"
        return sent.result(
            prompt,
            load,
            first_start,
            reported_tokens=len(answer.token_ids),
            retokenized_tokens=self._num_tokens(answer.text),
            cached_tokens=answer.num_cached_tokens,
            error=f"no answer within {self._timeout_s:g} s" if is_late else answer.error,
        )


class _TimedStreamer(TextIteratorStreamer):
    """The streamer of transformers, with the time of every token; the first that it is given is the prompt."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True)
        self.arrivals: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Take a token."""
        if not self.next_tokens_are_prompt:
            self.arrivals.append(time.perf_counter())
        super().put(value)  # type: ignore[no-untyped-call]  # transformers' streamers have no types


class GenerateTarget(_InProcess):
    """A model's own `generate`, a thread for each answer: one is answered after another, and all others wait."""

    def __init__(
        self, model: Any, tokenizer: Any, name: str, *, context_length: int, most_requests: int, timeout_s: float
    ) -> None:
        """Take a model; more than `most_requests` in flight are not asked of it, as not of an engine beside it."""
        self._model, self._timeout_s = model, timeout_s
        record = _record(name, model, context=context_length, max_running_requests=most_requests)
        super().__init__(record, tokenizer)

    @property
    def client(self) -> GenerateTarget:
        """Itself."""
        return self

    def empty_prefix_cache(self) -> None:
        """Do nothing: every answer has a cache of its own."""

    def send(self, load: Load, prompts: Sequence[Sequence[int]]) -> list[RequestResult]:
        """Answer all requests of a load; the results are in the order of prompts."""
        first, ends, results = time.perf_counter(), [time.perf_counter()] * load.concurrency, []
        for prompt in prompts:
            # A request takes the lane that is free first, and waits there for those of the others.
            sent = _Sent(min(ends))
            text, sent.arrivals = self._answer(prompt, load.output_tokens)
            ends[ends.index(min(ends))] = time.perf_counter()
            count, asked = len(sent.arrivals), load.output_tokens
            tokens = {"reported_tokens": count, "retokenized_tokens": self._num_tokens(text), "cached_tokens": 0}
            error = None if count == asked else f"{count} of {asked} tokens within {self._timeout_s:g} s"
            results.append(sent.result(prompt, load, first, error=error, **tokens))
        return results

    def _answer(self, prompt: Sequence[int], num_tokens: int) -> tuple[str, list[float]]:
        """The text of an answer, and when each of its tokens came."""
        streamer = _TimedStreamer(self._tokenizer)
        ids = torch.tensor([list(prompt)], device=self._model.device)
        errors: list[BaseException] = []

        def generate() -> None:
            try:
                self._model.generate(
                    ids, attention_mask=torch.ones_like(ids), streamer=streamer, do_sample=False,
                    max_new_tokens=num_tokens, min_new_tokens=num_tokens, pad_token_id=0,
                    max_time=self._timeout_s,
                )  # fmt: skip
            except BaseException as error:  # raised again by who waits
                errors.append(error)
                streamer.end()  # type: ignore[no-untyped-call]  # transformers' streamers have no types

        thread = threading.Thread(target=generate)
        thread.start()
        text = "".join(streamer)
        thread.join()
        if errors:
            raise errors[0]
        return text, streamer.arrivals


def _record(name: str, model: Any, *, context: int, page_size: int = 1, **facts: Any) -> ServerRecord:
    unknown = dict.fromkeys(("digest", "reads", "tokens_that_fit", "max_running_requests"))
    return ServerRecord(
        model=public_name(name),
        page_size=page_size,
        version=__version__,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=None,
        device=model.device.type,
        tp_size=1,
        num_gpus=int(model.device.type == "cuda"),
        context=context,
        quantization=None,
        speculates=False,
        **{**unknown, **facts},
    )
