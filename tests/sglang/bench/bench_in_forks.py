"""Run by test_bench.py: `python bench_in_forks.py SOCKET FLAG...`, a `kvtuner bench` whose servers are forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2] / "fixtures"))
from fork_server import start_fork

from kvtuner.bench import server
from kvtuner.cli import main

if TYPE_CHECKING:
    from fork_server import ForkedProcess


def start(command: list[str], *, stdout: Any, **_: object) -> ForkedProcess:
    log = Path(stdout.name)
    return start_fork(Path(sys.argv[1]), command, os.environ, log, log)


if __name__ == "__main__":
    server.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    sys.exit(main(["bench", *sys.argv[2:]]))
