"""The report of a benchmark that was made by hand: nothing lost, nothing let through, the same in all its forms."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from page_reader import Page
from transformers import AutoConfig

from kvtuner.bench.ablation import ABLATION, GROUPS
from kvtuner.bench.client import RequestResult
from kvtuner.bench.gates import all_gates
from kvtuner.bench.hardware import GPU_MEMORY, MEMORY
from kvtuner.bench.load_metrics import LoadResult, MeasurementCost, SchemeRun
from kvtuner.bench.load_target import ServerRecord
from kvtuner.bench.loads import Capacity, LoadOptions, plan_loads
from kvtuner.calibration.model_loading import DEMO_MODEL, ModelSource, read_shape
from kvtuner.evaluation.cache_scheme import K4V4_PER_CHANNEL
from kvtuner.evaluation.scheme_registry import named_schemes
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.exported_configs.profile.evaluation_record import (
    BackendRecord,
    Cell,
    CellResult,
    DataRecord,
    Evaluation,
    ResultProvenance,
    SchemeRecord,
)
from kvtuner.report.bench_report import JSON, MARKDOWN, report_tables, summary_lines, write_bench_report
from kvtuner.report.bench_result import NO_LOADS, BenchResult, SchemeResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import ProfileOf

    MakeResult = Callable[..., BenchResult]

HOSTILE = """"'><script src="//evil.example/x.js">alert(1)</script>|`*"""
RECORD = ServerRecord(
    "demo", 1, "0.5.23", "bfloat16", "auto", None, None, "cpu", 1, 1, 9_000, 16, 8_000, None, False
)  # fmt: skip


def answered(slowness: float) -> SchemeRun:
    loads, left_out = plan_loads(LoadOptions(repeats=2, rounds=3), Capacity(8_000, 9_000, 16))
    found = []
    for load in loads:
        gaps = (0.01 * slowness,) * (load.output_tokens - 1)
        first = 1e-4 * load.prompt_tokens * slowness
        one = RequestResult(
            load.prompt_tokens,
            load.output_tokens,
            load.output_tokens,
            load.output_tokens,
            0,
            0.0,
            first,
            first + sum(gaps),
            gaps,
            None,
        )
        cost = MeasurementCost(10.0, 0.2, 1.0)
        found.append(LoadResult(load, (one,) * load.requests, {"host_memory_bytes": 2.0**30}, cost))
    return SchemeRun(tuple(found), tuple(left_out))


@pytest.fixture(scope="module")
def make_result(profile_of: ProfileOf) -> Callable[..., BenchResult]:
    config = AutoConfig.from_pretrained(DEMO_MODEL)
    profile = profile_of(config, [LayerQuantization(4, 4)] * config.num_hidden_layers)
    shape = read_shape(ModelSource(model="demo"))
    schemes = named_schemes(["bf16", "profile", *ABLATION[1:]], shape, profile)

    def make(*, refusal: str = "per-channel quantization needs tail pages", name: str = "demo") -> BenchResult:
        results = []
        for number, scheme in enumerate(schemes):
            if scheme.name == K4V4_PER_CHANNEL:
                results.append(SchemeResult(scheme, refused=refusal))
                continue
            run = answered(1 + number / 10)
            results.append(SchemeResult(scheme, RECORD, run, tuple(all_gates(run.results, 1e4, "")), 7_000_000))
        model = profile.model.model_copy(update={"id": name})
        provenance = ResultProvenance(
            kvtuner_version="0", command="kvtuner bench", machine="a machine", torch="2", transformers="5", seed=0
        )
        evaluation = Evaluation(
            evaluation_version=1,
            profile_digest=profile.digest,
            model=model,
            host=BackendRecord(kind="transformers", read_plan="decode", reads=None, version=None, hit_share=None),
            data=DataRecord(corpus="demo", token_ids_sha256=profile.digest, is_unseen=True),
            subjects=tuple(SchemeRecord(name=w.name, bytes_per_token=w.bytes_per_token or 1) for w in schemes),
            cells=(kl_cell([w.name for w in schemes if w.is_local and w.name != "bf16"]),),
            making=provenance,
        )
        return BenchResult(profile, model, tuple(results), evaluation, provenance, ("--device", "cpu"))

    return make


def kl_cell(names: list[str]) -> Cell:
    results = tuple(
        CellResult(subject=name, mean=0.01 * (i + 1), low=0.005, high=0.2, failures=0) for i, name in enumerate(names)
    )
    return Cell(
        level="likelihood", measure="kl_nats_per_token", task=None, num_tokens=512, position=0, units=12, count=99,
        flag=None, results=results, differences=(),
    )  # fmt: skip


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
    assert "needs tail pages" in page.text
    assert "needs tail pages" in text
    assert len(list(tmp_path.glob("*.png"))) == page.names().count("img") == 4
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
    assert result.problems() == ["fp8: not served: out of memory"]
    assert any("FAILED  fp8: not served" in line for line in summary_lines(result))


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
    assert "--kvtuner-axis-key" in groups["F"].server_flags(tmp_path)
    sizes = [groups[letter].bytes_per_token for letter in "ABCD"]
    assert sizes == sorted(sizes, reverse=True)
