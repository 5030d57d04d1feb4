"""SGLang's parallel topology: this process's ranks, and words between all of them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch.distributed as dist
from sglang.srt.runtime_context import get_parallel
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from collections.abc import Mapping

FAREWELL_S: Final = 10.0


class ParallelRanks(NamedTuple):
    """The ranks of this process: among those that share a layer's heads, in the pipeline, and among all schedulers."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    world_rank: int


def ranks() -> ParallelRanks:
    """Return this process's ranks, once its groups are made."""
    here = get_parallel()
    return ParallelRanks(
        tp_rank=here.attn_tp_rank, tp_size=here.attn_tp_size, pp_rank=here.pp_rank, world_rank=dist.get_rank()
    )


def tell_all(key: str, word: str, timeout_s: float) -> Mapping[int, str | None]:
    """Tell every rank a word and hear theirs; None of a rank that says none within the time."""
    # Through the rendezvous store and not by a collective: a rank that knows nothing of this must not hang the others.
    store = distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    deadline = time.monotonic() + timeout_s
    store.set(f"{key}/{rank}", word)
    words = {other: _word_of(store, f"{key}/{other}", deadline - time.monotonic()) for other in range(size)}
    store.set(f"{key}/{rank}/heard", "")
    if set(words.values()) != {word}:
        # Whoever leaves now may take the store along, which others still ask.
        deadline = time.monotonic() + FAREWELL_S
        for other in range(size):
            _word_of(store, f"{key}/{other}/heard", deadline - time.monotonic())
    return words


def post(key: str, word: str) -> None:
    """Leave a word for all ranks, under a key that is used once."""
    distributed_c10d._get_default_store().set(f"{key}/{dist.get_rank()}", word)


def posted(key: str) -> list[str] | None:
    """The texts that all ranks left under a key, by rank; None while one has not. Waits for nobody."""
    store = distributed_c10d._get_default_store()
    keys = [f"{key}/{rank}" for rank in range(dist.get_world_size())]
    return [store.get(key_of_rank).decode() for key_of_rank in keys] if store.check(keys) else None


def _word_of(store: Any, key: str, timeout_s: float) -> str | None:
    try:
        store.wait([key], timedelta(seconds=max(timeout_s, 0.01)))
        return str(store.get(key).decode())
    except RuntimeError:
        return None
