"""The result of a search as text: what decides at every width, and no character that a terminal would take amiss."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvtuner.evaluation.statistics import Interval
from kvtuner.exported_configs.verdict import Verdict
from kvtuner.report.layer_strip import Terminal
from kvtuner.report.search_data import BudgetOutcome, OffsetQuality, ReportData
from kvtuner.report.search_text import MAX_WIDTH, search_text

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeReport = Callable[..., ReportData]

WIDE = Terminal(width=120)
VERDICT = Verdict(("3.84x the tokens of bf16.", "KL 0.00490."), "use", "Use it.")


def quality_lines(text: str) -> list[str]:
    return [re.sub(r" {2,}", "|", line.strip("* ")) for line in text.splitlines()]


def test_bits_stand_first_then_what_decides_and_the_verdict_last(make_report: MakeReport) -> None:
    data = replace(make_report(6), verdict=VERDICT)
    text = search_text(data, WIDE)
    assert text.startswith("layer       |0\nK bits ")
    assert "asked            4bit\n" in text
    assert "read plan        decode: tokens after the prompt read quantized keys and values\n" in text
    assert "mean_bits 3.920, effective_bits 4.170" in text
    assert "1,342,177 (bf16 349,525): 3.84x" in text
    assert text.endswith("verdict  3.84x the tokens of bf16. KL 0.00490.\nadvice   Use it.")
    assert text.count("quality of ") == 1 and f"quality of 24 sequences at {data.quality[0].offsets} " in text
    names = [line.partition("|")[0] for line in quality_lines(text) if "|0.0" in line or "e-" in line]
    assert names == ["winner", "K4V4 +t", "K4V4", "fp8"]


def test_quality_of_an_earlier_release_has_no_number_of_sequences(make_report: MakeReport) -> None:
    data = make_report(2)
    text = search_text(replace(data, quality=(replace(data.quality[0], num_sequences=None),)), WIDE)
    assert f"quality at {data.quality[0].offsets} positions" in text and "sequences at" not in text


def test_verbose_text_has_every_baseline_at_every_kind_of_offsets(make_report: MakeReport) -> None:
    data = make_report(6)
    text = search_text(data, WIDE, verbose=True)
    lines = quality_lines(text)
    assert "winner|3.92|4.17|0.00490 [0.00441, 0.00539]|0.0588|99.5%|5.40" in lines
    for transforms in (False, True):
        for row in data.quality[0].baselines:
            if row.transforms == transforms and row.kl:
                start = f"{row.name}{' +t' if transforms else ''}|{row.mean_bits:.2f}|{row.effective_bits:.2f}|"
                assert sum(line.startswith(start) for line in lines) == len(data.quality)
    fitting = [line for line in text.splitlines() if line.startswith("* ") and "." in line[:20]]
    assert len(fitting) == len(data.quality) * sum(
        row.fits_budget for row in (data.quality[0].winner, *data.quality[0].baselines)
    )


def beside(quality: OffsetQuality, difference: Interval) -> OffsetQuality:
    return replace(quality, baselines=(replace(quality.baselines[0], difference=difference),))


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(0.1, 0.3, "worse"), (-0.3, -0.1, "better"), (-0.1, 0.3, "unclear"), (0.0, 0.0, "the same")],
)
def test_a_row_is_judged_by_the_paired_interval_alone(
    make_report: MakeReport, low: float, high: float, word: str
) -> None:
    data = make_report(2)
    quality = beside(data.quality[0], Interval((low + high) / 2, low, high))
    text = search_text(replace(data, quality=(quality,)), WIDE, verbose=True)
    (line,) = [line for line in text.splitlines() if quality.baselines[0].name in line]
    assert [w for w in ("worse", "better", "unclear", "the same") if w in line] == [word]


@pytest.mark.parametrize(("num_sequences", "word"), [(2, "unclear"), (5, "unclear"), (6, "worse"), (None, "worse")])
def test_a_row_of_few_sequences_is_unclear_whatever_the_interval(
    make_report: MakeReport, num_sequences: int | None, word: str
) -> None:
    data = make_report(2)
    quality = replace(beside(data.quality[0], Interval(0.2, 0.1, 0.3)), num_sequences=num_sequences)
    text = search_text(replace(data, quality=(quality,)), WIDE, verbose=True)
    (line,) = [line for line in text.splitlines() if quality.baselines[0].name in line]
    assert [w for w in ("worse", "better", "unclear") if w in line] == [word]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("verbose", [False, True])
def test_text_is_ascii_within_the_terminal_whatever_the_names(
    make_report: MakeReport, width: int, verbose: bool
) -> None:
    data = make_report(2, model="\x1b[31mmodel\x07\n" + "é" * 200, budget=BudgetOutcome("4\tbit", 4, 4, 8, 32, 2, 2))
    long_names = replace(data, verdict=VERDICT, quality=tuple(replace(q, positions="p" * 300) for q in data.quality))
    for line in search_text(long_names, Terminal(width=width), verbose=verbose).split("\n"):
        assert len(line) <= min(width, MAX_WIDTH)
        assert line.isascii() and (line.isprintable() or not line)


def test_a_narrow_terminal_lacks_the_columns_that_decide_least(make_report: MakeReport) -> None:
    data = make_report(2)
    headers = {
        width: next(line for line in search_text(data, Terminal(width=width)).splitlines() if "KL nats" in line).split()
        for width in (120, 80, 60)
    }
    assert headers[120][-3:] == ["p99", "top-1", "perplexity"]
    assert "p99" not in headers[80] and "top-1" in headers[80] and "profile" in headers[60]
    assert set(headers[60]) < set(headers[80]) < set(headers[120])


def test_the_widest_numbers_keep_their_digits(make_report: MakeReport) -> None:
    data = make_report(2)
    quality = data.quality[0]
    wide = replace(
        quality.baselines[0],
        transforms=True,
        kl=Interval(-0.00123, -0.00234, -0.00101),
        difference=Interval(0.0, -0.1, 0.1),
        kl_p99=-0.00123,
        top1=1.0,
        perplexity=1234567.891,
        bytes_per_token=10**9,
    )
    text = search_text(replace(data, quality=(replace(quality, baselines=(wide,)),)), WIDE, verbose=True)
    assert "1,234,567.89" in text
