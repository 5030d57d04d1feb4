"""The process that forks SGLang's programs: whatever hangs is named in time, and nothing outlives its starter."""

from __future__ import annotations

import socket
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

import fork_server
import psutil
import pytest
from fork_server import ForkServer, start_fork
from sglang_server import environment

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import RunProgram
    from sglang_server import Programs

PROGRAM = """
import subprocess, time
subprocess.Popen(["sleep", "600"])
print("started", flush=True)
time.sleep(600)
"""

FAMILY = """
import multiprocessing, sys
def say(generation):
    print(generation, "sglang.srt.managers.scheduler" in sys.modules, flush=True)
    if generation < 2:
        child = multiprocessing.get_context("spawn").Process(target=say, args=(generation + 1,))
        child.start()
        child.join()
if __name__ == "__main__":
    say(0)
"""


def test_a_program_ends_with_all_that_it_started_once_its_starter_is_gone(programs: Programs, tmp_path: Path) -> None:
    if not programs.forks.is_used:
        pytest.skip("nothing is forked")
    output = tmp_path / "output"
    output.touch()
    process = start_fork(programs.forks.address, [sys.executable, "-c", PROGRAM], environment(), output, output)
    deadline = time.monotonic() + 60
    while "started" not in output.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    program = psutil.Process(process.pid)
    family = [program, *program.children(recursive=True)]
    assert any(member.name() == "sleep" for member in family)
    process.close()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


def test_children_of_children_have_all_imports_from_the_start(
    programs: Programs, run_program: RunProgram, tmp_path: Path
) -> None:
    if not programs.forks.is_used:
        pytest.skip("nothing is forked")
    program = tmp_path / "family.py"
    program.write_text(FAMILY)
    done = run_program(str(program))
    assert done.stdout.splitlines() == [f"{generation} True" for generation in range(3)], done.stderr[-2000:]


def test_programs_run_the_sglang_that_tests_found(run_program: RunProgram) -> None:
    where = "from importlib.metadata import version; import sglang; print(version('sglang'), sglang.__file__)"
    done = run_program("-c", where)
    assert done.stdout.split() == [version("sglang"), find_spec("sglang").origin]


def test_imports_that_take_too_long_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "IMPORT_S", 0.01)
    with pytest.raises(RuntimeError, match="SGLang was not imported"):
        _ = ForkServer(tmp_path, environment()).address


def test_a_fork_that_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "FORK_S", 0.1)
    address, output = tmp_path / "socket", tmp_path / "output"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        with pytest.raises(RuntimeError, match="no fork within"):
            start_fork(address, [sys.executable, "-c", ""], {}, output, output)
