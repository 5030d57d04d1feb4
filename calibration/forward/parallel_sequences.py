"""Several sequences at once on the cores of one machine. Knows nothing of what is run.

The products of a small model are too small to share among cores, so each core runs sequences of its own; a large model,
or one on a GPU, keeps all of it for one sequence.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

from kvtuner.calibration.forward.streamed_layers import SEQUENCES_AT_ONCE, streamed_layers_of
from kvtuner.calibration.placement.sharded_weights import is_sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SMALL_MODEL = 200_000_000  # numbers in weights and buffers
MAX_WORKERS = 16

Item = TypeVar("Item")
Result = TypeVar("Result")


def num_workers(model: torch.nn.Module) -> int:
    """The number of sequences of `model` to run at once: as many as torch may use threads, one unless it is small.

    One of a model in parts on several ranks, which have to run the same one.
    Many of a model that is streamed, which pass each layer together.
    """
    if streamed_layers_of(model) is not None:
        return SEQUENCES_AT_ONCE
    tensors = [*model.parameters(), *model.buffers()]  # quantized weights are buffers
    if any(tensor.device.type != "cpu" for tensor in tensors) or is_sharded(model):
        return 1
    return min(torch.get_num_threads(), MAX_WORKERS) if sum(map(torch.numel, tensors)) < SMALL_MODEL else 1


def run_sequences(model: torch.nn.Module, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Results of `work`, which runs a model, in the order of `items`, as many at once as the model should run.

    Otherwise as `run_in_parallel`; sequences of a model that is streamed take turns.
    """
    streamed = streamed_layers_of(model)
    if streamed is not None:
        return streamed.run_together(work, items)
    return run_in_parallel(work, items, num_workers(model))


def run_in_parallel(work: Callable[[Item], Result], items: Sequence[Item], workers: int) -> Iterator[Result]:
    """Results of `work` in the order of `items`, up to `workers` at a time on one thread of torch each.

    One thread also for a single item: with more, sums may round otherwise, and results would depend on what is measured
    together. One worker keeps all threads.

    The first item that fails, in the order of items, decides the error. On an error or an interruption nothing new is
    begun, and what is under way is waited for. Context variables and gradient mode are each thread's own.
    """
    if workers <= 1 or not items:
        yield from map(work, items)
        return
    workers = min(workers, len(items))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(workers, "kvtuner", initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(work, items)
    finally:
        try:
            pool.shutdown(cancel_futures=True)
        finally:  # a second interruption does not wait
            torch.set_num_threads(threads)
