"""The first screen of a search's report in Chromium: at the widths of a desktop and a telephone, light and dark."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import needs_chromium, read_in_browser

from kvtuner import exported_configs
from kvtuner.exported_configs.profile.evaluation_record import load_evaluation
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.verdict import Verdict
from kvtuner.report.evaluation_report import evaluation_page
from kvtuner.report.plots.search_plots import PICTURES
from kvtuner.report.search_report import search_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.report.search_data import ReportData

    MakeReport = Callable[..., ReportData]

pytestmark = [pytest.mark.slow, needs_chromium]

PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")
DESKTOP, TELEPHONE = 1280, 390
SHOWN = (
    'const shown = [...page.querySelectorAll("svg")].filter((svg) => frame.getComputedStyle(svg).display != "none");'
)
LAYOUT = (
    SHOWN
    + """
const rect = (node) => node.getBoundingClientRect();
const scale = (node) => node.getScreenCTM().a;
const texts = shown.flatMap((svg) => [...svg.querySelectorAll("text")]);
const size = (node) => parseFloat(frame.getComputedStyle(node).fontSize) * scale(node);
return {
  drawings: shown.length,
  overflow: page.documentElement.scrollWidth - frame.innerWidth,
  least_text: Math.min(...texts.map(size)),
  outside: texts.filter((text) => rect(text).right > rect(text.ownerSVGElement).right + 4
    || rect(text).left < rect(text.ownerSVGElement).left - 4).map((text) => text.textContent),
  untitled: shown.filter((svg) => !svg.querySelector("title") || !svg.getAttribute("aria-label")).length,
  overlaps: shown.flatMap((svg) => { const own = [...svg.querySelectorAll("text")];
    return own.flatMap((one, index) => own.slice(index + 1).filter((other) => rect(one).right > rect(other).left + 1
      && rect(other).right > rect(one).left + 1 && rect(one).bottom > rect(other).top + 5
      && rect(other).bottom > rect(one).top + 5).map((other) => [one.textContent, other.textContent])); }),
  last: Math.max(...shown.map((svg) => rect(svg).bottom)),
  wide_tables: [...page.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth).length,
  cues: [...page.querySelectorAll(".scroll")].filter((box) =>
    frame.getComputedStyle(box).backgroundAttachment == "local, local, scroll, scroll").length,
  tables: page.querySelectorAll(".scroll").length,
};"""
)
CONTRAST = (
    SHOWN
    + """
const numbers = (colour) => colour.match(/[0-9.]+/g).slice(0, 3).map((value) => value / 255);
const light = (colour) => numbers(colour).map((value) => value <= 0.04045 ? value / 12.92
  : ((value + 0.055) / 1.055) ** 2.4).reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
const contrast = (one, other) => { const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05); };
const back = frame.getComputedStyle(page.body).backgroundColor;
const fill = (node) => frame.getComputedStyle(node).fill;
const behind = (node) => { const box = node.getBoundingClientRect(), x = box.left + box.width / 2,
    y = box.top + box.height / 2;
  const papers = [...node.ownerSVGElement.querySelectorAll(".cell, .harmless, .marked")].filter((paper) => {
    const area = paper.getBoundingClientRect();
    return area.left <= x && x <= area.right && area.top <= y && y <= area.bottom; });
  return papers.length ? fill(papers.at(-1)) : back; };
const nodes = (names) => shown.flatMap((svg) => [...svg.querySelectorAll(names)]);
return { back: light(back),
  text: Math.min(...nodes("text").map((node) => contrast(fill(node), behind(node)))),
  marks: Math.min(...nodes(".bar, .beyond, .symbol.winner").map((node) => contrast(fill(node), back))) };"""
)


def page_of(data: ReportData) -> str:
    verdict = Verdict(("3.84x the tokens of bf16.", "KL 0.00490 nats per token."), "use", "Use it.")
    return search_page(replace(data, verdict=verdict), dict.fromkeys(PICTURES, PIXEL))


@pytest.mark.parametrize("width", [DESKTOP, TELEPHONE])
@pytest.mark.parametrize("num_layers", [1, 9, 80])
def test_drawings_fit_the_screen_and_can_be_read(
    make_report: MakeReport, tmp_path: Path, num_layers: int, width: int
) -> None:
    found = read_in_browser(page_of(make_report(num_layers)), LAYOUT, tmp_path, width=width)
    assert found["drawings"] == 3 and found["untitled"] == 0
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
    assert found["last"] <= 720


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
