"""The benchmark of the local engine, small: every figure is there, and the committed page is that of its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "benchmarks"))

import engine as engine_benchmark  # noqa: E402

PARTS = {"in_process", "decoding", "hits", "own_cost"}


@pytest.mark.full
def test_a_small_run_has_every_figure(tmp_path: Path) -> None:
    files = {name: tmp_path / f"engine.{name}" for name in ("json", "markdown", "picture")}
    command = [
        sys.executable, str(ROOT / "benchmarks" / "engine.py"), "--models", "demo", "--requests", "2", "--mixed", "2",
        "--contexts", "64", "--growth", "1", "2", "--rounds", "1", "--no-sglang",
        *(word for name, file in files.items() for word in (f"--{name}", str(file))),
    ]  # fmt: skip
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(files["json"].read_text())["models"]["demo"]
    assert found.keys() == {"parameters", "lengths", "memory", *PARTS}
    assert all(0 < row["loaded"] < row["peak"] for row in found["memory"].values())
    equal, mixed = found["in_process"].values()
    assert equal.keys() == {"engine", "engine, K4V4", "generate"}
    assert mixed.keys() == {*equal, "continuous batching"}
    assert equal["engine, K4V4"]["kv_bytes"] < equal["engine"]["kv_bytes"] == equal["generate"]["kv_bytes"]
    assert found["own_cost"].keys() == {"1", "2"}
    assert "| 2 equal | tokens/s |" in files["markdown"].read_text()
    ElementTree.parse(files["picture"])


def test_the_committed_page_is_that_of_its_figures() -> None:
    results = json.loads((RESULTS / "engine-cpu.json").read_text())
    assert (RESULTS / "engine-cpu.md").read_text() == engine_benchmark.page(results)
    assert results["models"].keys() == {"demo", "25M", "100M"}
    assert all({"in_process", "http"} <= found.keys() for found in results["models"].values())
    assert results["models"]["demo"].keys() > PARTS
    ElementTree.parse(RESULTS / "engine-cpu.svg")
