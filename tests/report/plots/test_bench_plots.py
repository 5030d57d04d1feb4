from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from bench_samples import bench_result

from kvtuner.report.bench_report import report_tables
from kvtuner.report.plots.bench_plots import (
    FIRST_TOKEN,
    THROUGHPUT,
    bench_drawings,
    lines_by_load,
    quality_by_scheme,
    tokens_of_servers,
)
from kvtuner.report.plots.drawing import Widths

if TYPE_CHECKING:
    from fixture_types import ProfileOf

    from kvtuner.report.bench_result import BenchResult
    from kvtuner.report.plots.drawing import Drawing


@pytest.fixture(scope="module")
def result(profile_of: ProfileOf) -> BenchResult:
    return bench_result(profile_of)


def texts(drawing: Drawing) -> list[str]:
    return [mark.text for mark in drawing.marks if mark.tag == "text"]


@pytest.mark.parametrize("width", Widths())
def test_memory_stands_against_the_tokens_that_fit_by_the_figures_of_the_table(
    result: BenchResult, width: float
) -> None:
    half = replace(result.schemes[1].server, tokens_that_fit=4_500)
    schemes = tuple(replace(each, server=half) if each.name == "profile" else each for each in result.schemes)
    result = replace(result, schemes=schemes)
    drawing = tokens_of_servers(result, width)
    (table,) = report_tables(result)["memory"]
    for name, _, size, *_, tokens in table.rows:
        assert {name, size, tokens} <= {*texts(drawing)}
    bars = {mark.title.split()[0]: float(mark.place["width"]) for mark in drawing.marks if mark.tag == "rect"}
    assert bars["profile"] == pytest.approx(bars["bf16"] / 2, abs=0.1)
    size = result.schemes[0].scheme.bytes_per_token
    assert size is not None and f"{round(9_000 * size / 2**20)}" in texts(drawing)


@pytest.mark.parametrize("width", Widths())
def test_quality_has_every_scheme_with_kl_from_most_bits_to_least(result: BenchResult, width: float) -> None:
    drawing = quality_by_scheme(result, width)
    kl = {cell.scheme: cell.mean for cell in result.evaluation.cells[0].results} if result.evaluation else {}
    bits = {each.name: each.scheme.effective_bits or 0.0 for each in result.schemes}
    names = [text for text in texts(drawing) if text in kl]
    assert sorted(names) == sorted(kl) and names == sorted(names, key=lambda name: -bits[name])
    places = {mark.title.split()[0]: float(mark.place["x"]) for mark in drawing.marks if "symbol" in mark.look}
    assert sorted(places, key=places.__getitem__) == sorted(kl, key=kl.__getitem__)


@pytest.mark.parametrize("width", Widths())
def test_axes_of_loads_have_the_units_of_the_tables(result: BenchResult, width: float) -> None:
    drawing = lines_by_load(result, FIRST_TOKEN, width)
    assert any(text.startswith("TTFT p50 ms") for text in texts(drawing))
    (table,) = report_tables(result)["prompts"]
    first = table.rows[0]
    shown = [mark.title for mark in drawing.marks if mark.look.startswith("dot")]
    for name, cell in zip(table.headers[1:], first[1:], strict=True):
        assert f"{name}: {cell.split(' /')[0]} at {first[0]}" in shown
    assert any(text == "output tokens/s" for text in texts(lines_by_load(result, THROUGHPUT, width)))


@pytest.mark.parametrize("width", Widths())
def test_every_line_is_named_at_its_end_and_no_name_hides_another(result: BenchResult, width: float) -> None:
    for axes in (THROUGHPUT, FIRST_TOKEN):
        drawing = lines_by_load(result, axes, width)
        names = {each.name: each for each in result.served}
        places = [float(mark.place["y"]) for mark in drawing.marks if mark.tag == "text" and mark.text in names]
        assert len(places) == len(names)
        gaps = [later - earlier for earlier, later in zip(sorted(places), sorted(places)[1:], strict=False)]
        assert min(gaps) >= 12
        assert max(places) < drawing.height


def test_nothing_is_drawn_of_what_was_not_measured(result: BenchResult) -> None:
    without = tuple(replace(each, server=None, run=replace(each.run, results=())) for each in result.schemes)
    assert bench_drawings(replace(result, schemes=without, evaluation=None)) == {}
    assert len(bench_drawings(result)) == 4
