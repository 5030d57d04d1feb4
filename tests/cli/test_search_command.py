from __future__ import annotations

import itertools
import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
import transformers

from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.precision import PrecisionPair

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import ModelFolder, RunCommand, Search

pytestmark = pytest.mark.slow

SMALL = ("--sequence-length", "64", "--sequences", "2,2,3", "--fisher-draws", "1")
OUTPUTS = {
    "profile-3bit.json", "report-3bit/report.html", "report-5bit/report-data.json", "sensitivity.json", "study.db",
    "events.jsonl",
}  # fmt: skip


@pytest.mark.parametrize("index", [0, 1, 2, *(pytest.param(index, marks=pytest.mark.full) for index in range(3, 7))])
def test_the_whole_command_line_works_on_models_that_nobody_here_made(
    index: int, families: tuple[str, ...], run: RunCommand, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path
) -> None:
    model, out = model_folder(families[index]), tmp_path / "run"
    profiles = [out / "profile-3bit.json", out / "profile-5bit.json"]

    def facts(*args: Any) -> Any:
        status, stdout, stderr = run(*args, "--json")
        assert status == 0, stderr
        return json.loads(stdout)

    measured = ("--model", model, "--data", corpus_file, *SMALL, "--out", out)
    search = ("search", *measured, "--budget", "3bit", "5bit", "--trials", "6", "--no-report")
    plan = facts(*search, "--dry-run")
    assert not out.exists()
    assert facts("calibrate", *measured)["isolated_kl"] > 0
    results = facts(*search)
    assert all(result["forward_passes"]["calibration"] == 0 for result in results), "calibrated twice"
    for name, result, budget in zip(profiles, results, (3, 5), strict=True):
        profile = load_profile(name)
        assert profile.mean_bits <= budget
        assert profile.digest == result["digest"]
        assert profile.to_geometry().as_dict() == plan["geometry"]
    assert [row["valid"] for row in facts("validate", *profiles, "--model", model)] == [True, True]
    assert [row["asked"] for row in facts("show", out)] == ["3bit", "5bit"]
    difference = facts("diff", *profiles)
    assert difference["layers"]
    assert difference["bytes_per_token"] == [result["budget"]["bytes_per_token"] for result in results]
    assert facts("diff", profiles[0], profiles[0])["layers"] == []
    assert run("report", out)[0] == 0
    names = {str(file.relative_to(out)) for file in out.rglob("*")}
    assert names >= OUTPUTS
    assert any(name.endswith(".png") for name in names)


