from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvtuner.report.formatting import context_name
from kvtuner.report.plots.tokens_that_fit import FittedMemory, FittingRequests, stored_schemes, tokens_that_fit
from kvtuner.report.search_data import BudgetOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.report.search_data import ReportData

    MakeReport = Callable[..., ReportData]

QWEN = BudgetOutcome("4bit", 3.92, 4.17, 14_336, 57_344, residual_length=32, window_bytes=1 << 20)


def test_a_budget_of_memory_names_what_is_counted(make_report: MakeReport) -> None:
    data = make_report(4, budget=replace(QWEN, asked="1.5GiB@32x16k"))
    assert FittingRequests.of(data) == FittingRequests(1.5, (16_384,))


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        (None, FittingRequests(8, (4096, 32768))),
        (131_072, FittingRequests(32, (4096, 131_072))),
        (2048, FittingRequests(1, (2048,))),
    ],
)
def test_other_budgets_count_in_the_memory_of_four_served_requests_of_bf16(
    make_report: MakeReport, served: int | None, expected: FittingRequests
) -> None:
    data = make_report(4, budget=replace(QWEN, context_length=served))
    assert FittingRequests.of(data) == expected
    bf16, *_ = stored_schemes(data)
    assert (bf16.requests(expected.memory_gib * 2**30, expected.contexts[-1]) or 0) >= 4


def test_copies_of_an_exact_window_take_their_share_of_requests(make_report: MakeReport) -> None:
    bf16, fp8, profile = stored_schemes(make_report(4, budget=QWEN))
    assert (bf16.name, fp8.name, profile.name) == ("bf16", "fp8", "profile")
    assert bf16.requests(1 << 30, 4096) == 4
    assert profile.requests(1 << 30, 4096) == (1 << 30) // (14_336 * 4096 + (1 << 20)) == 17
    *_, unknown = stored_schemes(make_report(4, budget=replace(QWEN, window_bytes=None)))
    assert unknown.requests(1 << 30, 4096) is None


def test_keys_of_indexes_take_their_share_of_tokens_and_requests(make_report: MakeReport) -> None:
    data = make_report(4, budget=replace(QWEN, asked="1GiB@17x4k", index_bytes=512))
    bf16, fp8, profile = FittedMemory.of(data).schemes
    stored = [data.quality[0].baselines[5].bytes_per_token, 14_336, 57_344]
    assert (fp8.bytes_per_token, profile.bytes_per_token, bf16.bytes_per_token) == tuple(stored)
    assert [row.tokens for row in (fp8, profile, bf16)] == [2**30 // (size + 512) for size in stored]
    assert profile.requests == ((1 << 30) // ((14_336 + 512) * 4096 + (1 << 20)),) == (17,)
    assert bf16.requests == ((1 << 30) // ((57_344 + 512) * 4096),)
    # Four requests of 4,096 tokens take 1 GiB by stored bytes, to the last: with keys of indexes two are needed.
    exact = BudgetOutcome("4bit", 4, 4, 16_384, 65_536, context_length=4096)
    assert FittingRequests.of(make_report(4, budget=exact)).memory_gib == 1
    assert FittingRequests.of(make_report(4, budget=replace(exact, index_bytes=1))).memory_gib == 2


def test_bars_are_as_long_as_the_tokens_that_fit(make_report: MakeReport) -> None:
    drawing = tokens_that_fit(FittedMemory.of(make_report(4, budget=QWEN)), 580)
    bars = [float(mark.place["width"]) for mark in drawing.marks if mark.tag == "rect"]
    assert len(bars) == 3 and bars[-1] == pytest.approx(4 * bars[0], rel=1e-2)
    assert {"18,724", "74,898", "4", "18"} <= {mark.text for mark in drawing.marks}


def test_a_number_of_tokens_is_in_units_of_1024_where_it_is_whole_ones() -> None:
    assert [context_name(number) for number in (32_768, 5000)] == ["32k", "5,000"]
