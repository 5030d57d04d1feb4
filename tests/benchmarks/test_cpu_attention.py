"""The benchmark of attention on a processor times what is right, and refuses what it cannot time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "cpu_attention.py"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_run_has_every_implementation_in_its_tables_medians_and_picture(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("page.md", "medians.json", "growth.svg")}
    paths = ["--markdown", files["page.md"], "--json", files["medians.json"], "--picture", files["growth.svg"]]
    done = run("--tokens", "128", "256", "--batch", "1", "2", "--most-tokens", "256", "--rounds", "1", *paths)
    assert done.returncode == 0, done.stderr
    medians = json.loads(files["medians.json"].read_text())["medians"]
    cases = {(row["case"]["batch"], row["case"]["tokens"]) for row in medians}
    assert cases == {(1, 128), (1, 256), (2, 128)}
    names = {row["name"] for row in medians}
    assert {"torch blockwise K4V4", "SDPA bf16 (gqa)", "generic, float32, K4V4", "read bandwidth"} <= names
    page = files["page.md"].read_text()
    assert all(f"| {name} |" in page for name in names) and "### 2 x 128 tokens, 1 thread\n" in page
    picture = files["growth.svg"].read_text()
    assert all(name in picture for name in names - {"read bandwidth"}) and "read bandwidth" not in picture


@pytest.mark.slow
def test_passive_waiting_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "medians.json"
    options = ["--tokens", "128", "--threads", "1", "2", "--rounds", "1", "--waiting", "default", "passive"]
    done = run(*options, "--json", path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["medians"]
    cases = {(row["case"]["threads"], row["case"]["waiting"]) for row in rows}
    assert cases == {(1, "default"), (2, "default"), (2, "passive")}
    assert "128 tokens, 2 threads, OMP_WAIT_POLICY=passive" in done.stdout


def test_a_folder_without_sources_of_ggml_is_refused(tmp_path: Path) -> None:
    done = run("--ggml", tmp_path)
    assert done.returncode == 1 and "has no include/ggml.h" in done.stderr


def test_an_output_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PROGRAM.parent)
    from cpu_parts.step import Requests, check_output, random_states

    torch.manual_seed(0)
    states = random_states(Requests(1, 2, 64))
    q = torch.randn(2, 32, 128)
    weights = torch.softmax(torch.einsum("bhgd,bthd->bhgt", q.view(2, 8, 4, 128), states) * 128**-0.5, -1)
    output = torch.einsum("bhgt,bthd->bhgd", weights, states).flatten(1, 2)
    check_output("it", output, q, states, states, 1e-5)
    with pytest.raises(SystemExit, match="it is off by"):
        check_output("it", output.roll(1, 1), q, states, states, 0.5)


@pytest.mark.slow
def test_onnx_runtime_is_compared_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    monkeypatch.syspath_prepend(PROGRAM.parent)
    from cpu_parts import onnx_attention
    from cpu_parts.step import Requests

    found, refused = onnx_attention.onnx_steppers(Requests(1, 2, 64))
    assert len(found) + len(refused) == len(onnx_attention.WIDTHS) and "ONNX Runtime float32" in found
    monkeypatch.setattr(onnx_attention, "TOLERANCE", 0.0)
    with pytest.raises(SystemExit, match="ONNX Runtime float32 is off by"):
        onnx_attention.onnx_steppers(Requests(1, 2, 64))
