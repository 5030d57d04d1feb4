"""What the kernel of latents takes by machine code: a channel is read once, as key and as value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtuner.errors import ServingError
from kvtuner.precision import PACKED_BITS
from kvtuner.runtime_loader.kernels.latents.launch_latents import latent_launch

ROOT = Path(__file__).resolve().parents[4]
# Lane instructions that a channel takes by width, those of docs/kernels.md rounded up.
MOST = {2: 3.95, 3: 4.2, 4: 4.3, 8: 4.0}


def counted(*flags: str) -> list[dict[str, Any]]:
    """What benchmarks/sass.py counts, without the interpreter."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH")]))
    command = [sys.executable, str(ROOT / "benchmarks/sass.py"), *flags, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env={**variables, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["90", *(pytest.param(arch, marks=pytest.mark.full) for arch in ("80", "89", "120"))])
def test_a_channel_takes_little_more_than_one_of_keys_and_one_of_values_at_most(arch: str) -> None:
    rows = counted("--gqa", "16", "--latents", "--arch", arch)
    assert [row["bits"] for row in rows] == list(PACKED_BITS)
    for row in rows:
        assert row["lane_instructions_per_element"] <= min(row["as_key_and_as_value"], MOST[row["bits"]]), row
        assert row["windowed_per_element"] <= 1.1 * row["lane_instructions_per_element"], row
        assert row["buffers"] >= (2 if row["bits"] < 8 or arch in ("80", "90") else 1), row
        is_wide = row["bits"] == 8 and arch == "90"
        assert row["loop_spills"] <= (90 if is_wide else 0), row
        assert row["windowed_loop_spills"] <= (95 if is_wide else 35), row
        assert row["int_to_float"] == 0, row


@pytest.mark.slow
def test_settings_of_a_launch_can_be_given_to_count_others() -> None:
    rows = counted("--gqa", "16", "--latents", "--tokens", "64", "--warps", "4", "--stages", "2")
    settings = [[row["launch_row"][name] for name in ("tokens", "warps", "stages")] for row in rows]
    assert settings == [[64, 4, 2]] * 4
    assert [row["buffers"] for row in rows] == [1] * 4


@pytest.mark.full
@pytest.mark.parametrize("arch", ["80", "90"])
def test_rows_of_512_channels_are_written_and_read_back_in_registers(arch: str) -> None:
    rows = counted("--rows", "--head-dim", "512", "--kv-heads", "1", "--group-size", "256", "--arch", arch)
    assert {row["kernel"] for row in rows} == {"store_rows", "read_side"}
    assert [row for row in rows if row["spills"]] == []


def test_an_architecture_whose_machine_code_was_not_counted_is_refused() -> None:
    with pytest.raises(ServingError, match="has no settings for sm_100, only for sm_80, "):
        latent_launch("sm_100", 4)
