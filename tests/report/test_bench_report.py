"""The report of a benchmark that was made by hand: nothing lost, nothing let through, the same in all its forms."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from bench_samples import bench_result
from page_reader import Page
from profile_samples import QUALITY

from kvtuner.bench.ablation import GROUPS
from kvtuner.bench.gates import all_gates, kv_pool_gate
from kvtuner.bench.hardware import GPU_MEMORY, MEMORY
from kvtuner.exported_configs.profile.records import QualityRecord
from kvtuner.precision import ExactWindow
from kvtuner.report.bench_report import JSON, MARKDOWN, report_tables, summary_lines, write_bench_report
from kvtuner.report.bench_result import NO_LOADS, BenchResult
from kvtuner.report.formatting import number

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import ProfileOf

    MakeResult = Callable[..., BenchResult]

HOSTILE = """"'><script src="//evil.example/x.js">alert(1)</script>|`*"""


@pytest.fixture(scope="module")
def make_result(profile_of: ProfileOf) -> MakeResult:
    return partial(bench_result, profile_of)


@pytest.mark.slow
def test_page_markdown_and_json_hold_every_way_and_every_load(make_result: MakeResult, tmp_path: Path) -> None:
    result = make_result()
    page = Page(write_bench_report(result, tmp_path).read_text())
    text = (tmp_path / MARKDOWN).read_text()
    found = json.loads((tmp_path / JSON).read_text())
    for scheme in found["ways"]:
        assert scheme["name"] in page.text
        assert scheme["name"] in text
        assert scheme["refused"] or {load["kind"] for load in scheme["loads"]} == {
            "prompt", "output", "concurrency", "batch", "stability",
        }  # fmt: skip
    assert "keys per channel are not read on cuda" in page.text
    assert "keys per channel are not read on cuda" in text
    pictures = [path.name for path in tmp_path.glob("*.svg")]
    assert len(pictures) == 4 and page.names().count("svg") == 2 * len(pictures)
    assert all(f"]({name})" in text for name in pictures)
    assert found["problems"] == [], "per channel is refused by name, and no surprise"
    assert page.text.count("Where the figures come from") == 1


@pytest.mark.slow
def test_tables_in_markdown_have_as_many_cells_as_headers(make_result: MakeResult, tmp_path: Path) -> None:
    write_bench_report(make_result(), tmp_path)
    widths: list[int] = []
    for line in (tmp_path / MARKDOWN).read_text().splitlines():
        if not line.startswith("|"):
            widths = []
            continue
        widths.append(len(re.findall(r"(?<!\\)\|", line)))
        assert widths[-1] == widths[0], line


@pytest.mark.slow
def test_names_from_outside_are_text_in_all_forms(make_result: MakeResult, tmp_path: Path) -> None:
    result = make_result(refusal=HOSTILE, name=HOSTILE)
    page = Page(write_bench_report(result, tmp_path).read_text())
    assert "script" not in page.names()
    assert HOSTILE in page.text
    assert "<script" not in (tmp_path / MARKDOWN).read_text().replace("\\<", "")


def test_a_way_that_should_have_been_served_is_a_problem(make_result: MakeResult) -> None:
    result = make_result()
    fp8 = next(each for each in result.schemes if each.name == "fp8")
    broken = replace(fp8, server=None, run=NO_LOADS, gates=(), refused="out of memory")
    result = replace(result, schemes=tuple(broken if each is fp8 else each for each in result.schemes))
    assert [problem.text for problem in result.problems()] == ["fp8: not served: out of memory"]
    assert any("FAILED  fp8: not served" in line for line in summary_lines(result))


def test_the_profile_stands_beside_its_fair_rival_in_every_form(make_result: MakeResult, tmp_path: Path) -> None:
    result = make_result(best_uniform="K4V4 + transforms")
    kl, speed = (
        {scheme.name: figure(scheme) for scheme in result.schemes[1:3]}
        for figure in (
            lambda scheme: number(result.quality(scheme.name, "kl_nats_per_token").mean),
            lambda scheme: number(scheme.rows("concurrency")[-1]["output_tokens_per_s"]),
        )
    )
    assert len({*kl.values(), *speed.values()}) == 4, "a figure of one is not taken for the other's"
    sentence = (
        "The profile beside its fair rival, K4V4 + transforms: 9,000 tokens that fit against 9,000;"
        " KL {} against {} nats per token; {} tokens/s against {} with 16 in flight.".format(
            *kl.values(), *speed.values()
        )
    )
    page = Page(write_bench_report(result, tmp_path).read_text())
    lines = summary_lines(result, 80)
    assert all(len(line) <= 80 for line in lines)
    for form in (page.text, (tmp_path / MARKDOWN).read_text().replace("\\", ""), " ".join(lines)):
        assert sentence in " ".join(form.split())
    assert json.loads((tmp_path / JSON).read_text())["best_uniform"] == "K4V4 + transforms"
    _, details = report_tables(result)["gates"]
    of_rival = [row for row in details.rows if row[0] == "K4V4 + transforms"]
    assert of_rival and len(of_rival) == sum(row[0] == "profile" for row in details.rows)


