"""The command for machines with a GPU, as far as it goes without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from interpreted_kernels import replace_language_once

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
pytestmark = pytest.mark.slow

import gpu as gpu_command  # noqa: E402
from gpu_parts import correct, results_page, speed  # noqa: E402
from gpu_parts.checks import oracle  # noqa: E402
from gpu_parts.machine import Machine  # noqa: E402
from gpu_parts.pools import HeadShape  # noqa: E402

from kvtuner.precision import PrecisionPair  # noqa: E402

SECTIONS = ("correct", "server", "decode", "model", "prefill", "stores", "pages", "extends", "sweep")


def gpu(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *flags]
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=variables)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in Triton's interpreter, by -inf and 0
# Servers have a test of their own, tests/benchmarks/serving_parts/test_served_demo.py.
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(("correct", "decode", "stores", "sweep"), id="some"),
        pytest.param(tuple(name for name in SECTIONS if name != "server"), id="all", marks=pytest.mark.full),
    ],
)
def test_a_smoke_run_checks_and_times_everything(
    sections: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_language_once()
    flags = ("--smoke", "--only", *sections, "--sweep", "K4V4", "--out", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpu.py", *flags])
    assert gpu_command.main() == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert all(results[name] for name in sections)
    operations = {"store", "read", "decode", "extend", "prefill", "graph", "prefix"}
    assert {row["case"].split()[0] for row in results["correct"]} == operations
    assert all(row["passed"] for row in results["correct"])
    for name in sections[1:]:
        assert all(row["seconds"] > 0 for row in results[name]), name
    assert "no time here means anything" in (tmp_path / "results.md").read_text()


def test_a_run_out_of_time_says_what_it_left_out(tmp_path: Path) -> None:
    done = gpu("--smoke", "--limit-s", "0", "--out", str(tmp_path))
    assert done.returncode == gpu_command.LEFT_OUT
    assert "left out: correct, for want of time; server, for want of time; decode, for want of time" in done.stderr
    assert json.loads((tmp_path / "results.json").read_text())["left_out"][0] == "correct, for want of time"
    text = (tmp_path / "results.md").read_text()
    assert "Left out: correct, for want of time" in text
    assert "Correct: **not checked**" in text


def test_a_section_that_breaks_keeps_its_rows_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Machine) -> Iterator[dict[str, object]]:
        yield {"pair": "K4V4", "batch": 1, "length": 1, "page_size": 16, "seconds": 1.0}
        raise ValueError("a fault put in")

    monkeypatch.setattr(speed, "stores", lambda _: iter(()))
    monkeypatch.setattr(speed, "pages", broken)
    monkeypatch.setattr(
        speed, "extends", lambda _: iter([{"pair": "K4V4", "prefix": 1, "tokens": 1, "way": "kernel", "seconds": 1.0}])
    )
    monkeypatch.setattr(
        sys, "argv", ["gpu.py", "--smoke", "--only", "pages", "stores", "extends", "--out", str(tmp_path)]
    )
    assert gpu_command.main() == gpu_command.LEFT_OUT
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["pages"]) == len(results["extends"]) == 1
    assert results["left_out"] == ["the rest of pages: ValueError: a fault put in"]


@pytest.mark.parametrize(("status", "programs"), [(0, 2), (gpu_command.LEFT_OUT, 2), (1, 1), (2, 1)])
def test_what_is_left_out_does_not_stop_make_gpu_but_what_is_wrong_does(
    status: int, programs: int, tmp_path: Path
) -> None:
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(f'#!/bin/sh\necho "$1" >> {calls}\ncase $1 in */gpu.py) exit {status};; esac\n')
    python.chmod(0o755)
    done = subprocess.run(["make", "gpu", f"PYTHON={python}"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode == 0) == (programs == 2), done.stderr
    assert calls.read_text().split() == ["benchmarks/gpu.py", "benchmarks/hicache.py"][:programs]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_names_the_way_out() -> None:
    done = gpu()
    assert done.returncode == 2
    assert "--smoke" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_kernel_is_right_on_a_gpu(tmp_path: Path) -> None:
    done = gpu("--only", "correct", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_an_error_is_that_of_the_worst_head() -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(4, 2, 64, generator=generator).double()
    wanted[0] *= 1000  # a request whose size hides the others'
    found = wanted.clone()
    assert oracle.error_of(found, wanted) == 0
    found[3, 1] *= 1.02
    assert oracle.error_of(found, wanted) == pytest.approx(0.02)
    found[2, 0, 0] = torch.nan
    assert not oracle.error_of(found, wanted) <= 1e9


def test_a_case_that_fails_or_cannot_run_is_said_and_the_others_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, shape = PrecisionPair(4, 8), HeadShape("", 1, 2, 64)
    good = correct.Case("decode", pair, shape, lengths=(20, 1))
    impossible = correct.Case("decode", pair, HeadShape("", 1, 2, 6), lengths=(20, 1))
    monkeypatch.setattr(correct, "cases", lambda smoke: [impossible, good])
    monkeypatch.setattr(correct, "latent_cases", lambda smoke: [])
    bad, fine = correct.run(Machine(torch.device("cpu"), torch.float16))
    assert fine["passed"]
    assert not bad["passed"]
    assert "Error" in bad["why"]
    machine = {"device": "smoke"}
    results = {"machine": machine, "command": "", "time": "", "seconds": 1.0, "sglang_missing": "", "left_out": []}
    empty = {name: [] for name in SECTIONS} | {"correct": [bad, fine], "copy_bytes_per_s": 1.0}
    text = "\n".join(results_page.lines({**results, **empty}))
    assert "Correct: 1 of 2 cases" in text
    assert "**A kernel is wrong: no time below means anything.**" in text
    assert bad["why"] in text


def test_ratios_are_to_the_fastest_bf16_that_ran() -> None:
    place = {"shape": "Llama-3.1-8B", "batch": 32, "length": 16384, "kind": "none", "bytes": 4e6}
    rows = [
        {**place, "pair": "K16V16", "kernel": "torch flash", "seconds": 5e-4},
        {**place, "pair": "K16V16", "kernel": "ours", "seconds": 6e-4},
        {**place, "pair": "K16V16", "kernel": "torch cudnn", "seconds": None, "why": "no such kernel"},
        {**place, "pair": "K4V4", "kernel": "ours", "seconds": 2e-4},
        {**place, "pair": "K8V8", "kernel": "ours", "seconds": 4e-4},
        {**place, "pair": "K4V4", "kernel": "dequantize then dot", "seconds": 1e-3},
    ]
    line = list(results_page._decode(rows, 1e12))[-1]
    assert "500.0 us, torch flash" in line
    assert "2.50x, met: 2.5x (0.02 TB/s, 2%)" in line
    assert "1.25x, MISSED: 1.7x" in line
    assert "0.50x (0.00 TB/s" in line
    assert "torch cudnn (no such kernel)" in line
    short = [{**row, "length": 1024, "seconds": row["seconds"]} for row in rows]
    assert "1.25x, met: 0.95x" in list(results_page._decode(short, 1e12))[-1]
