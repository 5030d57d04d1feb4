"""Progress on a real pseudo-terminal and in a pipe: a bar on the one, plain lines in the other, nothing on stdout."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import TYPE_CHECKING

from kvtuner.progress import bar as progress_bar
from kvtuner.progress.bar import ProgressBar

if TYPE_CHECKING:
    import pytest

LOOP = "from kvtuner.progress.bar import ProgressBar\nfor _ in ProgressBar(range(2), desc='work'): pass"


def test_a_loop_writes_a_line_whenever_the_interval_is_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "LINE_INTERVAL_S", 0.0)
    assert list(ProgressBar(["a", "b"], desc="work")) == ["a", "b"]
    out, err = capsys.readouterr()
    assert out == "" and "\r" not in err
    lines = err.splitlines()
    assert all(line.startswith("work: ") and line.endswith(" left") for line in lines)
    assert lines[-1].startswith("work: 2 of 2 (100 %), about ")


def test_a_loop_in_a_pipe_that_is_over_soon_writes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_loop_on_a_terminal_has_a_bar_with_the_time_left() -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    done = subprocess.run([sys.executable, "-c", LOOP], stdout=subprocess.PIPE, stderr=slave, check=True)
    os.close(slave)
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert done.stdout == b""
    assert "\rwork: 100%" in shown and "2/2 [00:00<00:00" in shown
