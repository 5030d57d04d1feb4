"""The command for machines with a GPU, as far as it goes without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.slow
SECTIONS = ("correct", "decode", "pages", "stores", "extends", "model", "sweep")


def gpu(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *flags]
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=variables)


def test_a_smoke_run_checks_and_times_everything(tmp_path: Path) -> None:
    done = gpu("--smoke", "--sweep", "K4V4", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert all(results[name] for name in SECTIONS)
    assert {row["case"].split()[0] for row in results["correct"]} == {"store", "read", "decode", "extend", "graph"}
    assert all(row["passed"] for row in results["correct"])
    for name in SECTIONS[1:]:
        assert all(row["seconds"] > 0 for row in results[name]), name
    assert "no time here means anything" in (tmp_path / "results.md").read_text()


def test_a_run_out_of_time_says_what_it_left_out(tmp_path: Path) -> None:
    assert gpu("--smoke", "--limit-s", "0", "--out", str(tmp_path)).returncode == 0
    left_out = json.loads((tmp_path / "results.json").read_text())["left_out"]
    assert left_out[0] == "correct"
    assert "Left out, for want of time" in (tmp_path / "results.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_names_the_way_out() -> None:
    done = gpu()
    assert done.returncode == 2
    assert "--smoke" in done.stderr
