"""Pages of reports in Chromium: at the widths of a desktop and a telephone, light and dark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bench_samples import bench_result
from browser import CONTRAST, DESKTOP, LAYOUT, TELEPHONE, needs_chromium, read_in_browser

from kvtuner import exported_configs
from kvtuner.exported_configs.profile.evaluation_record import load_evaluation
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.verdict import Verdict
from kvtuner.report.bench_report import write_bench_report
from kvtuner.report.evaluation_report import evaluation_page
from kvtuner.report.search_report import search_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import ProfileOf

    from kvtuner.report.search_data import ReportData

    MakeReport = Callable[..., ReportData]

pytestmark = [pytest.mark.slow, needs_chromium]


def page_of(data: ReportData) -> str:
    verdict = Verdict(("3.84x the tokens of bf16.", "KL 0.00490 nats per token."), "use", "Use it.")
    return search_page(replace(data, verdict=verdict))


@pytest.mark.parametrize("width", [DESKTOP, TELEPHONE])
@pytest.mark.parametrize("num_layers", [1, 9, 80])
def test_drawings_fit_the_screen_and_can_be_read(
    make_report: MakeReport, tmp_path: Path, num_layers: int, width: int
) -> None:
    found = read_in_browser(page_of(make_report(num_layers)), LAYOUT, tmp_path, width=width)
    assert found["drawings"] == 7 and found["untitled"] == 0
    assert found["overflow"] <= 0
    assert found["least_text"] >= 11
    assert found["outside"] == [] and found["overlaps"] == []
    assert found["cues"] == found["tables"] > 0
    if width == TELEPHONE:
        assert found["wide_tables"] > 0, "a page without wide tables needs no cue"


def test_bits_quality_and_what_fits_are_on_the_first_screen_of_a_desktop(
    make_report: MakeReport, tmp_path: Path
) -> None:
    found = read_in_browser(page_of(make_report(28)), LAYOUT, tmp_path, width=DESKTOP)
    assert found["first_last"] <= 720


@pytest.mark.parametrize("width", [DESKTOP, TELEPHONE])
def test_the_page_of_an_evaluation_fits_the_screen_too(tmp_path: Path, width: int) -> None:
    folder = Path(exported_configs.__file__).parent / "profiles"
    (file,) = folder.glob("demo-outliers-3bit.evaluation-*.json")
    profile = load_profile(folder / "demo-outliers-3bit.json")
    page = evaluation_page(load_evaluation(file), profile, "demo-outliers-3bit.json")
    found = read_in_browser(page, LAYOUT, tmp_path, width=width)
    assert found["drawings"] == 1 and found["untitled"] == 0 and found["overflow"] <= 0
    assert found["least_text"] >= 11 and found["outside"] == [] and found["overlaps"] == []


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_marks_stand_out_from_what_is_behind_them(
    make_report: MakeReport, tmp_path: Path, *, dark: bool
) -> None:
    found = read_in_browser(page_of(make_report(9)), CONTRAST, tmp_path, width=TELEPHONE, dark=dark)
    assert (found["back"] < 0.1) == dark
    assert found["text"] >= 4.5 and found["marks"] >= 3


@pytest.mark.parametrize("width", [DESKTOP, TELEPHONE])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_of_a_benchmark_fits_the_screen_and_can_be_read(
    profile_of: ProfileOf, tmp_path: Path, width: int, *, dark: bool
) -> None:
    page = write_bench_report(bench_result(profile_of), tmp_path).read_text()
    found = read_in_browser(page, LAYOUT, tmp_path, width=width)
    assert found["drawings"] == 4 and found["untitled"] == 0 and found["overflow"] <= 0
    assert found["least_text"] >= 11 and found["outside"] == [] and found["overlaps"] == []
    found = read_in_browser(page, CONTRAST, tmp_path, width=width, dark=dark)
    assert (found["back"] < 0.1) == dark
    assert found["text"] >= 4.5 and found["marks"] >= 3
