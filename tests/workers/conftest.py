"""The database of the tests of workers, and ranks that are threads of one process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from databases.postgresql import postgresql

from kvtuner.workers.rank_group import RankGroup

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["postgresql"]


class _Exchange:
    """Hands what rank 0 tells to all ranks, which meet before and after; a rank that is late breaks the test."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._message = threading.Barrier(ranks, timeout=20), None

    def broadcast_of(self, number: int) -> Callable[[Any], Any]:
        def broadcast(message: Any) -> Any:
            if number == 0:
                self._message = message
            self._barrier.wait()
            answer = self._message
            self._barrier.wait()
            return answer

        return broadcast


@pytest.fixture
def on_ranks() -> Callable[[int, Callable[[RankGroup], Any]], list[Any]]:
    """`on_ranks(ranks, work)`: what `work` returned on each rank of a group, or the exception that it raised."""

    def run(ranks: int, work: Callable[[RankGroup], Any]) -> list[Any]:
        exchange = _Exchange(ranks)

        with ThreadPoolExecutor(ranks) as pool:
            ranked = [RankGroup(number, ranks, exchange.broadcast_of(number)) for number in range(ranks)]
            futures = [pool.submit(work, group) for group in ranked]
        return [future.exception() or future.result() for future in futures]

    return run
