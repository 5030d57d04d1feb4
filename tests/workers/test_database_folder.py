"""A run in PostgreSQL: what was appended is there once, whoever appends, dies, or finds the database away."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import make_url, text

from kvtuner.errors import RunFolderError
from kvtuner.journal import Journal
from kvtuner.workers import database_folder
from kvtuner.workers.database_folder import DatabaseFolder
from kvtuner.workers.work_claims import Claims
from kvtuner.workers.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from databases.postgresql import PostgreSQL

pytestmark = pytest.mark.slow

SPAWN = multiprocessing.get_context("spawn")
OpenFolder = Callable[[Path], DatabaseFolder]


@pytest.fixture
def open_folder(postgresql: PostgreSQL) -> Iterator[OpenFolder]:
    """Opens a run folder in the database, and closes it after the test."""
    opened: list[DatabaseFolder] = []

    def open_(path: Path) -> DatabaseFolder:
        opened.append(DatabaseFolder(path, postgresql.url))
        return opened[-1]

    yield open_
    for folder in opened:
        folder.close()


def test_logs_and_files_are_those_of_the_run_wherever_it_is_looked_at(open_folder: OpenFolder, tmp_path: Path) -> None:
    here, there = (open_folder(tmp_path / place / "run-a") for place in ("here", "there"))
    other = open_folder(tmp_path / "here" / "run-b")
    here.append("log", {"text": "äß 'quoted'"}, {"number": 1.5})
    there.append("log", {"number": 2})
    appended = [{"text": "äß 'quoted'"}, {"number": 1.5}, {"number": 2}]
    assert list(here.records("log")) == list(there.records("log")) == appended
    _, position = there.records_after("log", 0)
    assert there.records_after("log", position) == ([], position)
    here.append("log", {"number": 3})
    assert there.records_after("log", position)[0] == [{"number": 3}]
    assert list(other.records("log")) == []
    assert not there.has("table.json")
    with pytest.raises(RunFolderError, match=r"has no table.json of run-a"):
        there.read_checked("table.json")
    for value in ({"a": [1, 2]}, {"a": "b"}):
        here.write_checked("table.json", value)
        assert there.read_checked("table.json") == value
        assert (tmp_path / "there/run-a/table.json").read_bytes() == (tmp_path / "here/run-a/table.json").read_bytes()
    with pytest.raises(RunFolderError, match="model is"):
        for folder, model in ((here, "x"), (there, "y")):
            folder.check_identity("run.json", {"model": model}, "measurements")
    assert "table.json" not in {path.name for path in (tmp_path / "here").glob("run-b/*")}


def test_a_damaged_line_is_left_out(open_folder: OpenFolder, tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "run-c")
    folder.append("log", {"number": 1}, {"number": 2})
    lines = database_folder._LINES
    changed = lines.update().where(lines.c.run == "run-c", lines.c.record.contains('"number":1'))
    with folder._engine.begin() as connection:
        connection.execute(changed.values(record='{"number":7}'))
    assert list(folder.records("log")) == [{"number": 2}]


def test_a_block_that_fails_appends_nothing(open_folder: OpenFolder, tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "run-d")
    with pytest.raises(ArithmeticError), folder.exclusive("log") as log:
        log.append({"number": 1})
        raise ArithmeticError
    folder.append("log", {"number": 2})
    assert list(folder.records("log")) == [{"number": 2}]


def _open_and_append(path: str, url: str, number: int) -> None:
    DatabaseFolder(path, url).append("log", *({"number": number, "line": line} for line in range(20)))


def test_tables_made_by_eight_processes_at_once(
    open_folder: OpenFolder, postgresql: PostgreSQL, tmp_path: Path
) -> None:
    folder = open_folder(tmp_path / "run-e")
    database_folder._METADATA.drop_all(folder._engine)
    path = str(tmp_path / "run-e")
    processes = [SPAWN.Process(target=_open_and_append, args=(path, postgresql.url, n)) for n in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    assert len(list(folder.records("log"))) == 160


def test_claims_are_exclusive(open_folder: OpenFolder, tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "run-f")
    taken: list[list[str]] = []

    def take(name: str) -> None:
        claims, own = Claims(folder, f"machine {name}|1|1"), list[str]()
        while more := claims.take([str(item) for item in range(60) if str(item) not in own], 2):
            own += more
        taken.append(own)

    threads = [threading.Thread(target=take, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(item for own in taken for item in own) == sorted(str(item) for item in range(60))


def _work(path: str, url: str, seed: int, num_items: int, most_s: float) -> None:
    folder, rng = None, random.Random(seed)
    while folder is None:  # it is refused where the database is away, and started again
        with contextlib.suppress(RunFolderError):
            folder = DatabaseFolder(path, url)
    journal = Journal(folder, "numbers", "mine")

    def measure(keys: Sequence[int]) -> None:
        time.sleep(most_s * rng.random())
        journal.append(*({"key": key, "value": key**2} for key in keys))

    WorkQueue[int](journal, measure=measure).finish(range(num_items))


@pytest.mark.parametrize(
    ("num_items", "most_s", "least_kills", "most_kills"),
    [(120, 0.03, 5, 20), pytest.param(1000, 1.0, 100, 100, marks=pytest.mark.full)],
)
def test_workers_and_the_database_killed_at_random_lose_nothing(
    num_items: int, most_s: float, least_kills: int, most_kills: int,
    open_folder: OpenFolder, postgresql: PostgreSQL, tmp_path: Path,
) -> None:  # fmt: skip
    path, rng = str(tmp_path / "run-g"), random.Random(0)
    folder = open_folder(tmp_path / "run-g")
    workers: list[Any] = []

    def start(seed: int) -> None:
        workers.append(SPAWN.Process(target=_work, args=(path, postgresql.url, seed, num_items, most_s)))
        workers[-1].start()

    for seed in range(3):
        start(seed)
    kills = 0
    while kills < most_kills and any(worker.is_alive() for worker in workers):
        time.sleep(0.5 * rng.random())
        kills += 1
        if kills % 2:
            postgresql.kill()
            time.sleep(0.3 * rng.random())
            postgresql.start()
        else:
            victim = workers.pop(0)
            if victim.is_alive():
                os.kill(victim.pid, signal.SIGKILL)
            victim.join()
            start(100 + kills)
    for worker in workers:
        worker.join(600)
        assert worker.exitcode == 0
    counts = Counter(record["key"] for record in folder.records("numbers"))
    assert set(counts) == set(range(num_items))
    assert set(counts.values()) == {1}
    assert kills >= least_kills


def test_a_database_that_stays_away_is_an_error_with_a_way_out(
    open_folder: OpenFolder, postgresql: PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path / "run-h")
    monkeypatch.setattr(database_folder, "PATIENCE_S", 1.0)
    postgresql.kill()
    begun = time.monotonic()
    try:
        with pytest.raises(RunFolderError, match="see that the database is there, and run the same command again"):
            list(folder.records("log"))
    finally:
        postgresql.start()
    assert time.monotonic() - begun >= 1.0
    assert list(folder.records("log")) == []


@pytest.mark.parametrize("port", [None, 1], ids=["whom it does not know", "where none is"])
def test_a_database_that_does_not_let_one_in_refuses_at_once(
    postgresql: PostgreSQL, tmp_path: Path, port: int | None
) -> None:
    url = make_url(postgresql.url).set(username="nobody", password="to", **({"port": port} if port else {}))
    begun = time.monotonic()
    with pytest.raises(
        RunFolderError, match="check the URL, and that the database is there and lets you in"
    ) as refused:
        DatabaseFolder(tmp_path / "run", url.render_as_string(hide_password=False))
    assert time.monotonic() - begun < database_folder.PATIENCE_S / 4
    assert "nobody:***@" in str(refused.value)
    assert ("does not exist" if port is None else "refused") in str(refused.value)
    assert "to" not in re.split(r"\W+", str(refused.value)), "a password that is a word of the reason"


@pytest.mark.parametrize("has_tables", [True, False])
def test_what_a_database_does_not_allow_is_refused_at_once(
    open_folder: OpenFolder, postgresql: PostgreSQL, tmp_path: Path, has_tables: bool
) -> None:
    folder = open_folder(tmp_path / "run-i")
    if not has_tables:
        database_folder._METADATA.drop_all(folder._engine)
    with folder._engine.begin() as connection:
        connection.execute(text("CREATE ROLE guest LOGIN"))
    begun = time.monotonic()
    try:
        with pytest.raises(RunFolderError, match=r"permission denied.*have the database allow"):
            guest = DatabaseFolder(tmp_path / "run", postgresql.url.replace("kvtuner@", "guest@"))
            with contextlib.closing(guest):
                guest.append("log", {"number": 1})
    finally:
        with folder._engine.begin() as connection:
            connection.execute(text("DROP ROLE guest"))
        database_folder._METADATA.create_all(folder._engine)
    assert time.monotonic() - begun < database_folder.PATIENCE_S / 4


def test_a_transaction_that_was_given_up_for_another_is_tried_again(
    open_folder: OpenFolder, postgresql: PostgreSQL, tmp_path: Path
) -> None:
    folder, asked = open_folder(tmp_path / "run-j"), list[int]()
    statement = "DO $$ BEGIN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END $$"

    def use() -> int:
        asked.append(len(asked))
        if len(asked) < 3:
            with folder._engine.begin() as connection:
                connection.execute(text(statement))
        return len(asked)

    assert folder._patiently(use) == 3


def test_a_driver_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"pip install 'kvtuner\[postgresql\]'"):
        DatabaseFolder(tmp_path / "run", "postgresql+pg8000://me@127.0.0.1/none")
