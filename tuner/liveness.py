"""Names the worker of a trial, and tells whether it still lives. Knows nothing of what trials measure."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtuner.tuner.study_storage import STORAGE_ERRORS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import optuna

WORKER: Final = "worker"
HEARTBEAT: Final = "heartbeat"
HEARTBEAT_S: Final = 20.0
GRACE_S: Final = 90.0
"""The silence of a worker after which its trial counts as lost."""
UNNAMED_GRACE_S: Final = 10.0
"""The same of a trial without a worker: to name itself is the first thing that a worker does."""


def worker_id() -> str:
    """Name of this process: machine, process id and its start, by which a reused process id differs."""
    return f"{_machine()}|{os.getpid()}|{_start_of(os.getpid())}"


def has_ended(worker: str) -> bool:
    """Whether a worker is known to have ended; one on another machine is not known."""
    machine, pid, start = worker.split("|")
    return machine == _machine() and _start_of(int(pid)) != start


def _machine() -> str:
    """Host, boot and process namespace: where a process id means the same process."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}/{boot.read_text().strip()}/{namespace.readlink()}"
    return socket.gethostname()


def _start_of(pid: int) -> str:
    """Start time of a process in clock ticks, "?" where that cannot be read, "" if it has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        return "?"
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "?"
    # Fields 3 and 22 of proc(5): the state, a zombie or dead, and the start. The name before them may hold spaces.
    return "" if fields[0] in "ZX" else fields[19]


@contextlib.contextmanager
def heartbeat(trial: optuna.Trial) -> Iterator[None]:
    """Show that the worker of a trial lives, for as long as the context is open."""
    stop = threading.Event()

    def beat() -> None:
        count = 0
        while not stop.wait(HEARTBEAT_S):
            count += 1
            try:
                trial.set_user_attr(HEARTBEAT, count)
            except (*STORAGE_ERRORS, OSError):
                continue  # a storage that is locked or full now may not be at the next beat
            except RuntimeError:  # others have given the trial up
                return

    thread = threading.Thread(target=beat, name="kvtuner-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class LivenessMonitor:
    """Tells lost trials by heartbeats that this process has seen, so that clocks need not agree."""

    def __init__(self) -> None:
        """Start without having seen any trial."""
        self._seen: dict[int, tuple[object, float]] = {}

    def is_lost(self, trial: optuna.trial.FrozenTrial) -> bool:
        """Whether the worker of a running trial has ended or fallen silent."""
        worker = trial.user_attrs.get(WORKER)
        if worker is not None and has_ended(worker):
            return True
        # Whatever changes shows life: a worker without a heartbeat yet is choosing parameters one by one.
        state = (worker, trial.user_attrs.get(HEARTBEAT), len(trial.params))
        last_state, seen_at = self._seen.get(trial.number, (None, 0.0))
        if last_state != state:
            self._seen[trial.number] = (state, time.monotonic())
            return False
        return time.monotonic() - seen_at > (UNNAMED_GRACE_S if worker is None else GRACE_S)
