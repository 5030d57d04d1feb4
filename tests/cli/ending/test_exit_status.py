"""What a command ends with where nobody reads it, and where it is interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from kvtuner.cli import main
from kvtuner.cli.command import Command
from kvtuner.cli.parser import COMMANDS

if TYPE_CHECKING:
    from argparse import Namespace

ROOT = Path(__file__).resolve().parents[3]
RESUMED = {"search", "calibrate", "eval", "bench"}
# Less than a buffer is written at the end, and more than one passes it by.
PROGRAM = """
import sys
from kvtuner.cli import main, parser
from kvtuner.cli.command import Command

def run(args):
    print("x" * {length}, file=sys.{stream})
    return 0

parser.COMMANDS["list"] = Command("list", "", lambda _: None, run)
sys.exit(main(["list"]))
"""


@pytest.mark.parametrize("length", [10, 1 << 20])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_command_that_nobody_reads_ends_early_as_by_a_signal(length: int, stream: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    # Python writes what it cannot write at the end to stderr, and takes another status.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(length=length, stream=stream)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        **{**dict.fromkeys(("stdout", "stderr"), subprocess.PIPE), stream: writer},
    )
    os.close(writer)
    assert done.returncode == 141
    assert not done.stdout and not done.stderr


def replaced(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    """Have a command end by an error as soon as it runs."""

    def run(_: Namespace) -> NoReturn:
        raise error

    resumes = COMMANDS[name].resumes
    monkeypatch.setitem(COMMANDS, name, Command(name, "", lambda _: None, run, resumes=resumes))


def test_a_pipe_that_breaks_elsewhere_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker's pipe, or the connection to a server."""
    replaced(monkeypatch, "list", BrokenPipeError(32, "Broken pipe"))
    with pytest.raises(BrokenPipeError):
        main(["list"])
    sys.stdout.write("stdout is still there\n")
    assert capfd.readouterr().out == "stdout is still there\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupted_command_says_that_it_resumes_where_it_does(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replaced(monkeypatch, name, KeyboardInterrupt())
    monkeypatch.setattr("kvtuner.cli.parser._MODEL_EXAMPLES", {})
    assert main([name]) == 130
    error = capsys.readouterr().err
    assert f"kvtuner {name}: interrupted" in error
    assert ("run the same command again to resume" in error) == (name in RESUMED)
