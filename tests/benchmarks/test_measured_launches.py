"""A sweep's winners go into the table, and nothing else changes."""

from __future__ import annotations

import inspect
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_parts.flash_rivals import FLASH_RIVALS, by_flash, by_flashinfer, flash_kernel  # noqa: E402
from gpu_parts.machine import Machine  # noqa: E402
from gpu_parts.measured_launches import winners, with_winners, write_table  # noqa: E402
from gpu_parts.pools import TINY  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

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
    kinds = ("launch", "joined", "wide")
    different = {key for key, row in after.items() if any(row.get(kind) != before[key].get(kind) for kind in kinds)}
    assert {key[:5] for key in different} == {("sm_90", 4, 4, 128, 1)}
    for key in different:
        assert {name: after[key]["launch"][name] for name in C} == C
        assert after[key]["launch"]["resident"] >= 1 and after[key]["wide"] == before[key]["wide"]
        assert after[key]["timed_on"] == "a GPU"
        assert "joined" not in after[key]  # one head of a program was faster
    # Settings that are in the table already leave it as it is.
    row = before["sm_90", 4, 4, 128, 1, 1]["joined"]
    assert with_winners(table, "sm_90", {"K4V4": row}, "a GPU")["rows"] == table["rows"]
    joined = settings(with_winners(table, "sm_90", {"K4V4": {**C, "heads": 2}}, "a GPU"))["sm_90", 4, 4, 128, 1, 1]
    assert joined["launch"] == before["sm_90", 4, 4, 128, 1, 1]["launch"]
    assert {name: joined["joined"][name] for name in (*C, "heads")} == {**C, "heads": 2}


def test_a_table_is_written_as_it_was(tmp_path: Path) -> None:
    write_table(tmp_path / "launches.json", json.loads(TABLE.read_text()))
    assert (tmp_path / "launches.json").read_text() == TABLE.read_text()


DTYPES = pytest.mark.parametrize("dtype", [None, torch.float8_e4m3fn], ids=["bf16", "fp8"])


@pytest.mark.sglang
@DTYPES
def test_flash_attention_is_called_as_sglang_has_it(dtype: torch.dtype | None) -> None:
    pytest.importorskip("sglang")
    machine, taken = Machine(torch.device("cpu"), torch.bfloat16), []
    signature = inspect.signature(flash_kernel())
    slots = [torch.randperm(12)[:8] for _ in range(3)]
    q = torch.zeros(2, TINY.num_heads, TINY.head_dim, dtype=torch.bfloat16)
    runs = by_flash(
        machine, lambda **given: taken.append(signature.bind(**given).arguments), TINY, q, 4, slots, 12, dtype
    )
    for run in runs:
        run()
    assert len(taken) == 3
    for given, own in zip(taken, slots, strict=True):
        assert given["page_table"].tolist() == own.view(2, 4).tolist() and given["page_table"].dtype == torch.int32
        assert given["k_cache"].shape == (12, 1, TINY.num_kv_heads, TINY.head_dim)
        assert {given[side].dtype for side in ("q", "k_cache", "v_cache")} == {dtype or torch.bfloat16}
        assert ("k_descale" in given) == (dtype is not None)


class WrapperOfFlashInfer:
    """The methods of FlashInfer 0.7.2's wrapper with their parameters, by plain attention in float64."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, use_tensor_cores: bool) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, q_data_type: torch.dtype, kv_data_type: torch.dtype, sm_scale: float,
    ) -> None:  # fmt: skip
        assert {each.dtype for each in (indptr, indices, last_page_len)} == {torch.int32}
        assert page_size == 1 and last_page_len.eq(1).all() and indptr[-1] == len(indices)
        self.pages = [indices[start:end].long() for start, end in itertools.pairwise(indptr.tolist())]
        self.heads, self.scale = (num_qo_heads, num_kv_heads, head_dim), sm_scale
        self.dtypes = q_data_type, kv_data_type

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert (q.shape[1], *keys.shape[2:]) == self.heads and (q.dtype, keys.dtype) == self.dtypes
        outputs = []
        for one, pages in zip(q.double(), self.pages, strict=True):
            k, v = (
                each.double()[pages, 0].repeat_interleave(q.shape[1] // keys.shape[2], 1) for each in (keys, values)
            )
            weights = (torch.einsum("hd,khd->hk", one, k) * self.scale).softmax(-1)
            outputs.append(torch.einsum("hk,khd->hd", weights, v))
        return torch.stack(outputs)


@DTYPES
def test_flashinfer_is_planned_for_the_pages_that_each_run_reads(dtype: torch.dtype | None) -> None:
    machine = Machine(torch.device("cpu"), torch.bfloat16)
    slots = [torch.randperm(12)[:8] for _ in range(3)]
    q = torch.randn(2, TINY.num_heads, TINY.head_dim, dtype=torch.bfloat16)
    runs = by_flashinfer(machine, WrapperOfFlashInfer, TINY, q, 4, slots, 12, dtype)
    outputs = [run() for run in runs]
    assert len(outputs) == 3
    assert all(isinstance(each, torch.Tensor) and each.shape == q.shape for each in outputs)
    wrappers = [run.func.__self__ for run in runs]  # type: ignore[attr-defined]  # they are partial
    assert [[page.tolist() for page in each.pages] for each in wrappers] == [each.view(2, 4).tolist() for each in slots]
    assert {each.dtypes for each in wrappers} == {(torch.bfloat16, dtype or torch.bfloat16)}
    assert {each.use_tensor_cores for each in wrappers} == {dtype is not None or TINY.gqa >= 4}


def test_every_rival_has_a_cache_of_the_models_dtype_and_one_of_fp8() -> None:
    assert list(FLASH_RIVALS) == ["sglang fa3", "sglang fa3, fp8", "flashinfer", "flashinfer, fp8"]
    assert [rival.dtype for rival in FLASH_RIVALS.values()] == [None, torch.float8_e4m3fn] * 2