def test_the_same_seed_gives_the_same_profile_bytes(
    search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More trials than warm starts, so that races, the sampler and the surrogate take part; then two at a time.
    first = search(tmp_path / "a", "--budget", "3bit", "--seed", "7", trials=40)
    for module in ("forward.simulator", "isolated.forwards"):
        monkeypatch.setattr(f"kvtuner.calibration.{module}.num_workers", lambda _: 2)
    second = search(tmp_path / "b", "--budget", "3bit", "--seed", "7", trials=40)
    assert first["profile"] != second["profile"]
    assert (tmp_path / "a/profile.json").read_bytes() == (tmp_path / "b/profile.json").read_bytes()


def test_a_profile_names_no_path_of_the_machine(search: Search, tmp_path: Path) -> None:
    search(tmp_path / "run", "--budget", "3bit")
    text = (tmp_path / "run/profile.json").read_text()
    assert str(tmp_path.parent) not in text
    assert '"/' not in text


def test_several_budgets_share_one_calibration(search: Search, tmp_path: Path) -> None:
    results = search(tmp_path / "run", "--budget", "3bit", "4.5bpe", "--budget", "60%")
    assert [result["profile"].rsplit("/", 1)[1] for result in results] == [
        "profile-3bit.json",
        "profile-4.5bpe.json",
        "profile-60pct.json",
    ]
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("statistics") == 1
    profiles = [load_profile(result["profile"]) for result in results]
    assert profiles[0].mean_bits <= 3
    assert profiles[1].effective_bits <= 4.5
    assert profiles[2].bytes_per_token() <= 0.6 * profiles[2].to_geometry().bf16_bytes_per_token()


def test_a_later_budget_does_not_calibrate_again(search: Search, tmp_path: Path) -> None:
    search(tmp_path / "run", "--budget", "3bit")
    table = (tmp_path / "run/sensitivity.json").read_bytes()
    results = search(tmp_path / "run", "--budget", "3bit", "4bit")
    assert results[0]["forward_passes"]["calibration"] == 0
    assert (tmp_path / "run/sensitivity.json").read_bytes() == table


def test_a_nested_family_never_takes_bits_away(search: Search, tmp_path: Path) -> None:
    results = search(tmp_path / "run", "--budget", "2.5bit", "3.5bit", "6bit", "--nested", "--sampler", "none")
    profiles = [load_profile(result["profile"]) for result in results]
    for smaller, larger in itertools.pairwise(profiles):
        for low, high in zip(smaller.pairs, larger.pairs, strict=True):
            assert low.k_bits <= high.k_bits
            assert low.v_bits <= high.v_bits


def test_kept_layers_are_kept(search: Search, tmp_path: Path) -> None:
    search(tmp_path / "run", "--budget", "7bit", "--keep", "0:K8V8,1:K2V4")
    pairs = load_profile(tmp_path / "run/profile.json").pairs
    assert pairs[:2] == (PrecisionPair(8, 8), PrecisionPair(2, 4))


def test_a_hand_written_configuration_is_exported_as_it_is(search: Search, tmp_path: Path) -> None:
    result = search(tmp_path / "run", "--layers", "0:bf16,1-2:K4V2", trials=None)
    assert result["quality"][0]["winner"]["name"] == "hand-written"
    assert result["budget"]["asked"] == "0:K16V16,1-2:K4V2"
    expected = (PrecisionPair(16, 16), PrecisionPair(4, 2), PrecisionPair(4, 2))
    assert load_profile(tmp_path / "run/profile.json").pairs == expected


@pytest.mark.parametrize("flags", [("--score", "fisher"), ("--score", "e_o")])
def test_cheap_scores_skip_the_isolated_forwards(search: Search, tmp_path: Path, flags: tuple[str, ...]) -> None:
    search(tmp_path / "run", "--budget", "3bit", *flags)
    assert not (tmp_path / "run/isolated.jsonl").exists()


@pytest.mark.parametrize("flags", [
    ("--read-plan", "hit"), ("--read-plan", "cache"), ("--symmetric",), ("--k-group-size", "16", "--v-group-size", "8"),
    ("--groups",), ("--pairs",), ("--sampler", "tpe"), ("--sampler", "random"), ("--batch-size", "2"),
    ("--pp-size", "2"), ("--tp-size", "2"), ("--three-bits", "--pairs"), ("--transforms", "hadamard"),
])  # fmt: skip
def test_every_option_of_the_measurement_runs(search: Search, tmp_path: Path, flags: tuple[str, ...]) -> None:
    result = search(tmp_path / "run", "--budget", "4bit", *flags)
    assert load_profile(result["profile"]).mean_bits <= 4


def test_a_yaml_file_is_overlaid_by_flags(
    run: RunCommand, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {model_folder('llama-gqa')}\ndata: {corpus_file}\nbudget: [5bit]\nsequence-length: 64\n"
        "sequences: [2, 2, 2]\ntrials: 3\nfisher_draws: 1\nsampler: none\n"
    )
    status, out, err = run("search", "--config", file, "--out", tmp_path / "run", "--budget", "4bit", "--json")
    assert status == 0, err
    assert json.loads(out)["profile"].endswith("profile.json")
    assert load_profile(tmp_path / "run/profile.json").budget.asked == "4bit"


@pytest.mark.parametrize(("text", "complaint"), [
    ("budgets: 4bit", "unknown flag 'budgets'"), ("sampler: best", "is none of"), ("trials: 0", "at least 1"),
    ("symmetric: maybe", "true or false"), ("- a", "must map"), ("a: [", "is not YAML"),
])  # fmt: skip
def test_a_bad_yaml_file_is_refused_by_name(run: RunCommand, tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    status, _, err = run("search", "--config", file, "--model", "demo")
    assert status == 2
    assert complaint in err


def test_a_dry_run_loads_no_weights(run: RunCommand, model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = model_folder("llama-gqa")
    config_only = tmp_path  # a folder with the configuration alone
    (config_only / "config.json").write_bytes((folder / "config.json").read_bytes())
    command = ("search", "--model", config_only, "--budget", "4bit", "3bit", "--dry-run")
    plan = json.loads(run(*command, "--json")[1])
    by_name = {row["name"]: row for row in plan["uniform"]}
    assert [by_name[name]["inside"] for name in ("K4V4", "K4V2")] == [["4bit"], ["4bit", "3bit"]]
    assert by_name["bf16"]["bytes_per_token"] == 3 * 2 * (2 * 16) * 2  # layers, sides, heads x head_dim, bytes
    assert by_name["K8V4"]["bytes_per_token"] == 3 * ((32 + 8 + 8) + (16 + 8 + 8))  # codes, scale words, padding
    assert plan["forward_tokens"]["total"] > 0
    assert plan["window_bytes_per_request"] == 32 * (by_name["bf16"]["bytes_per_token"] + 3 * 4)  # and positions
    status, out, _ = run(*command)
    copies = f"each request also keeps the last 32 tokens exact: {plan['window_bytes_per_request']:,} bytes"
    assert (status, copies in out, out.count("smallest budget for this model: 2bit\n")) == (0, True, 1)
    assert "exact" not in run(*command, "--residual-length", "0")[1]


def test_a_dry_run_foretells_the_forward_tokens(
    search: Search, run: RunCommand, model_folder: ModelFolder, tmp_path: Path
) -> None:
    result = search(tmp_path / "run", "--budget", "3bit", trials=20)
    status, out, _ = run(
        "search", "--model", model_folder("llama-gqa"), "--budget", "3bit", "--dry-run", "--json", "--trials", "20",
        "--sequence-length", "64", "--sequences", "2,2,3", "--fisher-draws", "1",
    )  # fmt: skip
    assert status == 0
    total = json.loads(out)["forward_tokens"]["total"]
    assert 0.3 * total <= sum(result["forward_passes"].values()) * 64 <= total


@pytest.mark.parametrize("ranks", [("--tp-size", "2"), ("--tp-size", "2", "--pp-size", "2")])
def test_bytes_on_a_rank_keep_the_budget_of_a_rank(
    search: Search, run: RunCommand, tmp_path: Path, ranks: tuple[str, ...]
) -> None:
    result = search(tmp_path / "run", "--budget", "120B/token", *ranks, trials=2)
    budget = result["budget"]
    assert 96 * 2 / 3 <= budget["bytes_per_token"] <= 120  # 32 bytes per layer at 2 bits, three layers or two
    assert budget["bf16_bytes_per_token"] == (192 if len(ranks) == 2 else 128)
    assert budget["tokens_per_gib"] == 2**30 // budget["bytes_per_token"]
    for row in (result["quality"][0]["winner"], *result["quality"][0]["baselines"]):
        assert row["fits_budget"] == (row["bytes_per_token"] <= 120), row["name"]
    text = run("report", tmp_path / "run")[1]
    stored = f"{budget['bytes_per_token']} (bf16 {budget['bf16_bytes_per_token']}) on a rank"
    assert stored in next(line for line in text.splitlines() if line.startswith("bytes per token"))
    profile = load_profile(tmp_path / "run/profile.json")
    assert profile.budget.bytes_per_token == profile.bytes_per_token() > budget["bytes_per_token"]


def test_a_dry_run_states_the_bytes_of_a_rank(run: RunCommand, model_folder: ModelFolder) -> None:
    command = ("search", "--model", model_folder("llama-gqa"), "--budget", "120B/token", "--tp-size", "2", "--dry-run")
    rows = {row["name"]: row for row in json.loads(run(*command, "--json")[1])["uniform"]}
    assert rows["bf16"]["bytes_per_token"] == 192
    assert [row["bytes_per_token"] <= 120 for row in rows.values()] == [bool(row["inside"]) for row in rows.values()]
    assert "on a rank of TP 2 x PP 1" in run(*command)[1]


def test_a_dry_run_of_a_hand_written_configuration_states_its_bytes_and_work(
    run: RunCommand, model_folder: ModelFolder
) -> None:
    command = ("search", "--model", model_folder("llama-gqa"), "--layers", "0:bf16,1:4,2:4", "--dry-run")
    plan = json.loads(run(*command, "--sequence-length", "64", "--sequences", "2,2,3", "--json")[1])
    (row,) = plan["hand_written"]
    assert row["name"] == "0:K16V16,1-2:K4V4"
    assert row["bytes_per_token"] == 128 + 2 * 2 * 32  # 2 heads x 16 channels: 16 bytes of codes, 8 of scales, padding
    # 2, 3, 4, 8 and 16 bits of keys by those of values on one sequence; on the other one for each packed width at most.
    assert plan["forward_tokens"]["uniform table"] == (25 + 4) * 64
    assert plan["forward_tokens"]["hand-written"] == 2 * 64 and plan["forward_tokens"]["validation"] > 0
    assert "hand-written" in run(*command)[1]


def test_trials_of_the_same_target_go_on_and_are_counted(search: Search, tmp_path: Path) -> None:
    for num_trials, counted in ((2, 2), (4, 4), (3, 4)):  # of the study, not of the last command
        search(tmp_path / "run", "--budget", "3bit", trials=num_trials)
        record = load_profile(tmp_path / "run/profile.json").provenance.search
        assert record is not None
        assert record.trials == counted


def test_the_stored_quality_is_over_small_and_large_positions_alike(search: Search, tmp_path: Path) -> None:
    result = search(tmp_path / "run", "--budget", "3bit", trials=2)
    profile = load_profile(tmp_path / "run/profile.json")
    quality, calibration = profile.quality, profile.provenance.calibration
    assert quality is not None
    pooled, small, large = result["quality"]
    assert quality.measured_kl.mean == pytest.approx(pooled["winner"]["kl"]["mean"], rel=1e-4)
    mean = (small["winner"]["kl"]["mean"] + large["winner"]["kl"]["mean"]) / 2
    assert quality.measured_kl.mean == pytest.approx(mean, rel=1e-4)
    assert quality.kl_p99 == pytest.approx(max(small["winner"]["kl_p99"], large["winner"]["kl_p99"]), rel=1e-4)
    reference = (small["reference_perplexity"] * large["reference_perplexity"]) ** 0.5
    assert quality.reference_perplexity == pytest.approx(reference, rel=1e-4)
    for stored, *rows in zip(quality.baselines, small["baselines"], large["baselines"], strict=True):
        assert stored.kl_mean == pytest.approx(sum(row["kl"]["mean"] for row in rows) / 2, rel=1e-4)
    assert calibration is not None
    assert calibration.position_range == (0, 511), "not the positions of the model's context"
    assert quality.split_tokens == 3 * 48, "not the scored tokens of the report split"
    best = next(row["name"] for row in small["baselines"] if row["transforms"])
    assert best in ("K4V2", "K3V3", "K2V4")
    usual = {("K8V8", False), ("K4V4", False), ("fp8", False)}
    assert {(row["name"], row["transforms"]) for row in small["baselines"]} == usual | {(best, False), (best, True)}
    predicted = next(row["predicted"] for row in result["additivity"] if row["name"] == "winner")
    assert quality.predicted_kl == pytest.approx(predicted, rel=1e-4)


def test_beside_a_layer_that_is_kept_the_rival_is_the_uniform_of_its_pair(search: Search, tmp_path: Path) -> None:
    result = search(tmp_path / "run", "--budget", "6bit", "--keep", "0:K4V4")
    rows = {(row["name"], row["transforms"]) for row in result["quality"][0]["baselines"]}
    assert rows == {("K8V8", False), ("K4V4", False), ("K4V4", True), ("fp8", False)}
    quality = load_profile(tmp_path / "run/profile.json").quality
    assert quality is not None and quality.best_uniform is not None
    assert quality.best_uniform.name.startswith("K4V4")


def test_the_gain_over_the_exact_solution_is_reported(search: Search, tmp_path: Path) -> None:
    result = search(tmp_path / "run", "--budget", "3bit", report=True)
    exact = next(row for row in result["additivity"] if row["name"] == "exact")
    trials = json.loads((tmp_path / "run/report-data.json").read_text())["payload"]["trials"]
    best = min(trial["value"] for trial in trials if trial["value"] is not None)
    gain, error = result["refinement"]["mean"], result["refinement"]["standard_error"]
    assert gain == pytest.approx(exact["measured"] - best)
    won = next(row for row in result["additivity"] if row["name"] == "winner")
    assert won["measured"] == pytest.approx(best if gain > error else exact["measured"])
    assert "the exact solution" in (tmp_path / "run/report.html").read_text()


def test_a_hand_written_configuration_of_any_length_becomes_a_profile(
    run_search: RunCommand, model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder("llama-gqa", num_hidden_layers=40)
    pairs = ["K8V4" if layer % 2 else "K4V2" for layer in range(40)]
    text = ",".join(f"{layer}:{pair}" for layer, pair in enumerate(pairs))
    assert len(text) > 256  # of a field of the profile
    status, out, err = run_search(
        "--model", folder, "--sequence-length", "32", "--sequences", "2,2,2", "--score", "fisher", "--layers", text,
        "--out", tmp_path / "run", "--json", "--no-report",
    )  # fmt: skip
    assert status == 0, err
    profile = load_profile(json.loads(out)["profile"])
    assert [str(pair) for pair in profile.pairs] == pairs
    assert profile.budget.asked.startswith("40 layers by hand, sha256:")


def test_the_report_may_be_left_to_a_command_of_its_own(
    search: Search, run: RunCommand, run_search: RunCommand, tmp_path: Path
) -> None:
    result = search(tmp_path / "run", "--budget", "3bit", trials=2)
    assert result["report"] is None
    assert not list((tmp_path / "run").glob("*.png"))
    assert not (tmp_path / "run/report.html").exists()
    status, out, _ = run_search("--budget", "3bit", "--trials", "2", "--out", tmp_path / "run", "--no-report")
    assert status == 0
    assert f"kvtuner report {tmp_path / 'run'}" in out
    assert run("report", tmp_path / "run")[0] == 0
    assert (tmp_path / "run/report.html").exists()


def test_pairs_are_compared_with_the_sum_of_their_sides_where_asked_for(
    search: Search, run: RunCommand, tmp_path: Path
) -> None:
    assert search(tmp_path / "plain", "--budget", "3bit", trials=2)["pair_additivity"] is None
    additivity = search(tmp_path / "pairs", "--budget", "3bit", "--pairs", trials=2)["pair_additivity"]
    assert additivity["num_pairs"] == 3 * 16
    assert 0 < additivity["median"] <= additivity["maximum"]
    text = " ".join(run("report", tmp_path / "pairs", "--verbose")[1].split())
    assert "e_o differs from the sum of its sides by" in text
    assert "K/V pairs" in (tmp_path / "pairs/report.html").read_text()


def test_what_makes_the_model_overflow_is_left_out_and_said_and_the_search_goes_on(
    run_search: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtuner.calibration.forward import simulator

    healthy = simulator.quantized_attention

    def overflowing(specs: Any, plan: Any) -> Any:
        listen = healthy(specs, plan)
        two_bits = sum(spec is not None and spec.k is not None and spec.k.bits == 2 for spec in specs.values())
        return (lambda layer, call: listen(layer, call) * float("inf")) if two_bits > 1 else listen

    monkeypatch.setattr(simulator, "quantized_attention", overflowing)
    arguments = ("--trials", "12", "--out", tmp_path / "run", "--budget", "3.5bit", "--json")
    status, out, err = run_search(*arguments)
    assert status == 0, err
    left_out = [line for line in err.splitlines() if " is left out: " in line]
    assert any("uniform K2V8 is left out: a measured KL must be finite, but is" in line for line in left_out)
    assert any(re.search(r"trial \d+ of 3.5bit is left out: .* from layer 0 on \(K2V", line) for line in left_out)
    profile = load_profile(json.loads(out)["profile"])
    assert sum(pair.k_bits == 2 for pair in profile.pairs) <= 1
    assert not any("K2V2" in baseline.name for baseline in profile.quality.baselines)
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "left out" for event in events) == len(left_out)
    status, again, err = run_search(*arguments)
    assert status == 0, err
    assert json.loads(again)["digest"] == json.loads(out)["digest"]
    assert "trial" not in "".join(line for line in err.splitlines() if " is left out: " in line), "told once"


def test_every_long_step_has_a_bar_and_says_what_it_cost(
    run_search: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    arguments = ("--trials", "3", "--out", tmp_path / "run", "--no-report", "--json")
    monkeypatch.setattr(transformers.utils.logging, "_tqdm_active", True)
    status, _, err = run_search(*arguments, "--budget", "3bit")
    assert status == 0, err
    for bar in (
        "Loading weights", "hashing weights", "statistics", "candidates", "isolated KL", "uniform K x V", "refine 3bit",
        "validation",
    ):  # fmt: skip
        assert f"{bar}: 100%" in err, bar
    assert "forward passes" in err
    assert "the exact solution" in err
    status, _, err = run_search(*arguments, "--budget", "3bit", "4bit", "--nested", "--sampler", "none")
    assert status == 0, err
    assert "nested 3bit: predicted score" in err
    assert "nested 4bit: predicted score" in err


def test_without_out_the_folder_is_named_by_model_and_budget(
    run_search: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run_search("--trials", "2", "--budget", "3bit", "--score", "fisher", "--no-report", "--json")
    assert status == 0, err
    assert (tmp_path / "runs/llama-gqa-3bit/profile.json").exists()
    assert json.loads(out)["profile"] == "runs/llama-gqa-3bit/profile.json"


def test_a_search_goes_on_from_what_calibrate_measured(
    search: Search, run: RunCommand, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path
) -> None:
    arguments = ("--model", model_folder("llama-gqa"), "--data", corpus_file, *SMALL, "--out", tmp_path / "run")
    status, out, err = run("calibrate", *arguments, "--json")
    assert status == 0, err
    assert json.loads(out)
    assert run("calibrate", *arguments, "--dry-run")[0] == 0
    result = search(tmp_path / "run", "--budget", "3bit", trials=2)
    assert result["forward_passes"]["calibration"] == 0


@pytest.mark.parametrize("transforms", [False, True])
def test_a_uniform_that_takes_the_place_of_the_winner_says_so(
    search: Search, run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transforms: bool
) -> None:
    from kvtuner.evaluation.statistics import Interval
    from kvtuner.pipeline.stages import baseline_comparison

    real, same, worse = baseline_comparison._baselines, Interval(0.0, 0.0, 0.0), Interval(1.0, 0.5, 1.5)
    monkeypatch.setattr(baseline_comparison, "kl_difference", lambda one, other, _: same if one == other else worse)
    monkeypatch.setattr(
        baseline_comparison,
        "_baselines",
        lambda *arguments: [c for c in real(*arguments) if not c.specs or c.has_transforms == transforms],
    )
    result = search(tmp_path / "run", "--budget", "4bit", "--sequences", "2,2,6", trials=2)
    winner = result["quality"][0]["winner"]
    assert winner["transforms"] == transforms
    assert result["uniform_winner"] == winner["name"] + (" + transforms" if transforms else "")
    assert f"uniform {result['uniform_winner']}" in run("report", tmp_path / "run", "--verbose")[1]
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["asked"] for event in events if event["event"] == "override"] == ["4bit"]
