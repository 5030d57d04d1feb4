"""What a person sees while a command works: a line before heavy imports, and how far the whole search is."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

WATCHED = """
import sys
class Watcher:
    def find_spec(self, name, *_):
        if name in ("torch", "transformers", "scipy", "matplotlib"):
            sys.stderr.write(f"<{name}>")
sys.meta_path.insert(0, Watcher())
from kvtuner.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", [
    ("search", "--model", "absent/model", "--budget", "3bit"),
    ("calibrate", "--model", "absent/model"),
    ("eval", "absent.json"),
    ("bench", "absent.json"),
])  # fmt: skip
def test_the_first_line_comes_before_heavy_imports(command: tuple[str, ...], tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *command], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("loading libraries ...\n<")


def test_a_search_on_a_terminal_shows_the_forward_passes_of_the_whole_search(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    flags = ("--sequence-length", "64", "--sequences", "2,2,2", "--trials", "4", "--no-report", "--json")
    command = [sys.executable, "-m", "kvtuner", "search", "--model", "demo", "--budget", "3bit", *flags]
    with subprocess.Popen([*command, "--out", tmp_path], stdout=subprocess.PIPE, stderr=slave) as process:
        os.close(slave)
        shown: list[bytes] = []

        def read() -> None:
            try:
                while data := os.read(master, 65536):
                    shown.append(data)
            except OSError:  # Linux's end of a terminal that nobody holds open
                return

        reader = threading.Thread(target=read)
        reader.start()
        assert process.stdout is not None
        result = json.loads(process.stdout.read())
        reader.join()
    os.close(master)
    text = b"".join(shown).decode()
    assert process.returncode == 0 and result["digest"].startswith("sha256:")
    assert text.startswith("loading libraries ...\r\nloading the model ...")
    assert "\rforward passes:" in text and "\rrefine 3bit:" in text
