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
SERVER_POLL_S: Final = 0.5
SHUTDOWN_TIMEOUT_S: Final = 20
"""The time that a server has to end by itself."""
LOG_LINES: Final = 3
HEALTH_TIMEOUT_S: Final = 60  # the first health request may compile kernels
TERMINATION_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REFUSED_FLAGS: Final = {
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
    "--kvtuner-strict": "what differs is said; kvtuner validate --strict refuses it",
    "--api-key": "servers that are started here need none",
    "--admin-api-key": "servers that are started here need none",
}
"""The flags that may not stand in ``--server-args``, each with the place that they have or the reason."""


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """Flags of ``sglang.launch_server`` that all servers get, as the arguments of a command line."""

    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> ServerFlags:
        """Read them as a shell does; `EndpointError` for quotes that do not close and for a flag of `REFUSED_FLAGS`."""
        try:
            arguments = tuple(shlex.split(text))
        except ValueError as error:
            raise EndpointError(f"--server-args {text!r} cannot be read: {error}") from error
        for argument in arguments:
            flag = argument.partition("=")[0]
            if flag in REFUSED_FLAGS:
                raise EndpointError(f"{flag} cannot stand in --server-args: {REFUSED_FLAGS[flag]}")
        return cls(arguments)

    def value(self, flag: str) -> str | None:
        """The value of a flag, in either spelling; None without it."""
        for index, argument in enumerate(self.arguments):
            name, equals, value = argument.partition("=")
            if name == flag:
                return value if equals else next(iter(self.arguments[index + 1 :]), None)
        return None

    def shareable(self) -> list[str]:
        """The arguments with the last parts of paths only."""
        return [_without_folders(argument) for argument in self.arguments]


def _without_folders(argument: str) -> str:
    flag, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
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
def run_server(flags: Sequence[str], log: Path, start_s: float) -> Iterator[ServerProcess]:
    """A server until the block ends, started by flags that name its model; its output is added to the log.

    Raises:
        EndpointError: It ended, or was not ready in time; the message is what it printed last.
    """
    port = _free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--host", HOST, "--port", str(port), *flags]
    log_start = log.stat().st_size if log.exists() else 0
    process = None
    try:
        with log.open("ab") as handle:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=handle, stderr=subprocess.STDOUT, start_new_session=True
            )
        server = ServerProcess(f"http://{HOST}:{port}", process, log, log_start)
        _wait_until_ready(server, start_s)
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


def _wait_until_ready(server: ServerProcess, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise EndpointError(server.log_tail())
        if _is_healthy(server.url):
            return
        time.sleep(SERVER_POLL_S)
    raise EndpointError(f"the server was not ready within {start_s:g} s; read its log, or give more --start-timeout")


def _is_healthy(url: str) -> bool:
    """Whether it generates: ``/health`` asks it to, once it says that it is ready."""
    try:
        with opener_of(url).open(f"{url}/health", timeout=HEALTH_TIMEOUT_S) as answer:
            return bool(answer.status == http.HTTPStatus.OK)
    except (http.client.HTTPException, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server by its own handlers, else without them; return when none of its processes is left."""
    # A Ctrl-C or a signal to this program in between would leave the server's processes behind.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION_SIGNALS)
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            is_there = _signal_group(process.pid, number)
            deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
            while is_there and time.monotonic() < deadline:
                process.poll()  # reaps the launcher: until then it counts as a member of its group
                time.sleep(SERVER_POLL_S)
                is_there = _signal_group(process.pid, 0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group, 0 for none; whether any process of it was there."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
