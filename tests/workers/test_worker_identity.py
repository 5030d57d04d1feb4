"""A worker is named by its process, which a reused process id is not."""

from __future__ import annotations

import os
import subprocess
import sys

from kvtuner.workers import worker_identity


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
