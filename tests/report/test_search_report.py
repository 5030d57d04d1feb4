from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from page_reader import Page, check_harmless

from kvtuner.errors import RunFolderError
from kvtuner.report.layer_strip import Terminal
from kvtuner.report.plots.search_plots import PICTURES
from kvtuner.report.search_data import PairAdditivity, ReportData
from kvtuner.report.search_report import search_page, summary_json, write_search_report
from kvtuner.report.search_text import search_text
from kvtuner.tuner.refinement_gain import RefinementGain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    MakeReport = Callable[..., ReportData]

HOSTILE = (
    """"'><script src="//evil.example/x.js">alert(1)</script><img onerror=alert(2) src=https://evil.example>&lt;"""
)


WIDE = Terminal(width=120)


def hostile(data: ReportData) -> ReportData:
    """A copy of the report with every outside string replaced."""
    return replace(
        data,
        model=HOSTILE,
        corpus=HOSTILE,
        read_plan=HOSTILE,
        budget=replace(data.budget, asked=HOSTILE),
        layers=tuple(replace(row, k_transform=HOSTILE, v_transform=HOSTILE) for row in data.layers),
        quality=tuple(
            replace(q, offsets=HOSTILE, positions=HOSTILE, winner=replace(q.winner, name=HOSTILE)) for q in data.quality
        ),
        additivity=tuple(replace(row, name=HOSTILE) for row in data.additivity),
        rank_correlations=tuple(replace(row, score=HOSTILE) for row in data.rank_correlations),
        trials=tuple(replace(trial, source=HOSTILE) for trial in data.trials),
        forwards=tuple((HOSTILE, count) for _, count in data.forwards),
        provenance=tuple((HOSTILE, HOSTILE) for _ in data.provenance),
    )


@pytest.mark.slow
def test_the_page_needs_no_file_and_pictures_lie_beside_it_for_those_who_publish(
    make_report: MakeReport, tmp_path: Path
) -> None:
    page = write_search_report(make_report(6), tmp_path / "run")
    assert page == tmp_path / "run" / "report.html"
    assert {path.name for path in page.parent.iterdir() if path != page} == {f"{name}.png" for name in PICTURES}
    assert "img" not in Page(page.read_text()).names()


def test_outside_strings_add_no_tag_and_are_shown_as_they_are(make_report: MakeReport) -> None:
    data = make_report(3)
    plain, attacked = Page(search_page(data)), Page(search_page(hostile(data)))
    # A drawing has as many ticks as its names leave room for, and its symbols go by the names of trials.
    marks = ("line", "text", "title", "path", "circle", "rect")
    names = [[name for name in page.names() if name not in marks] for page in (plain, attacked)]
    assert names[0] == names[1] and set(plain.names()) == set(attacked.names())
    assert "script" not in attacked.names()
    assert attacked.cells.count(HOSTILE) >= 2 * len(data.layers) + 2 * len(data.provenance)
    assert f"KV cache precision of {HOSTILE}" in attacked.text


@pytest.mark.parametrize("disguise", [lambda data: data, hostile], ids=["plain", "hostile"])
def test_the_page_loads_and_runs_nothing(make_report: MakeReport, disguise: Callable[[ReportData], ReportData]) -> None:
    page = check_harmless(search_page(disguise(make_report(3))))
    assert page.cells, "a page without content would be harmless too"


def test_every_drawing_has_words_and_a_form_for_narrow_screens(make_report: MakeReport) -> None:
    text = search_page(make_report(6))
    drawings = [attributes for name, attributes in Page(text).tags if name == "svg"]
    assert [attributes["class"] for attributes in drawings] == ["drawing wide", "drawing narrow"] * 7
    assert all(len(attributes["aria-label"]) > 30 for attributes in drawings)
    assert "prefers-color-scheme: dark" in text


def test_every_baseline_stands_in_the_quality_table_with_its_interval(make_report: MakeReport) -> None:
    data = make_report(4)
    page = Page(search_page(data))
    cells = page.cells
    for quality in data.quality:
        assert f"24 sequences at {quality.offsets_text} positions ({quality.positions}), perplexity" in page.text
        for row in (quality.winner, *quality.baselines):
            assert cells.count(row.label) >= len(data.quality)
    assert "0.0188 [0.0169, 0.0207]" in cells  # K4V4
    assert "0.0139 [0.0125, 0.0153]" in cells  # K4V4 minus the winner
    assert {"4bit", "3.920", "4.170", "800", "3,072", "1,342,177", "349,525", "3.84x"} <= set(cells)


def test_the_gain_of_transforms_is_the_geometric_mean_of_the_ratios(make_report: MakeReport) -> None:
    data = make_report(2)
    ratios = {0: 2.0, 1: 8.0}
    rows = tuple(
        replace(row, plain=replace(row.plain, kl=None if row.best.kl is None else row.best.kl * ratios[row.layer]))
        for row in data.sensitivity
    )
    cells = Page(search_page(replace(data, sensitivity=rows))).cells
    assert cells.count("4.00x") == 6


def test_what_was_not_measured_is_said_to_be_so(make_report: MakeReport) -> None:
    data = make_report(2)
    bare = ReportData(data.model, data.corpus, "decode", "kl", data.budget, data.layers)
    text = Page(search_page(bare)).text
    assert text.count("Not measured in this run.") >= 6


