"""The name of a worker, a process that measures beside others, and whether it has ended. Knows no work."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Final

HEARTBEAT_S: Final = 20.0
GRACE_S: Final = 90.0
"""The silence of a worker on another machine after which it counts as lost."""
_UNREADABLE: Final = "?"


def worker_id() -> str:
    """Name of this process: machine, process id and its start, by which a reused process id differs."""
    return f"{_machine()}|{os.getpid()}|{_start_of(os.getpid())}"


def has_ended(worker: str) -> bool:
    """Whether a worker is known to have ended; one on another machine is not known."""
    machine, pid, start = worker.split("|")
    if machine != _machine():
        return False
    found = _start_of(int(pid))
    return not found or (found != start and _UNREADABLE not in (found, start))


def _machine() -> str:
    """Host, boot and process namespace: where a process id means the same process."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}/{boot.read_text().strip()}/{namespace.readlink()}"
    return socket.gethostname()


def _start_of(pid: int) -> str:
    """Start time of a process in clock ticks, `_UNREADABLE` where the system does not tell it, "" if it has ended."""
    try:
        # The name before these fields may hold spaces, and bytes of any kind.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # it has ended, or is hidden
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except PermissionError:
            pass  # it is there, but another user's
        return _UNREADABLE
    # Fields 3 and 22 of proc(5): the state, a zombie or dead, and the start.
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
