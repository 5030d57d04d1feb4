"""Claims: one worker for each item, whoever comes when, until that worker ends or falls silent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from kvtuner.run_folder import RunFolder
from kvtuner.workers import worker_identity
from kvtuner.workers.work_claims import CLAIMS, Claims

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

ELSEWHERE = "another machine|1|1"
SPAWN = multiprocessing.get_context("spawn")


def test_an_item_is_one_workers_until_it_gives_it_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    here, there = Claims(folder), Claims(folder, ELSEWHERE)
    assert here.take(["a", "b"], 2) == ["a", "b"]
    assert there.take(["a", "b", "c", "d"], 3) == ["c", "d"]
    assert here.held_by_others() == {"c", "d"}
    assert here.take(["a"]) == ["a"], "what is one's own can be taken again"
    here.release(["a"])
    assert there.take(["a"]) == ["a"]
    assert here.take(["a", "b"]) == ["b"]


def test_a_line_that_a_kill_cut_claims_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert Claims(folder, ELSEWHERE).take(["a"]) == ["a"]
    file = folder.file(CLAIMS)
    file.write_bytes(file.read_bytes()[:-9])
    assert Claims(folder).take(["a"]) == ["a"]
    assert Claims(folder, ELSEWHERE).take(["a", "b"], 2) == ["b"]


def test_silence_voids_the_claims_of_another_machine_and_heartbeats_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_identity, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(worker_identity, "GRACE_S", 0.4)
    folder = RunFolder(tmp_path)
    here, there = Claims(folder), Claims(folder, ELSEWHERE)
    with there.beating():
        assert there.take(["a"]) == ["a"]
        for _ in range(30):
            assert here.take(["a"]) == []
            time.sleep(0.03)
    begun = time.monotonic()
    while not here.take(["a"]):
        time.sleep(0.02)
    assert time.monotonic() - begun > 0.2


def _take_all(path: str, queue: Any, all_are_done: Any) -> None:
    claims, taken = Claims(RunFolder(path)), []
    while more := claims.take([str(item) for item in range(300) if str(item) not in taken], 7):
        taken += more
    queue.put(taken)
    all_are_done.wait()  # claims of a worker that has ended are void


def test_processes_that_take_at_the_same_time_share_all_items(tmp_path: Path) -> None:
    queue, all_are_done = SPAWN.Queue(), SPAWN.Barrier(3)
    processes = [SPAWN.Process(target=_take_all, args=(str(tmp_path), queue, all_are_done)) for _ in range(3)]
    for process in processes:
        process.start()
    taken = [item for _ in processes for item in queue.get(timeout=120)]
    for process in processes:
        process.join()
    assert sorted(taken) == sorted(str(item) for item in range(300))


def _take_and_wait(path: str, ready: Any) -> None:
    ready.put((os.getpid(), Claims(RunFolder(path)).take(["a", "b"], 2)))
    time.sleep(600)


def test_the_claims_of_a_killed_process_are_void_at_once(tmp_path: Path) -> None:
    ready = SPAWN.Queue()
    process = SPAWN.Process(target=_take_and_wait, args=(str(tmp_path), ready))
    process.start()
    pid, taken = ready.get(timeout=120)
    claims = Claims(RunFolder(tmp_path))
    assert (taken, claims.take(["a", "c"], 2)) == (["a", "b"], ["c"])
    os.kill(pid, signal.SIGKILL)
    process.join()
    assert claims.take(["a", "b"], 2) == ["a", "b"]
