"""A real SGLang server: the flags that it may have, and its processes from its start here to its end."""

from __future__ import annotations

import contextlib
import http
import http.client
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Final

from kvtuner.errors import EndpointError
from kvtuner.evaluation.backends.endpoint import opener_of
from kvtuner.exported_configs.identity.model_identity import public_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOST: Final = "127.0.0.1"
PORTS: Final = range(12_000, 32_000)
"""Ports below those that systems hand out by themselves, which another program could take before the server does."""
POLL_S: Final = 0.5
PATIENCE_S: Final = 20
"""The time that a server has to end by itself."""
LOG_LINES: Final = 3
HEALTH_S: Final = 60
ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OURS: Final = {
    "--host": "servers listen on this machine alone",
    "--port": "a free one is taken",
    "--model-path": "give --model",
    "--model": "give it outside of --server-args",
    "--revision": "give it outside of --server-args",
    "--context-length": "give it outside of --server-args",
    "--max-total-tokens": "give --kv-memory, which is the same bytes for every scheme",
    "--kv-cache-dtype": "fp8 is a scheme of its own",
    "--kvtuner-profile": "every scheme has its own",
    "--enable-kvtuner-quant": "every scheme has its own",
    "--kvtuner-allow-derived": "the profile's server gets it where it needs it, and what differs is said",
    "--kvtuner-strict": "what differs is said; `kvtuner validate --strict` refuses it",
    "--api-key": "servers that are started here need none",
    "--admin-api-key": "servers that are started here need none",
}
"""Flags that have another place than ``--server-args``, and that place."""


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """Flags of ``sglang.launch_server`` that all servers get, as the words of a command line."""

    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> ServerFlags:
        """Read them as a shell does; `EndpointError` for quotes that do not close and for a flag of `OURS`."""
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise EndpointError(f"--server-args {text!r} cannot be read: {error}") from error
        for word in words:
            flag = word.partition("=")[0]
            if flag in OURS:
                raise EndpointError(f"{flag} cannot stand in --server-args: {OURS[flag]}")
        return cls(words)

    def value(self, flag: str) -> str | None:
        """The value of a flag, in either spelling; None without it."""
        for index, word in enumerate(self.words):
            name, equals, value = word.partition("=")
            if name == flag:
                return value if equals else next(iter(self.words[index + 1 :]), None)
        return None

    def shared(self) -> list[str]:
        """The words with the last parts of paths only."""
        return [_shared(word) for word in self.words]


def _shared(word: str) -> str:
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    if value.startswith(("/", ".", "~")):
        return f"{flag}{equals}{PurePath(value).name}"
    return f"{flag}{equals}{public_name(value) if '/' in value else value}"


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that was started here: its launcher, and its log, whose own part begins at the byte `log_start`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int

    def log_tail(self) -> str:
        """The reason why it ended: the plugin's refusal, else the last line that is an error, else the last lines."""
        text = self.log.read_bytes()[self.log_start :].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        refusals = [line for line in lines if line.startswith("kvtuner: ")]
        errors = [line for line in lines if "Error: " in line or line.startswith("error: ")]
        return (refusals or errors or ["; ".join(lines[-LOG_LINES:]) or "the server said nothing"])[-1][:500]


@contextlib.contextmanager
def running(flags: Sequence[str], log: Path, start_s: float) -> Iterator[ServerProcess]:
    """A server until the block ends, started by flags that name its model; its output is added to the log.

    Raises:
        EndpointError: It ended, or was not ready in time; the message is what it printed last.
    """
    port = _free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--host", HOST, "--port", str(port), *flags]
    process, log_start = None, log.stat().st_size if log.exists() else 0
    try:
        with log.open("ab") as handle:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=handle, stderr=subprocess.STDOUT, start_new_session=True
            )
        server = ServerProcess(f"http://{HOST}:{port}", process, log, log_start)
        _wait(server, start_s)
        yield server
    finally:
        if process is not None:
            _end(process)


def _free_port() -> int:
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((HOST, port))
            return port


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
    except (http.client.HTTPException, OSError):
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
