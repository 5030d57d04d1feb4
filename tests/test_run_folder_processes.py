"""Run folders under kills, full disks and many processes at once."""

from __future__ import annotations

import errno
import fcntl
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from kvtuner import run_folder
from kvtuner.errors import RunFolderError
from kvtuner.run_folder import EVENTS, RunFolder

ROOT = Path(__file__).resolve().parents[1]
KILLED = 99


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process that has imported RunFolder; its arguments are in sys.argv."""
    source = "import os, sys, time\nfrom kvtuner.run_folder import RunFolder\n" + textwrap.dedent(program)
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> int:
    _, errors = process.communicate(timeout=120)
    assert process.returncode in (0, KILLED), errors
    return process.returncode


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run_folder = RunFolder(tmp_path / "run")
    run_folder.create()
    return run_folder


@pytest.mark.parametrize("moment", ["os.fsync", "os.replace"])
def test_kill_in_the_middle_of_a_write_leaves_the_old_file(folder: RunFolder, moment: str) -> None:
    folder.write_checked("table.json", {"version": 1})
    killed = start(
        f"""
        {moment} = lambda *a, **k: os._exit({KILLED})
        RunFolder(sys.argv[1]).write_checked("table.json", {{"version": 2}})
        """,
        folder.path,
    )
    assert finish(killed) == KILLED
    assert len(list(folder.path.iterdir())) == 2  # the new content was on its way
    assert folder.read_checked("table.json") == {"version": 1}
    folder.write_checked("table.json", {"version": 3})
    assert folder.read_checked("table.json") == {"version": 3}


def test_kill_in_the_first_write_leaves_no_file(folder: RunFolder) -> None:
    killed = start(
        f"""
        os.replace = lambda *a, **k: os._exit({KILLED})
        RunFolder(sys.argv[1]).write_checked("table.json", {{"version": 1}})
        """,
        folder.path,
    )
    assert finish(killed) == KILLED
    with pytest.raises(RunFolderError, match=r"table\.json does not exist"):
        folder.read_checked("table.json")


def test_reader_beside_a_writer_sees_only_whole_files(folder: RunFolder) -> None:
    folder.write_checked("table.json", {"version": 0, "filler": "x" * 10})
    writer = start(
        """
        os.fsync = lambda fd: None
        folder = RunFolder(sys.argv[1])
        for version in range(1, 201):
            folder.write_checked("table.json", {"version": version, "filler": "x" * 500 * (version % 7)})
        """,
        folder.path,
    )
    seen = []
    while writer.poll() is None:
        payload = folder.read_checked("table.json")
        assert payload["version"] == 0 or len(payload["filler"]) == 500 * (payload["version"] % 7)
        seen.append(payload["version"])
    assert finish(writer) == 0
    assert seen == sorted(seen)
    assert folder.read_checked("table.json")["version"] == 200


def test_processes_that_append_together_write_whole_lines(folder: RunFolder) -> None:
    program = """
        folder = RunFolder(sys.argv[1])
        while not folder.file("go").exists():
            time.sleep(0.001)
        for index in range(60):
            # longer than the write buffer, longer than a page, and short
            filler = sys.argv[2] * (1, 50_000, 5_000)[index % 3]
            folder.append("log.jsonl", {"writer": sys.argv[2], "index": index, "filler": filler})
    """
    writers = [start(program, folder.path, name) for name in "ab"]
    folder.file("go").touch()
    assert [finish(writer) for writer in writers] == [0, 0]
    records = list(folder.records("log.jsonl"))
    assert len(folder.file("log.jsonl").read_bytes().splitlines()) == len(records) == 120
    for name in "ab":
        assert [record["index"] for record in records if record["writer"] == name] == list(range(60))
    assert all(set(record["filler"]) == {record["writer"]} for record in records)


def test_append_that_the_disk_cut_short_is_reported_and_the_log_goes_on(folder: RunFolder) -> None:
    folder.append("log.jsonl", {"index": 0})
    size = folder.file("log.jsonl").stat().st_size
    cut = start(
        f"""
        import resource, signal
        from kvtuner.errors import RunFolderError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({size + 9}, {size + 9}))
        try:
            RunFolder(sys.argv[1]).append("log.jsonl", {{"index": 1, "filler": "x" * 100}})
        except RunFolderError:
            os._exit({KILLED})
        """,
        folder.path,
    )
    assert finish(cut) == KILLED
    assert folder.file("log.jsonl").stat().st_size == size + 9
    folder.append("log.jsonl", {"index": 2})
    assert [record["index"] for record in folder.records("log.jsonl")] == [0, 2]


def test_lock_of_a_killed_process_is_free(folder: RunFolder) -> None:
    holder = start(
        """
        with RunFolder(sys.argv[1]).lock("run.lock"):
            print("locked", flush=True)
            time.sleep(600)
        """,
        folder.path,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    acquired = threading.Event()

    def wait_for_lock() -> None:
        with folder.lock("run.lock", waiting="another process measures"):
            acquired.set()

    waiter = threading.Thread(target=wait_for_lock, daemon=True)
    waiter.start()
    while not list(folder.records(EVENTS)):
        assert waiter.is_alive()
        time.sleep(0.005)
    assert not acquired.is_set()
    holder.send_signal(signal.SIGKILL)
    assert acquired.wait(60)
    waiter.join(60)
    holder.communicate(timeout=60)
    assert holder.returncode == -signal.SIGKILL
    (event,) = folder.records(EVENTS)
    assert (event["event"], event["reason"]) == ("waiting", "another process measures")


def test_lock_keeps_processes_apart(folder: RunFolder) -> None:
    program = """
        folder = RunFolder(sys.argv[1])
        counter = folder.file("counter")
        for _ in range(40):
            with folder.lock("run.lock"):
                count = int(counter.read_text())
                time.sleep(0.0005)
                counter.write_text(str(count + 1))
    """
    folder.file("counter").write_text("0", encoding="utf-8")
    workers = [start(program, folder.path) for _ in range(3)]
    assert [finish(worker) for worker in workers] == [0, 0, 0]
    assert folder.file("counter").read_text(encoding="utf-8") == "120"


def test_lock_is_given_up_by_an_error_inside_which_passes_unchanged(folder: RunFolder) -> None:
    with pytest.raises(OSError, match="of the body") as caught, folder.lock("run.lock"):
        raise OSError(errno.ENOSPC, "of the body")
    assert type(caught.value) is OSError
    with folder.file("run.lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is still held
    assert list(folder.records(EVENTS)) == []


def test_file_system_without_locks_is_refused(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.fcntl, "flock", refuse)
    with pytest.raises(RunFolderError, match=r"cannot write .*run\.lock.*another place"), folder.lock("run.lock"):
        pytest.fail("locked without locks")


def test_lock_that_is_no_file_is_refused(folder: RunFolder) -> None:
    folder.file("run.lock").mkdir()
    with pytest.raises(RunFolderError, match=r"cannot write .*run\.lock.*another place"), folder.lock("run.lock"):
        pytest.fail("locked a folder")
