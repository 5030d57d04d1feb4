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
"""Below those that systems hand out by themselves: another program's would be gone once the server listens."""
POLL_S: Final = 0.5
PATIENCE_S: Final = 20
"""For a server to end by itself."""
LOG_LINES: Final = 3
HEALTH_S: Final = 60
ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready.

    Attributes:
        url: without a path.
        process: of the launcher.
        log: all that its processes print, after what earlier ones did.
        log_start: where its own part begins.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int

    def last_words(self) -> str:
        """Why it ended, as far as its log says."""
        with self.log.open("rb") as handle:
            handle.seek(self.log_start)
            return _last_words(handle.read().decode(errors="replace"))


@contextlib.contextmanager
def running(flags: Sequence[str], log: Path, start_s: float) -> Iterator[Server]:
    """A server until the block ends.

    Args:
        flags: of ``python -m sglang.launch_server``, the model among them.
        log: file that what it prints is added to.
        start_s: seconds that it may take to be ready.

    Raises:
        EndpointError: it ended, or was not ready in time; says what it printed last.
    """
    port = _free_port()
    words = [sys.executable, "-m", "sglang.launch_server", "--host", HOST, "--port", str(port), *flags]
    process, before = None, log.stat().st_size if log.exists() else 0
    try:
        with log.open("ab") as handle:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=handle, stderr=subprocess.STDOUT, start_new_session=True
            )
        server = Server(f"http://{HOST}:{port}", process, log, before)
        _wait(server, start_s)
        yield server
    finally:
        if process is not None:
            _end(process)


def _wait(server: Server, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise EndpointError(server.last_words())
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
    """By its own handlers if they do, else without; returns when none of its processes is left."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        for how in (signal.SIGTERM, signal.SIGKILL):
            is_there, deadline = _signal(process.pid, how), time.monotonic() + PATIENCE_S
            while is_there and time.monotonic() < deadline:
                process.poll()  # the launcher stays in its group until it is asked for
                time.sleep(POLL_S)
                is_there = _signal(process.pid, 0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _signal(group: int, number: int) -> bool:
    """Whether a process of the group was there to be sent it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _last_words(text: str) -> str:
    """The refusal of the plugin, else the last line that is an error, else the last ones."""
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