def test_without_an_evaluation_the_kl_is_that_of_the_search(make_result: MakeResult) -> None:
    result = make_result(best_uniform="K4V4 + transforms")
    quality = QualityRecord.model_validate({
        **QUALITY,
        "baselines": [{**QUALITY["baselines"][0], "name": "K4V4 + transforms", "kl_mean": 0.25}],
        "best_uniform": {"name": "K4V4 + transforms", "difference": {"mean": -0.2375, "low": -0.3, "high": -0.2}},
    })  # fmt: skip
    profile = result.profile.model_copy(update={"quality": quality})
    result = replace(result, profile=profile, evaluation=None)
    own = number(quality.measured_kl.mean)
    assert f"KL {own} against 0.250 nats per token, by the search" in " ".join(summary_lines(result))


def test_why_there_is_no_fair_rival_is_said_in_every_form(make_result: MakeResult, tmp_path: Path) -> None:
    result = replace(make_result(), no_best_uniform="profile.json stands alone")
    sentence = "The best uniform of the search is not beside the profile: profile.json stands alone."
    assert sentence in Page(write_bench_report(result, tmp_path).read_text()).text
    assert sentence in " ".join(summary_lines(result))
    assert json.loads((tmp_path / JSON).read_text())["no_best_uniform"] == "profile.json stands alone"


def with_failing_gates(result: BenchResult) -> BenchResult:
    """The profile's server keeps every prompt in its cache and has a smaller pool than was asked for."""
    profile = next(each for each in result.schemes if each.name == "profile")
    cached = tuple(
        replace(one, sent=tuple(replace(request, cached_tokens=request.prompt_tokens) for request in one.sent))
        for one in profile.run.results
    )
    gates = (*all_gates(cached, 1e4, ""), kv_pool_gate(10_000, 8_000))
    failing = replace(profile, run=replace(profile.run, results=cached), gates=gates)
    return replace(result, schemes=tuple(failing if each is profile else each for each in result.schemes))


def test_a_failing_gate_reads_as_a_failure_with_what_to_do_in_every_form(
    make_result: MakeResult, tmp_path: Path
) -> None:
    result = with_failing_gates(make_result())
    failed = {gate.name: gate.way_out for gate in result.schemes[1].gates if gate.verdict == "failed"}
    assert set(failed) == {"prompts were new to the server", "the KV pool is as large as asked"}
    assert "FAILED" not in write_bench_report(make_result(), tmp_path).read_text()
    text = write_bench_report(result, tmp_path).read_text()
    page, markdown = Page(text), (tmp_path / MARKDOWN).read_text().replace("\\", "")
    found = json.loads((tmp_path / JSON).read_text())
    lines = " ".join(" ".join(summary_lines(result, 80)).split())
    assert all(len(line) <= 80 for line in summary_lines(result, 80))
    for name, way_out in failed.items():
        for form in (" ".join(page.text.split()), markdown, lines):
            assert f"profile: {name}: " in form and f"hat to do: {way_out}" in form
    assert found["ways_out"] == [*failed.values()] and len(found["problems"]) == 2
    marked = re.findall(r'<td class="failed">(.*?)</td>', text)
    assert marked == ["FAILED"] * 4, "both gates in the table of all, and in that of what did not pass"
    assert text.index("use no figure") < text.index("Side by side")


def test_every_gate_has_a_way_out(make_result: MakeResult) -> None:
    gates = [*make_result().schemes[0].gates, kv_pool_gate(1, 1)]
    assert len(gates) == 7 and all(len(gate.way_out) > 20 for gate in gates)


HOST = {MEMORY: 5 * 2.0**20}
BOTH = {**HOST, GPU_MEMORY: 7 * 2.0**20}


@pytest.mark.parametrize(
    ("usages", "kind", "expected"),
    [
        ([BOTH, BOTH, BOTH], "GPU", "7 / 7"),
        ([HOST, HOST, HOST], "host", "5 / 5"),
        ([HOST, BOTH, BOTH], "GPU", "- / 7"),
        ([BOTH, HOST, BOTH], "GPU", "7 / 7"),
        ([BOTH, BOTH, HOST], "GPU", "7 / -"),
        ([HOST, BOTH, HOST], "GPU", "- / -"),
        ([{}, {}, {}], "host", "- / -"),
    ],
)
def test_memory_is_of_one_kind_in_all_rounds(
    make_result: MakeResult, usages: list[dict[str, float]], kind: str, expected: str
) -> None:
    result = make_result()
    schemes = []
    for each, seen in zip(result.schemes, (usages, [HOST] * 3), strict=False):
        rounds = [one for one in each.run.results if one.load.kind == "stability"]
        looked = tuple(replace(one, usage=usage) for one, usage in zip(rounds, seen, strict=True))
        schemes.append(replace(each, run=replace(each.run, results=looked)))
    (table,) = report_tables(replace(result, schemes=tuple(schemes)))["stability"]
    assert table.headers[-1] == f"{kind} memory MiB first / last"
    assert [row[-1] for row in table.rows] == [expected, "5 / 5" if kind == "host" else "- / -"]


def test_the_ablation_has_every_group_of_its_design(make_result: MakeResult, tmp_path: Path) -> None:
    groups = {letter: each.scheme for each in make_result().schemes if (letter := GROUPS.get(each.name))}
    assert sorted(groups) == list("ABCDEFG")
    assert groups["G"].profile.defaults.k.symmetric
    assert not groups["C"].profile.defaults.k.symmetric
    keys, exact = groups["F"].profile.defaults.k, groups["F"].profile.window
    assert (keys.granularity, keys.group_size, exact) == ("per_channel", 32, ExactWindow(32))
    sizes = [groups[letter].bytes_per_token for letter in "ABCD"]
    assert sizes == sorted(sizes, reverse=True)
