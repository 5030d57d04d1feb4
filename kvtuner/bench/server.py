"""A real SGLang server, started here and ended here with all its processes."""

from __future__ import annotations

import contextlib
import http
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtuner.errors import EndpointError
from kvtuner.evaluation.backends.url_opener import opener_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

HOST: Final = "127.0.0.1"
PORTS: Final = range(12_000, 32_000)
"""Ports below those that systems hand out by themselves, which another program could take before the server does."""
POLL_S: Final = 0.5
PATIENCE_S: Final = 20
"""The time that a server has to end by itself."""
LOG_LINES: Final = 3
HEALTH_S: Final = 60
ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that was started here.

    Attributes:
        url: The URL, without a path.
        process: The process of the launcher.
        log: The file of all that its processes print, after what earlier ones printed.
        log_start: The byte where its own part begins.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int

    def log_tail(self) -> str:
        """The reason why it ended, as far as its log has it."""
        with self.log.open("rb") as handle:
            handle.seek(self.log_start)
            return _log_tail(handle.read().decode(errors="replace"))


@contextlib.contextmanager
def running(flags: Sequence[str], log: Path, start_s: float) -> Iterator[ServerProcess]:
    """A server until the block ends.

    Args:
        flags: The flags of ``python -m sglang.launch_server``, the model among them.
        log: The file that its output is added to.
        start_s: The seconds that it may take to be ready.

    Raises:
        EndpointError: it ended, or was not ready in time; the message is what it printed last.
    """
    port = _free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--host", HOST, "--port", str(port), *flags]
    process, before = None, log.stat().st_size if log.exists() else 0
    try:
        with log.open("ab") as handle:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=handle, stderr=subprocess.STDOUT, start_new_session=True
            )
        server = ServerProcess(f"http://{HOST}:{port}", process, log, before)
        _wait(server, start_s)
        yield server
    finally:
        if process is not None:
            _end(process)


def _wait(server: ServerProcess, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise EndpointError(server.log_tail())
        if _is_healthy(server.url):
            return
        time.sleep(POLL_S)
    raise EndpointError(f"the server was not ready within {start_s:g} s; read its log, or give more --start-timeout")


def _is_healthy(url: str) -> bool:
    """Whether it generates: ``/health`` asks it to, once it says that it is ready."""
    try:
        with opener_of(url).open(f"{url}/health", timeout=HEALTH_S) as answer:
            return bool(answer.status == http.HTTPStatus.OK)
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server by its own handlers, else without them; return when none of its processes is left."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            is_there, deadline = _signal(process.pid, number), time.monotonic() + PATIENCE_S
            while is_there and time.monotonic() < deadline:
                process.poll()  # the launcher stays in its group until it is asked for
                time.sleep(POLL_S)
                is_there = _signal(process.pid, 0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group; whether any process of it was there."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _log_tail(text: str) -> str:
    """The refusal of the plugin, else the last line that is an error, else the last lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    refusals = [line for line in lines if line.startswith("kvtuner: ")]
    errors = [line for line in lines if "Error: " in line or line.startswith("error: ")]
    return (refusals or errors or ["; ".join(lines[-LOG_LINES:]) or "the server said nothing"])[-1][:500]


def _free_port() -> int:
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((HOST, port))
            return port
