"""The folder of a group: everything is done once, every rank sees the same, and claims are those of one worker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import RunFolderError
from kvtuner.journal import Journal
from kvtuner.run_folder import RunFolder
from kvtuner.workers import work_queue
from kvtuner.workers.led_folder import LedFolder, claims_of
from kvtuner.workers.work_claims import CLAIMS, Claims
from kvtuner.workers.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvtuner.workers.rank_group import RankGroup

    OnRanks = Callable[[int, Callable[[RankGroup], Any]], list[Any]]


def test_what_ranks_write_together_is_there_once_and_all_of_them_read_it(on_ranks: OnRanks, tmp_path: Path) -> None:
    def work(group: RankGroup) -> list[Any]:
        folder = LedFolder(RunFolder(tmp_path / "run"), group)
        before = folder.has("table.json")
        folder.create()
        folder.append("lines.jsonl", {"key": "a"}, {"key": "b"})
        folder.write_checked("table.json", {"value": 3})
        folder.check_identity("run.json", {"model": "demo"}, "measurements")
        return [
            before,
            folder.has("table.json"),
            folder.read_checked("table.json"),
            list(folder.records("lines.jsonl")),
        ]

    assert on_ranks(3, work) == [[False, True, {"value": 3}, [{"key": "a"}, {"key": "b"}]]] * 3
    assert len(list(RunFolder(tmp_path / "run").records("lines.jsonl"))) == 2


def test_ranks_see_what_the_leader_saw_and_not_what_came_later(on_ranks: OnRanks, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    class Late(RunFolder):
        """A folder to which another worker appends while each rank reads."""

        def records_after(self, name: str, position: int) -> tuple[list[dict[str, Any]], int]:
            folder.append(name, {"key": "late"})
            return super().records_after(name, position)

    folder.append("lines.jsonl", {"key": "first"})
    read = on_ranks(2, lambda group: list(LedFolder(Late(tmp_path), group).records("lines.jsonl")))
    assert read == [[{"key": "first"}, {"key": "late"}]] * 2


def test_a_folder_of_another_run_is_refused_on_all_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    RunFolder(tmp_path).write_checked("run.json", {"model": "other"})

    def work(group: RankGroup) -> str:
        with pytest.raises(RunFolderError, match="model is"):
            LedFolder(RunFolder(tmp_path), group).check_identity("run.json", {"model": "demo"}, "measurements")
        return "refused"

    assert on_ranks(2, work) == ["refused"] * 2


def test_a_group_does_each_item_once_beside_another_worker(on_ranks: OnRanks, tmp_path: Path) -> None:
    other = Claims(RunFolder(tmp_path), "elsewhere|1|1")
    assert other.take(["kind|x|1"]) == ["kind|x|1"]
    keys = ["a", "b", "c"]

    def work(group: RankGroup) -> list[str]:
        folder = LedFolder(RunFolder(tmp_path), group)
        claims, journal, measured = claims_of(folder), Journal(folder, "items.jsonl", "identity"), list[str]()
        assert claims.held_by_others() == {"kind|x|1"}
        assert not claims.is_alone
        assert claims.take(["kind|x|1", "mine"]) == ["mine"]
        claims.release(["mine"])

        def measure(items: Sequence[str]) -> None:
            measured.extend(items)
            journal.append(*({"key": item} for item in items))

        WorkQueue[str](journal, measure=measure).finish(keys)
        return measured

    assert on_ranks(2, work) == [keys] * 2
    assert [record["key"] for record in RunFolder(tmp_path).records("items.jsonl")] == keys
    workers = {record["worker"] for record in RunFolder(tmp_path).records(CLAIMS)}
    assert len(workers - {None, "elsewhere|1|1"}) == 1


def test_ranks_leave_items_to_another_worker_for_as_many_looks_however_long_each_takes(
    on_ranks: OnRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_queue, "MOST_LOOKS", 5)
    others = WorkQueue[int](Journal(RunFolder(tmp_path), "kind", None), measure=lambda _: None)
    Claims(RunFolder(tmp_path), "elsewhere|1|1").take([others._text_of(0)])

    def work(group: RankGroup) -> tuple[int, list[int]]:
        measured, looks = list[int](), 0
        queue = WorkQueue[int](
            Journal(LedFolder(RunFolder(tmp_path), group), "kind", None),
            measure=measured.extend,
            refresh=lambda: None,
            is_done=lambda item: item in measured,
            group_of=lambda item: item // 10,
        )
        assert not queue.take_some([0])
        while not queue.take_some([1, 2]):
            looks += 1
            time.sleep(0.03 * group.number)
        queue.finish([1, 2])
        return looks, measured

    assert on_ranks(2, work) == [(4, [1, 2])] * 2
