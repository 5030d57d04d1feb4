"""Every way to prefill attends to the same tokens, and is called as the package that has it says."""

from __future__ import annotations

import inspect
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_parts import baselines, prefill  # noqa: E402
from gpu_parts.checks.oracle import error_of, exact  # noqa: E402
from gpu_parts.flash_rivals import PREFILL_RIVALS, by_flash, flash_kernel, prefill_by_flashinfer  # noqa: E402
from gpu_parts.machine import FEWEST_REPLAYS, REPLAYS, Machine, replays_of  # noqa: E402
from gpu_parts.pools import TINY, filled  # noqa: E402
from gpu_parts.prefill import TimedChunk, attended_in_turn  # noqa: E402

from kvtuner.precision import PrecisionPair  # noqa: E402
from kvtuner.runtime_loader.kernels import triton_attention  # noqa: E402
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention  # noqa: E402
from kvtuner.runtime_loader.packed_attention import ScoreScaling  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in Triton's interpreter, by -inf and 0
MACHINE = Machine(torch.device("cpu"), torch.float16)
PREFIX, NEW = 21, 6
DTYPES = pytest.mark.parametrize("dtype", [None, torch.float8_e4m3fn], ids=["bf16", "fp8"])


def expected(chunk: TimedChunk, rows: Any, prefix: int) -> Tensor:
    """Attention in float64 of two requests."""
    scores = ScoreScaling(TINY.head_dim**-0.5)
    return exact(chunk.q, *rows, chunk.bounds.slots, (prefix,) * 2, scores, ((NEW,) * 2, chunk.k, chunk.v))


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.parametrize("prefix", [PREFIX, 0])
def test_all_ways_attend_to_prefixes_and_new_tokens(prefix: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "WORTH_READING", 0)
    chunk, attention = TimedChunk.of(MACHINE, TINY, 2, prefix, NEW), TritonAttention(MACHINE.device)
    packed = filled(MACHINE, attention, TINY, PrecisionPair(4, 8), 2 * (prefix + NEW), "centered+hadamard")
    makers = prefill.attention_runs(MACHINE, attention, chunk, packed)
    assert list(makers) == ["one buffer, flash attention", "read back, sglang extend", "packed extend"]
    for kernel, make in makers.items():
        assert error_of(make()(), expected(chunk, packed, prefix)) < 1e-2, kernel
    native = filled(MACHINE, attention, TINY, baselines.NATIVE, 2 * (prefix + NEW))
    assert error_of(prefill.by_sglang(chunk, native)(), expected(chunk, native, prefix)) < 1e-2


@pytest.mark.sglang
def test_a_way_that_a_server_would_not_take_says_why() -> None:
    chunk, attention = TimedChunk.of(MACHINE, TINY, 2, PREFIX, NEW), TritonAttention(MACHINE.device)
    rows = filled(MACHINE, attention, TINY, PrecisionPair(4, 8), 2 * (PREFIX + NEW))
    makers = prefill.attention_runs(MACHINE, attention, chunk, rows)
    for kernel in list(makers)[:2]:
        row = prefill.timed(MACHINE, {}, prefill._only, makers[kernel])
        assert row["seconds"] is None
        assert "prefixes are not read back for so few tokens" in row["why"]


def test_a_package_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ImportError("no such package")

    monkeypatch.setattr(prefill, "sglang_extend", missing)
    chunk = TimedChunk.of(MACHINE, TINY, 1, 2, 3)
    row = prefill.timed(MACHINE, {}, prefill._only, lambda: prefill.by_sglang(chunk, ()))  # type: ignore[arg-type]
    assert row["why"] == "RuntimeError: ImportError: no such package"


@pytest.mark.sglang
@DTYPES
def test_flash_attention_gets_the_new_tokens_of_each_request(dtype: torch.dtype | None) -> None:
    pytest.importorskip("sglang")
    signature, taken = inspect.signature(flash_kernel()), []
    chunk = TimedChunk.of(Machine(torch.device("cpu"), torch.bfloat16), TINY, 2, 4, 3)
    (run,) = by_flash(
        MACHINE, lambda **given: taken.append(signature.bind(**given).arguments), TINY, chunk.q, 7, [chunk.slots], 14,
        dtype, 3,
    )  # fmt: skip
    run()
    (given,) = taken
    assert given["cu_seqlens_q"].tolist() == [0, 3, 6]
    assert given["cache_seqlens"].tolist() == [7, 7]
    assert given["max_seqlen_q"] == 3 and given["causal"]
    assert given["page_table"].tolist() == chunk.slots.view(2, 7).tolist()


class WrapperOfFlashInfer:
    """The methods of FlashInfer 0.7.2's wrapper for prefill with their parameters, by torch."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool,
        q_data_type: torch.dtype, kv_data_type: torch.dtype, sm_scale: float,
    ) -> None:  # fmt: skip
        indices = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {each.dtype for each in indices} == {torch.int32}
        assert causal and page_size == 1 and paged_kv_last_page_len.eq(1).all()
        assert (num_qo_heads, num_kv_heads, head_dim_qk) == (TINY.num_heads, TINY.num_kv_heads, TINY.head_dim)
        self.queries, self.ends, self.pages, self.scale = qo_indptr, paged_kv_indptr, paged_kv_indices.long(), sm_scale
        self.dtypes = q_data_type, kv_data_type

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        assert (q.dtype, paged_kv_cache[0].dtype) == self.dtypes
        k, v = (cache.to(q.dtype)[self.pages, 0] for cache in paged_kv_cache)
        return attended_in_turn(q, k, v, self.queries, self.ends, 0, 0, self.scale, torch.empty_like(q))


@DTYPES
def test_flashinfer_is_planned_for_new_tokens_behind_their_prefixes(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = TimedChunk.of(MACHINE, TINY, 2, 4, 3)
    (run,) = prefill_by_flashinfer(MACHINE, WrapperOfFlashInfer, TINY, chunk.q, 7, [chunk.slots], 14, dtype, 3)
    wrapper, (q, cache) = run.func.__self__, run.args  # type: ignore[attr-defined]  # they are partial
    assert wrapper.queries.tolist() == [0, 3, 6] and wrapper.ends.tolist() == [0, 7, 14]
    k, v = (each.double()[chunk.slots, 0] for each in cache)
    wanted = []
    for request, token in itertools.product(range(2), range(3)):
        read = slice(7 * request, 7 * request + 5 + token)
        for head in range(TINY.num_heads):
            weights = (q[3 * request + token, head].double() @ k[read, 0].T * TINY.head_dim**-0.5).softmax(-1)
            wanted.append(weights @ v[read, 0])
    found = run()
    assert isinstance(found, torch.Tensor)
    assert error_of(found, torch.stack(wanted).view(q.shape)) < 1e-2


def test_every_rival_prefills_from_a_cache_of_the_models_dtype_and_one_of_fp8() -> None:
    assert list(PREFILL_RIVALS) == ["sglang fa3", "sglang fa3, fp8", "flashinfer", "flashinfer, fp8"]
    assert [rival.dtype for rival in PREFILL_RIVALS.values()] == [None, torch.float8_e4m3fn] * 2


def test_long_runs_are_replayed_less_often() -> None:
    assert [replays_of(seconds) for seconds in (1e-5, 0.06, 3.0)] == [REPLAYS, 10, FEWEST_REPLAYS]
