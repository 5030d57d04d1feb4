"""A worker is named by its process, which a reused process id is not."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from kvtuner.workers import worker_identity

NOBODY = 65534


def test_a_worker_knows_itself_and_the_dead() -> None:
    own = worker_identity.worker_id()
    machine, _, start = own.split("|")
    assert not worker_identity.has_ended(own)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    alive = f"{machine}|{child.pid}|{worker_identity._start_of(child.pid)}"
    assert not worker_identity.has_ended(alive)
    child.kill()
    # Killed but not yet waited for, it is a zombie.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert worker_identity.has_ended(alive)
    child.communicate()
    assert worker_identity.has_ended(alive)
    assert worker_identity.has_ended(f"{machine}|{os.getpid()}|{start}1"), "a process id used again is another worker"
    assert not worker_identity.has_ended(f"another machine|{child.pid}|{start}")


def ended_for_another_user(worker: str) -> bool:
    """Whether a worker has ended, as a process sees it that may not send it signals."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            os.setuid(NOBODY)
            status = int(worker_identity.has_ended(worker))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1)
    return bool(status)


def process_of_another_user() -> tuple[int, bool]:
    """A process id, and whether this process has to become another user to be one for it."""
    if os.getuid() == 0:
        return os.getpid(), True
    if Path("/proc/1").stat().st_uid == os.getuid():
        pytest.skip("needs root, or a first process of another user")
    return 1, False


def test_a_worker_of_another_user_lives_until_its_process_ends() -> None:
    pid, as_another = process_of_another_user()
    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    has_ended = ended_for_another_user if as_another else worker_identity.has_ended
    worker = f"{worker_identity._machine()}|{pid}|"
    assert not has_ended(worker + start)
    assert has_ended(worker + start + "1"), "a process id used again is another worker"


def test_a_worker_whose_start_cannot_be_read_counts_as_living(monkeypatch: pytest.MonkeyPatch) -> None:
    own, dead = worker_identity.worker_id(), subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()

    def hidden(path: Path) -> bytes:
        raise FileNotFoundError(path)

    machine = own.split("|")[0]
    monkeypatch.setattr(Path, "read_bytes", hidden)
    assert worker_identity._machine() == machine
    assert not worker_identity.has_ended(own)
    assert not worker_identity.has_ended(worker_identity.worker_id())
    assert worker_identity.has_ended(f"{machine}|{dead.pid}|1"), "no process has its id"
    monkeypatch.undo()
    assert not worker_identity.has_ended(f"{machine}|{os.getpid()}|?"), "a worker that could not read its own start"
