"""Seconds that moving pages takes, and quantizing within it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

Work = Literal["backup", "load", "quantize", "dequantize"]
"""A transfer down or up, and what of it is more than copying."""
Timed = Callable[[Work], AbstractContextManager[None]]


def untimed(_: Work) -> AbstractContextManager[None]:
    """Time nothing: a `Stopwatch` that nobody reads."""
    return nullcontext()


class Stopwatch:
    """`with stopwatch("backup"): ...`: by the clock on a processor, by the current stream on a GPU.

    On a GPU work is counted once later work begins and it is done: nothing waits for it.

    Args:
        device: The device that does the work.
        took: The callback for each work and its seconds.
    """

    def __init__(self, device: torch.device, took: Callable[[Work, float], None]) -> None:
        self._on_stream, self._took = device.type == "cuda", took
        self._running: deque[tuple[Work, Any, Any]] = deque()

    @contextmanager
    def __call__(self, work: Work) -> Iterator[None]:
        """Time what is done, or put on the stream, inside."""
        if not self._on_stream:
            begun = time.perf_counter()
            yield
            self._took(work, time.perf_counter() - begun)
            return
        while self._running and self._running[0][2].query():
            done, first, last = self._running.popleft()
            self._took(done, first.elapsed_time(last) / 1000)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._running.append((work, first, last))