def test_numbers_that_do_not_exist_are_dashes(make_report: MakeReport) -> None:
    data = make_report(2)
    quality = data.quality[0]
    gaps = replace(quality.winner, kl=None, kl_p99=None, top1=math.nan, perplexity=math.inf)
    odd = replace(data, quality=(replace(quality, winner=gaps, reference_perplexity=None),))
    page = Page(search_page(odd))
    row = page.cells.index("winner")
    assert page.cells[row + 1 : row + 6] == ["-"] * 5
    assert "nan" not in page.text.lower().split()


@pytest.mark.slow
def test_the_same_data_gives_the_same_files_byte_for_byte(make_report: MakeReport, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_search_report(ReportData.from_json(json.loads(json.dumps(make_report(5).to_json()))), tmp_path / name)
    files = {name: {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b")}
    assert files["a"] == files["b"]


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_report_whole(
    make_report: MakeReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_report(2)
    write_search_report(data, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFolderError, match="no space left to write"):
        write_search_report(make_report(3), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_summary_is_plain_json_with_the_numbers_of_the_table(make_report: MakeReport) -> None:
    data = make_report(3)
    summary = json.loads(json.dumps(summary_json(data), allow_nan=False))
    assert summary["budget"]["asked"] == "4bit"
    assert summary["budget"]["tokens_per_gib"] == 1_342_177
    assert summary["layers"] == [f"K{row.k_bits}V{row.v_bits}" for row in data.layers]
    assert summary["quality"][0]["winner"]["kl"]["mean"] == pytest.approx(0.0049)
    assert summary["quality"][0]["baselines"][0]["difference"]["low"] < 0
    assert summary["forwards"]["trials"] == 84


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (RefinementGain(0.0012, 0.0013), "kept: the best trial is 0.00120 nats per token lower"),
        (RefinementGain(0.0012, 0.0013), "one standard error is 0.00130"),
        (RefinementGain(0.0012, None), "one sequence has no spread"),
        (
            RefinementGain(0.0, 0.0),
            "no trial was below the exact solution on the select split; the exact solution is kept",
        ),
    ],
)
def test_a_solution_that_refinement_did_not_better_is_said_to_be_kept(
    make_report: MakeReport, gain: RefinementGain, text: str
) -> None:
    data = replace(make_report(2), refinement=gain)
    assert text in " ".join(search_text(data, WIDE, verbose=True).split())
    assert text in Page(search_page(data)).text
    assert ReportData.from_json(data.to_json()) == data


def test_gain_override_and_pairs_stand_in_table_page_and_summary(make_report: MakeReport) -> None:
    plain = make_report(2)
    noted = replace(
        plain,
        refinement=RefinementGain(0.0012, 0.0009),
        uniform_winner="K4V4 + transforms",
        pair_additivity=PairAdditivity(18, 0.031, 0.42),
    )
    for text in (
        "0.00120 nats per token below the exact solution",
        "uniform K4V4 + transforms",
        "3.1% in the median, 42.0% at most",
    ):
        assert text in " ".join(search_text(noted, WIDE, verbose=True).split())
        assert text in Page(search_page(noted)).text
        assert text not in search_text(plain, WIDE, verbose=True)
    summary = summary_json(noted)
    assert summary["refinement"] == {"mean": 0.0012, "standard_error": 0.0009}
    assert summary["uniform_winner"] == "K4V4 + transforms"
    assert summary["pair_additivity"] == {"num_pairs": 18, "median": 0.031, "maximum": 0.42}
    assert ReportData.from_json(noted.to_json()) == noted


def test_an_exact_window_is_shown_with_what_it_costs(make_report: MakeReport) -> None:
    plain = make_report(2)
    budget = replace(plain.budget, residual_length=32, window_bytes=4321)
    windowed = replace(plain, budget=budget)
    cost = "the last 32 tokens exact: 4,321 bytes per request"
    assert cost in Page(search_page(windowed)).text and cost not in Page(search_page(plain)).text
    assert "the last 32 tokens exact" in search_text(windowed, WIDE)
    assert f"{budget.effective_bits + 0.125:.3f} at 4k" in Page(search_page(windowed)).text
    assert summary_json(windowed)["budget"]["residual_length"] == 32
    assert ReportData.from_json(windowed.to_json()) == windowed


def test_importing_the_report_loads_no_plotting_and_no_model_library() -> None:
    heavy = ["matplotlib", "torch", "transformers", "optuna", "scipy", "pydantic"]
    code = f"import sys, kvtuner.report.search_report; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_captions_explain_only_the_marks_that_stand_there(make_report: MakeReport) -> None:
    data = make_report(3)
    text = " ".join(Page(search_page(data)).text.split())
    assert "without, fp8; lines are" in text and "dashes: not measured" not in text
    least = min(row.bits for row in data.sensitivity)
    gaps = tuple(row for row in data.sensitivity if (row.layer, row.bits) != (1, least))
    quality = replace(data.quality[0], baselines=data.quality[0].baselines[:1])
    text = " ".join(Page(search_page(replace(data, sensitivity=gaps, quality=(quality,)))).text.split())
    assert "without; lines are" in text and "log scale; dashes: not measured" in text
