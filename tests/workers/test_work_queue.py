"""Work that processes share: every item done, none twice unless its worker died over it, results in one order."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.journal import Journal
from kvtuner.run_folder import RunFolder
from kvtuner.workers import work_queue
from kvtuner.workers.work_claims import Claims
from kvtuner.workers.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

JOURNAL = "numbers.jsonl"
SPAWN = multiprocessing.get_context("spawn")


class Squares:
    """Numbers whose squares are journalled; groups are tens."""

    def __init__(self, folder: RunFolder, **options: Any) -> None:
        folder.create()
        self.journal = Journal(folder, JOURNAL, "mine")
        self.measured: list[list[int]] = []
        self.queue = WorkQueue[int](self.journal, measure=self.measure, group_of=lambda item: item // 10, **options)

    def measure(self, items: Sequence[int]) -> None:
        self.measured.append(list(items))
        self.journal.append(*({"key": item, "value": item**2} for item in items))


def test_one_worker_does_all_items_in_their_order(tmp_path: Path) -> None:
    squares, reported = Squares(RunFolder(tmp_path), at_once=3), []
    squares.queue.finish(range(7), on_done=reported.append)
    assert squares.measured == [[0, 1, 2], [3, 4, 5], [6]]
    assert reported == list(range(7))
    again = Squares(RunFolder(tmp_path))
    again.queue.finish(range(8), on_done=reported.append)
    assert again.measured == [[7]]
    assert reported == [*range(7), *range(8)]


def test_what_this_process_has_prepared_comes_first_and_what_others_work_on_last(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    squares = Squares(folder, held_groups={2})
    other = Squares(folder)
    names = [squares.queue._text_of(item) for item in (0, 1)]
    claims = Claims(folder, "another machine|1|1")
    claims.take(names, 1)

    def meanwhile() -> bool:
        if not other.measured:
            other.measure([0])
        return False

    squares.queue.finish([0, 1, 10, 20, 21], meanwhile=meanwhile)
    assert squares.measured == [[20], [21], [10], [1]]
    assert other.measured == [[0]], "an item that another one has is waited for"


def test_a_few_items_are_left_to_the_worker_that_has_prepared_their_group_for_some_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_queue, "MOST_LOOKS", 3)
    folder = RunFolder(tmp_path)
    squares, other = Squares(folder), Squares(folder)
    Claims(folder, "another machine|1|1").take([squares.queue._text_of(item) for item in (0, 10)], 2)
    other.measure([0, 10])
    assert not squares.queue.take_some([0, 1, 2])
    assert squares.queue.take_some([0, 1, 2, 20]) and squares.measured == [[20]], "its own come first"
    assert squares.queue.take_some([1, 2, 3]) and squares.measured == [[20], [1]], "three are worth preparing"
    assert not squares.queue.take_some([]), "with nothing to take it does not look"
    assert not squares.queue.take_some([2, 3])
    assert squares.queue.take_some([2, 3]) and squares.measured == [[20], [1], [2]], "the third look"
    assert not squares.queue.take_some([3])
    squares.queue.finish([0, 1, 2, 3])
    assert squares.measured == [[20], [1], [2], [3]]


def test_an_item_that_another_worker_did_between_look_and_claim_is_not_done_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    other = Squares(folder)

    def key_of(item: int) -> int:  # asked of items that are not done, before one is claimed
        if not other.measured:
            other.measure([item])
        return item

    squares = Squares(folder, key_of=key_of)
    squares.queue.finish([1, 2])
    assert (other.measured, squares.measured) == ([[1]], [[2]])


def test_items_of_a_measurement_that_fails_are_free_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    failing, claims = Squares(folder), Claims(folder, "another machine|1|1")

    def fail(items: Sequence[int]) -> None:
        assert claims.take([failing.queue._text_of(items[0])]) == []
        raise ArithmeticError("no square")

    failing.queue._measure = fail
    with pytest.raises(ArithmeticError, match="no square"):
        failing.queue.finish([1])
    assert claims.take([failing.queue._text_of(1)]) != []


def test_a_record_for_every_key(tmp_path: Path) -> None:
    folder, taken = RunFolder(tmp_path), list[str]()
    folder.create()
    for _ in range(2):
        journal = Journal(folder, JOURNAL, None)

        def measure(keys: Sequence[str], journal: Journal = journal) -> None:
            taken.extend(keys)
            journal.append(*({"key": key} for key in keys))

        WorkQueue[str](journal, measure=measure).finish(["a", "b"])
    assert [record["key"] for record in folder.records(JOURNAL)] == taken == ["a", "b"]


def test_a_queue_asks_the_journal_unless_it_is_told_what_is_done(tmp_path: Path) -> None:
    folder, taken, looks = RunFolder(tmp_path), list[int](), list[int]()
    folder.create()
    journal = Journal(folder, JOURNAL, "mine", key_of=lambda record: record["key"] + 100)
    journal.append({"key": 7})

    def refresh() -> None:
        looks.append(len(looks))
        journal.refresh()

    queue = WorkQueue[int](
        journal, measure=taken.extend, refresh=refresh, is_done=lambda item: bool(journal.known(item + 100))
    )
    queue.finish([7])
    assert (taken, looks) == ([], [0])
    journal.append({"key": 107})
    WorkQueue[int](journal, measure=taken.extend).finish([107, 207])
    assert taken == []


def _work(path: str, seed: int) -> None:
    squares, rng = Squares(RunFolder(path)), random.Random(seed)
    plain = squares.measure

    def slow(items: Sequence[int]) -> None:
        time.sleep(0.02 * rng.random())
        plain(items)

    squares.queue._measure = slow
    squares.queue.finish(range(150))


@pytest.mark.slow
def test_workers_killed_at_any_moment_lose_the_item_in_hand_alone(tmp_path: Path) -> None:
    rng, killed = random.Random(0), 0
    folder = RunFolder(tmp_path)
    folder.create()
    workers = [SPAWN.Process(target=_work, args=(str(tmp_path), seed)) for seed in range(3)]
    for worker in workers:
        worker.start()
    while killed < 8 and len(list(folder.records(JOURNAL))) < 120:
        time.sleep(0.3 * rng.random())
        victim = workers.pop(0)
        if victim.is_alive() and len(list(folder.records(JOURNAL))):
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            killed += 1
            victim.join()
            workers.append(SPAWN.Process(target=_work, args=(str(tmp_path), 10 + killed)))
            workers[-1].start()
        else:
            workers.append(victim)
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    counts = Counter(record["key"] for record in folder.records(JOURNAL))
    assert set(counts) == set(range(150))
    assert killed > 2
    # A worker that was killed between the record and its next claim leaves nothing to do again.
    assert sum(counts.values()) == 150
