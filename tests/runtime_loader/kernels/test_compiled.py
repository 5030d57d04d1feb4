"""Machine code of the kernels for GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.slow


def run(*command: str) -> Any:
    """What a program prints that compiles, and so does not interpret."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=500, env={**variables, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "options",
    [("--arch", "80", "89", "90", "100"), ("--kv-heads", "4", "2", "1")],
    ids=["architectures", "row strides"],
)
def test_the_decode_loop_is_short_converts_nothing_and_copies_codes_by_sixteen_bytes(options: tuple[str, ...]) -> None:
    rows = run(str(ROOT / "benchmarks" / "sass.py"), *options, "--without-baseline", "--json")
    assert len(rows) == 5 * (len(options) - 1)
    for row in rows:
        assert row["lane_instructions_per_element"] <= 2.9, row
        assert row["int_to_float"] == row["spills"] == 0, row
        code_bytes = row["launch_row"]["tokens"] * row["head_dim"] * (row["k_bits"] + row["v_bits"]) // 8
        assert row["async_copies_16B"] == code_bytes // (16 * 32 * row["launch_row"]["warps"]), row


def test_the_count_sees_what_a_baseline_wastes() -> None:
    ours, *baselines = run(str(ROOT / "benchmarks" / "sass.py"), "--pairs", "K4V4", "--json")
    assert [row["baseline"] for row in (ours, *baselines)] == [False, True, True]
    for baseline in baselines:
        assert baseline["int_to_float"] > 0
        assert baseline["lane_instructions_per_element"] > 3 * ours["lane_instructions_per_element"]


def test_the_store_kernel_is_not_contracted_and_other_vendors_have_a_kernel() -> None:
    found = run(str(Path(__file__).with_name("compile_program.py")))
    for instructions in found["store"]:
        assert not [name for name in instructions if name.startswith(("fma", "div.full", "div.approx", "rcp"))]
        assert instructions["div.rn.f32"] > 0
    assert found["amd"] == [True] * 2
