"""The section of `make gpu` that serves: on a processor with real servers, and what it says of servers that fail."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu as gpu_command  # noqa: E402
from serving_parts import served_demo  # noqa: E402

from kvtuner.errors import EndpointError  # noqa: E402
from kvtuner.exported_configs.profile.load import load_profile  # noqa: E402

SKIPPED = ["default flags: graphs captured and replayed", "hierarchical cache: pages back from pinned memory"]


@pytest.mark.full
@pytest.mark.sglang
def test_both_servers_agree_with_transformers_on_a_processor(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--smoke", "--only", "server", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=1200, env=variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = json.loads((tmp_path / "results.json").read_text())["server"]
    assert [row["case"] for row in rows if row["passed"] is None] == SKIPPED
    compared = [row for row in rows if row["passed"] is not None]
    assert len(compared) == len(served_demo.SINGLE) + 1 + 3 and all(row["passed"] for row in compared)
    # The larger ones differ from the unquantized model by far more than from the host.
    assert all(row["error"] < 0.01 * row["own"] for row in compared if row["own"] > 1e-3)
    text = (tmp_path / "results.md").read_text()
    assert f"Servers beside transformers: {len(compared)} of {len(rows)} checks" in text
    assert f"- {SKIPPED[0]}: not checked, skipped, as a processor has none" in text
    assert "ready to roll" in (tmp_path / "servers" / "default-flags.log").read_text()


def test_a_server_that_does_not_start_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Any:
        raise EndpointError("kvtuner: no kernel for this")

    monkeypatch.setattr(served_demo, "run_server", refuses)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    before = os.environ.get("PYTHONPATH")
    rows = list(served_demo.run(tmp_path, on_gpu=True))
    assert [row["case"] for row in rows] == ["default flags: serves", "hierarchical cache: serves"]
    assert all(row["passed"] is False and "no kernel for this" in row["why"] for row in rows)
    assert os.environ.get("PYTHONPATH") == before


def test_without_a_window_layers_and_grids_are_the_same() -> None:
    searched = load_profile(served_demo.PROFILE)
    plain = served_demo.without_window(searched)
    assert searched.window.num_tokens == 32 and not plain.window.num_tokens
    assert plain.pairs == searched.pairs
    for layer in range(len(plain.pairs)):
        for side in ("k", "v"):
            one, other = (profile.quant_spec(layer, side) for profile in (plain, searched))  # type: ignore[arg-type]
            assert str(one) == str(other)


@pytest.mark.parametrize(("captured", "replayed"), [(True, 3.0), (True, 0.0), (False, 3.0)])
def test_graphs_must_be_captured_and_replayed(captured: bool, replayed: float) -> None:
    served: Any = SimpleNamespace(
        name="default flags",
        counted=lambda metric, **labels: replayed if labels == {"mode": "decode_cuda_graph"} else 9.0,
        log=lambda: f"{served_demo.CAPTURED}. bs=[1]" if captured else "",
    )
    row = served_demo._graphs(served)
    assert row["passed"] == (captured and replayed > 0)
    assert bool(row.get("why")) != row["passed"]


OUTCOMES = [({"passed": False}, 1), ({"passed": None}, gpu_command.LEFT_OUT), ({"passed": None, "no_gpu": True}, 0)]


@pytest.mark.parametrize(("outcome", "status"), [*OUTCOMES, ({"passed": True}, 0)])
def test_the_exit_status_tells_of_servers(
    outcome: dict[str, Any], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"case": "default flags: serves", "error": 0.0, "limit": 0.0, **outcome}
    monkeypatch.setattr(served_demo, "run", lambda folder, on_gpu: iter([row]))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--smoke", "--only", "server", "--out", str(tmp_path)])
    assert gpu_command.main() == status


def test_without_sglang_servers_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sglang" else find_spec(name))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--smoke", "--only", "server", "--out", str(tmp_path)])
    assert gpu_command.main() == gpu_command.LEFT_OUT
    left_out = json.loads((tmp_path / "results.json").read_text())["left_out"]
    assert left_out == ["the rest of server: EndpointError: SGLang is not installed"]
