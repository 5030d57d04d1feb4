"""The most memory that processes had, and a program that answers a load by one answerer alone.

PYTHONPATH=benchmarks python -m serving_parts.peak_memory demo FOLDER 'engine, K4V4' 16
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
MIB: Final = 2.0**20
SETTLE_S: Final = 1.0


def peak_bytes(pid: int | str = "self") -> int:
    """The most resident bytes that a process had; 0 once it is gone."""
    return _status(pid, "VmHWM")


def resident_bytes(pid: int | str = "self") -> int:
    """The resident bytes of a process now."""
    return _status(pid, "VmRSS")


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that these did."""
    children: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found, left = list[int](), [pid]
    while left:
        started = children.get(left.pop(), [])
        found += started
        left += started
    return found


def peak_of_children() -> int:
    """The sum of the most resident bytes of all processes that this one started, pages that they share included."""
    time.sleep(SETTLE_S)
    return sum(peak_bytes(pid) for pid in descendants(os.getpid()))


def peak_of_answerer(model: str, folder: Path, answerer: str, count: int) -> dict[str, float]:
    """MiB of a process that answers requests by one answerer: before it answered, and at its peak."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "serving_parts.peak_memory", model, str(folder), answerer, str(count)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> None:
    """Load a model, answer requests by the answerer that is named, and print the MiB."""
    from serving_parts.subject import LENGTHS, Subject, random_prompt

    model, folder, answerer, count = sys.argv[1:]
    subject, rng = Subject(model, Path(folder)), random.Random(0)
    num_prompt, num_answer = LENGTHS[model]
    asked = [(random_prompt(rng, num_prompt), num_answer) for _ in range(int(count))]
    answer = subject.answerers(int(count), continuous=True)[answerer]
    loaded = resident_bytes()
    answer(asked)
    print(json.dumps({"loaded": loaded / MIB, "peak": peak_bytes() / MIB}))


def _status(pid: int | str, field: str) -> int:
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    kib = next((line.split()[1] for line in lines if line.startswith(f"{field}:")), "0")
    return 1024 * int(kib)


if __name__ == "__main__":
    main()
