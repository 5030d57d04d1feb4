"""The benchmark of the host tier, small: every tier is checked, and one that is wrong is not timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
pytestmark = pytest.mark.slow

import hicache  # noqa: E402
from gpu_parts.pools import ALL_TRANSFORMS  # noqa: E402

from kvtuner.precision import PrecisionPair  # noqa: E402
from kvtuner.runtime_loader.host_tier.transfer import TorchMover  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

PAIR = PrecisionPair.parse("K8V4")


@pytest.mark.sglang
def test_every_tier_is_checked_and_timed_beside_sglangs(tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    command = [sys.executable, str(ROOT / "benchmarks" / "hicache.py")]
    flags = ["--tokens", "32", "--page-size", "16", "--repeats", "1", "--json", str(tmp_path / "results.json")]
    variables = os.environ | {"PYTHONPATH": f"{ROOT / 'examples' / 'sglang_on_cpu'}:{ROOT}"}
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=500, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    stock, *tiers = json.loads((tmp_path / "results.json").read_text())["transfers"]
    assert stock["way"].startswith("SGLang")
    assert len(tiers) == 3 * len(hicache.PAIRS)
    assert all(row["bytes_ratio"] < 1 and row["backup_ms"] > 0 < row["load_ms"] for row in tiers)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("direction", ["backup", "load"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_tier_that_moves_a_wrong_byte_is_refused(
    packed: bool, direction: str, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, load = TorchMover.backup, TorchMover.load
    last = hicache.LAYERS - 1

    def wrong_backup(self: TorchMover, host_slots: Tensor, device_slots: Tensor) -> None:
        backup(self, host_slots, device_slots)
        self._pages.rows(last, side)[0, 0, 0] ^= 1

    def wrong_load(self: TorchMover, layer: int, host_slots: Tensor, device_slots: Tensor) -> None:
        load(self, layer, host_slots, device_slots)
        if layer == last:
            self._layers[layer][side].raw[0, 0] ^= 1

    monkeypatch.setattr(TorchMover, direction, {"backup": wrong_backup, "load": wrong_load}[direction])
    with pytest.raises(SystemExit, match=f"layer {last} is not"):
        hicache.ours(torch.device("cpu"), 16, 16, PAIR, ALL_TRANSFORMS, packed=packed)
