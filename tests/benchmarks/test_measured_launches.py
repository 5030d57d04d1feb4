"""A sweep's winners go into the table, and nothing else changes."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_parts.flash_rivals import NAMES, by_flash, flash_kernel  # noqa: E402
from gpu_parts.machine import Machine  # noqa: E402
from gpu_parts.measured_launches import winners, with_winners, write_table  # noqa: E402
from gpu_parts.pools import TINY  # noqa: E402

TABLE = ROOT / "runtime_loader" / "kernels" / "launches.json"
A, B, C = ({"tokens": tokens, "warps": warps, "stages": 3} for tokens, warps in ((64, 1), (32, 1), (128, 4)))


def timed(launch: dict[str, int], batch: int, splits: int, seconds: float | None) -> dict[str, Any]:
    return {"pair": "K4V4", "launch": launch, "batch": batch, "length": 1, "splits": splits, "seconds": seconds}


def test_the_winner_is_fastest_over_all_loads_by_its_best_splits() -> None:
    rows = [timed(A, 1, 4, 2.0), timed(A, 1, 8, 1.0), timed(A, 8, 4, 4.0), timed(B, 1, 4, 3.0), timed(B, 8, 4, 1.0)]
    assert winners([*rows, timed(C, 1, 4, 0.1), timed(C, 8, 4, None)]) == {"K4V4": B}  # 3 * 1 is less than 1 * 4
    assert winners([timed(A, 1, 4, None)]) == {}


def test_rows_of_other_architectures_pairs_and_shapes_stay() -> None:
    table = json.loads(TABLE.read_text())
    changed = with_winners(table, "sm_90", {"K4V4": C}, "a GPU")

    def settings(content: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
        names = ("k_bits", "v_bits", "head_dim", "groups", "gqa")
        return {(arch, *(row[name] for name in names)): row for row in content["rows"] for arch in row["archs"]}

    before, after = settings(table), settings(changed)
    assert before.keys() == after.keys()
    different = {key for key, row in after.items() if row["launch"] != before[key]["launch"]}
    assert {key[:5] for key in different} == {("sm_90", 4, 4, 128, 1)}
    for key in different:
        assert {name: after[key]["launch"][name] for name in C} == C
        assert after[key]["launch"]["resident"] >= 1 and after[key]["wide"] == before[key]["wide"]
        assert after[key]["timed_on"] == "a GPU"
    # Settings that are in the table already leave it as it is.
    row = before["sm_90", 4, 4, 128, 1, 1]["launch"]
    assert with_winners(table, "sm_90", {"K4V4": row}, "a GPU")["rows"] == table["rows"]


def test_a_table_is_written_as_it_was(tmp_path: Path) -> None:
    write_table(tmp_path / "launches.json", json.loads(TABLE.read_text()))
    assert (tmp_path / "launches.json").read_text() == TABLE.read_text()


@pytest.mark.sglang
@pytest.mark.parametrize("name", NAMES)
def test_flash_attention_is_called_as_sglang_has_it(name: str) -> None:
    pytest.importorskip("sglang")
    machine, taken = Machine(torch.device("cpu"), torch.bfloat16), []
    signature = inspect.signature(flash_kernel())
    slots = [torch.randperm(12)[:8] for _ in range(3)]
    q = torch.zeros(2, TINY.num_heads, TINY.head_dim, dtype=torch.bfloat16)
    runs = by_flash(
        machine, lambda **given: taken.append(signature.bind(**given).arguments), TINY, q, 4, slots, 12, NAMES[name]
    )
    for run in runs:
        run()
    assert len(taken) == 3
    for given, own in zip(taken, slots, strict=True):
        assert given["page_table"].tolist() == own.view(2, 4).tolist() and given["page_table"].dtype == torch.int32
        assert given["k_cache"].shape == (12, 1, TINY.num_kv_heads, TINY.head_dim)
        assert {given[side].dtype for side in ("q", "k_cache", "v_cache")} == {NAMES[name] or torch.bfloat16}
        assert ("k_descale" in given) == (NAMES[name] is not None)
