"""What a search's report says fits a GPU is what a plan says of it, and what is asked wrongly is refused by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from page_reader import Page
from transformers import AutoConfig

from kvtuner.errors import KVTunerError, OptionError
from kvtuner.exported_configs.profile.build import LayerQuantization, write_profile
from kvtuner.pipeline.planning.capacity_plan import make_plan
from kvtuner.pipeline.planning.fit_options import FitOptions
from kvtuner.pipeline.planning.plan_options import PlanOptions
from kvtuner.pipeline.planning.report_fit import gpu_fit
from kvtuner.precision import ExactWindow
from kvtuner.report.layer_strip import LayerRow
from kvtuner.report.search_data import DATA_FILE, BudgetOutcome, ReportData
from kvtuner.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import ProfileOf, RunCommand

    HubModel = Callable[..., Path]
    MakeRun = Callable[..., ReportData]


@pytest.fixture
def make_run(hub_model: HubModel, profile_of: ProfileOf, tmp_path: Path) -> MakeRun:
    """Write what a search of the Llama leaves for its report, with K4V4 or the bits given; returns its data."""

    def make(*bits: tuple[int, int], suffix: str = "", asked: str = "4bit", **budget: Any) -> ReportData:
        config = AutoConfig.from_pretrained(hub_model("llama"))
        layers = [LayerQuantization(*pair) for pair in bits or [(4, 4)] * config.num_hidden_layers]
        profile = profile_of(config, layers, window=ExactWindow(32))
        write_profile(tmp_path / f"profile{suffix}.json", profile)
        outcome = BudgetOutcome(
            asked, 4.0, 4.5, profile.bytes_per_token(), profile.bf16_bytes_per_token(), residual_length=32,
            window_bytes=profile.window_bytes(), **{"context_length": 32_768, **budget},
        )  # fmt: skip
        rows = tuple(
            LayerRow(layer, pair.k_bits, pair.v_bits, "none", "none") for layer, pair in enumerate(profile.pairs)
        )
        data = ReportData("tiny", "demo", "decode", "kl", outcome, rows, provenance=(("digest", profile.digest),))
        folder = RunFolder(tmp_path / f"report{suffix}" if suffix else tmp_path)
        folder.create()
        folder.write_checked(DATA_FILE, data.to_json())
        return data

    return make


@pytest.mark.parametrize(
    "options",
    [
        {"gpu": "H100"},
        {"gpu": "L40S", "tp_size": 2, "context_length": "8k", "concurrency": 16},
        {"memory": "80GiB", "tp_size": 2, "pp_size": 3, "weights": "20GiB"},
    ],
)
def test_it_is_what_a_plan_says_of_the_same_server(
    make_run: MakeRun, hub_model: HubModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    data, model = make_run(), str(hub_model("llama"))
    fit = gpu_fit(FitOptions(model=model, **options), data, tmp_path / "profile.json")
    plan = make_plan(PlanOptions(model=model, **{"context_length": 32_768, **options}))
    planned = {row.name: (row.bytes_per_token, row.tokens, (row.requests,)) for row in plan.schemes}
    found = {row.name: (row.bytes_per_token, row.tokens, row.requests) for row in fit.schemes}
    assert found == {"bf16": planned["bf16"], "fp8": planned["fp8"], "profile": planned["K4V4"]}
    assert fit.contexts == (plan.shape.context_length,) and found["bf16"][1] > 0


def test_the_fullest_stage_of_a_profile_limits_its_tokens(
    make_run: MakeRun, hub_model: HubModel, tmp_path: Path
) -> None:
    wide_first = make_run(*[(8, 8)] * 16, *[(2, 2)] * 16)
    options = FitOptions(model=str(hub_model("llama")), gpu="H100", pp_size=2, concurrency=8)
    *_, mixed = gpu_fit(options, wide_first, tmp_path / "profile.json").schemes
    *_, wide = gpu_fit(options, make_run(*[(8, 8)] * 32), tmp_path / "profile.json").schemes
    assert mixed.tokens == wide.tokens and mixed.bytes_per_token == wide.bytes_per_token


def test_what_is_not_given_is_the_searchs(make_run: MakeRun, hub_model: HubModel, tmp_path: Path) -> None:
    model, file = str(hub_model("llama")), tmp_path / "profile.json"
    asked = gpu_fit(FitOptions(model=model, gpu="H100"), make_run(tp_size=2, context_length=16_384), file)
    given = FitOptions(model=model, gpu="H100", tp_size=2, context_length=16_384)
    assert asked == gpu_fit(given, make_run(), file)
    assert "2 x H100 of 79.6 GiB (TP 2 x PP 1)" in asked.caption
    by_budget = gpu_fit(FitOptions(model=model, gpu="H100"), make_run(asked="40GiB@32x64k"), file)
    assert by_budget.contexts == (65_536,)


def test_a_limit_of_the_server_is_said_where_it_is_what_counts(
    make_run: MakeRun, hub_model: HubModel, tmp_path: Path
) -> None:
    model, data, file = str(hub_model("llama")), make_run(), tmp_path / "profile.json"
    limit = "a server by default runs no more at once; --concurrency counts more"
    short = gpu_fit(FitOptions(model=model, gpu="H200", context_length=128), data, file)
    assert short.caption.endswith(limit) and short.schemes[0].requests == (4096,)
    assert limit not in gpu_fit(FitOptions(model=model, gpu="H200", context_length=16_384), data, file).caption
    many = FitOptions(model=model, gpu="H200", context_length=128, concurrency=3000)
    assert limit not in gpu_fit(many, data, file).caption


def test_page_text_and_json_show_it(make_run: MakeRun, hub_model: HubModel, tmp_path: Path, run: RunCommand) -> None:
    make_run(suffix="-4bit")
    make_run(*[(2, 2)] * 32, suffix="-2bit")
    flags = ("--model", hub_model("llama"), "--gpu", "h100", "--tp", 2, "--context", "32k")
    status, out, err = run("report", tmp_path, *flags, "--json")
    assert status == 0, err
    two, four = json.loads(out)
    for found, folder in ((two, "report-2bit"), (four, "report-4bit")):
        text = " ".join(Page((tmp_path / folder / "report.html").read_text()).text.split())
        assert "requests of 32,768 tokens, with the profile's exact copies, on 2 x H100 of 79.6 GiB" in text
        assert "SGLang keeps" in text and "the weights take 7.5 GiB" in text
        *_, profile = found["fit"]["schemes"]
        assert f"{profile['tokens']:,}" in text and f"{profile['requests'][0]:,}" in text
    assert two["fit"]["schemes"][2]["tokens"] > four["fit"]["schemes"][2]["tokens"]
    status, out, _ = run("report", tmp_path / "report-4bit")
    plain = Page((tmp_path / "report-4bit" / "report.html").read_text()).text
    assert status == 0 and "kvtuner report --gpu NAME" in plain and "H100" not in plain + out


@pytest.mark.parametrize("name", [".", "report-4bit"])
def test_the_folder_of_one_budgets_report_finds_its_profile(
    make_run: MakeRun, hub_model: HubModel, tmp_path: Path, run: RunCommand, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make_run(suffix="-4bit")
    make_run(*[(2, 2)] * 32, suffix="-2bit")
    flags = ("--model", hub_model("llama"), "--gpu", "h100", "--json")
    both = json.loads(run("report", tmp_path, *flags)[1])
    monkeypatch.chdir(tmp_path / "report-4bit" if name == "." else tmp_path)
    status, out, err = run("report", name, *flags)
    assert status == 0, err
    assert json.loads(out)["fit"] == both[1]["fit"] != both[0]["fit"]


def test_text_shows_it_too(make_run: MakeRun, hub_model: HubModel, tmp_path: Path, run: RunCommand) -> None:
    make_run()
    status, out, err = run("report", tmp_path, "--model", hub_model("llama"), "--gpu", "h100")
    assert status == 0, err
    assert "on 1 x H100 of 79.6 GiB" in " ".join(out.split()) and "requests of 32k" in out


@pytest.mark.parametrize("name", ["tp_size", "context_length", "weights", "model"])
def test_what_no_gpu_reads_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=rf"--{name.replace('_', '-')} is of what fits a GPU; give --gpu too"):
        FitOptions(**{name: "demo" if name == "model" else 4096})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "the profile is for a model of a folder called tiny; give --model FOLDER"),
        ({"gpu": "T4"}, "does not fit: each rank's weights take"),
        ({"model": "qwen"}, "num_layers"),
        ({"context_length": 1 << 20}, "context"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(
    make_run: MakeRun, hub_model: HubModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    data = make_run()
    options = {"gpu": "H100", "model": "llama", **changes}
    if options["model"] is not None:
        options["model"] = str(hub_model(options["model"]))
    with pytest.raises(KVTunerError, match=message):
        gpu_fit(FitOptions(**options), data, tmp_path / "profile.json")


def test_another_profile_in_the_reports_folder_is_refused(
    make_run: MakeRun, hub_model: HubModel, tmp_path: Path
) -> None:
    data = make_run()
    make_run(*[(2, 2)] * 32)
    with pytest.raises(KVTunerError, match="is not the profile of this report"):
        gpu_fit(FitOptions(gpu="H100", model=str(hub_model("llama"))), data, tmp_path / "profile.json")
