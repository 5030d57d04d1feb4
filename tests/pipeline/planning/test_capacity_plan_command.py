"""``kvtuner plan`` through the command line: text of 80 columns, JSON, a page, and refusals with the way out."""

from __future__ import annotations

import json
import math
import shlex
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from profile_samples import layers_of, make_profile

from kvtuner.calibration.model_loading import DEMO_MODEL, ModelSource, read_shape
from kvtuner.exported_configs.profile.build import dump_profile, uniform_profile
from kvtuner.precision import PrecisionPair

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import RunCommand
    from hub_server import LoopbackHub

CONFIG = (DEMO_MODEL / "config.json").read_bytes()
TOTAL = 9 << 30


def index_of(total: int) -> bytes:
    return json.dumps({"metadata": {"total_size": total}, "weight_map": {}}).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with the demo's configuration and an index of 9 GiB."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes(CONFIG)
    (tmp_path / "model" / "model.safetensors.index.json").write_bytes(index_of(TOTAL))
    return tmp_path / "model"


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpu", "t4"),
        ("--gpu", "H100", "--tp", "2", "--context", "4k", "--concurrency", "9000"),
        ("--memory", "80GiB", "--pp", "3", "--context-length", "8192", "--concurrency", "99999999"),
        (
            "--gpu",
            "L4",
            "--memory",
            "22.5GiB",
            "--concurrency",
            "3500",
            "--budget",
            "3.123456789bit",
            "40.25GiB@999x4k",
        ),
        (
            "--gpu",
            "L4",
            "--residual-length",
            "1024",
            "--sinks",
            "64",
            "--concurrency",
            "5000",
            "--no-trust-remote-code",
        ),
    ],
)
def test_the_text_fits_80_columns_and_says_what_json_says(run: RunCommand, flags: tuple[str, ...]) -> None:
    status, out, err = run("plan", "--model", "demo", *flags)
    assert status == 0 and err == ""
    assert [line for line in out.splitlines() if len(line) > 80] == []
    status, text, _ = run("plan", "--model", "demo", *flags, "--json")
    plan = json.loads(text)
    assert status == 0
    for row in plan["schemes"]:
        (line,) = [line for line in out.splitlines() if row["name"] in line.split()[:2]]
        assert f"{row['tokens']:,}" in line and f"{row['requests']:,}" in line
    assert (plan["search"] is None) == (plan["search_command"] is None)
    if plan["search_command"]:
        joined = out.replace("\\\n", " ")
        assert " ".join(shlex.split(plan["search_command"])) in " ".join(joined.split())
        assert f"{plan['search']['forward_tokens']:,} tokens" in " ".join(out.split())


def test_the_command_that_it_names_is_a_search_that_can_be_run(run: RunCommand) -> None:
    status, out, _ = run(
        "plan", "--model", "demo", "--gpu", "T4", "--tp", "2", "--context", "4k", "--concurrency", "3500",
        "--sinks", "4", "--json",
    )  # fmt: skip
    plan = json.loads(out)
    assert status == 0 and plan["advice"]["choice"] == "search"
    program, *words = shlex.split(plan["search_command"])
    assert program == "kvtuner"
    status, out, err = run(*words, "--dry-run", "--json")
    work = json.loads(out)
    assert status == 0, err
    assert work["forward_tokens"]["total"] == plan["search"]["forward_tokens"]
    assert (work["context_length"], work["tp_size"]) == (4096, 2)
    assert "the first 4 tokens" in work["window"]
    (budget,) = work["budgets"]
    assert budget["asked"] == plan["advice"]["budgets"][0]
    assert float(budget["smallest"].partition("GiB")[0]) <= float(budget["asked"].partition("GiB")[0])


def test_a_page_replaces_a_page_and_no_other_file(run: RunCommand, tmp_path: Path) -> None:
    page, other = tmp_path / "plan.html", tmp_path / "notes.txt"
    other.write_text("mine")
    for _ in range(2):
        status, out, _ = run("plan", "--model", "demo", "--gpu", "T4", "--html", page)
        assert status == 0 and out.endswith(f"page: {page}\n") and "<svg" in page.read_text()
    status, out, _ = run("plan", "--model", "demo", "--gpu", "T4", "--html", page, "--json")
    assert json.loads(out)["page"] == str(page)
    status, _, err = run("plan", "--model", "demo", "--gpu", "T4", "--html", other)
    assert status == 2 and "is no HTML page" in err and other.read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--gpu", "K80"), "knows no GPU 'K80', only T4, L4"),
        ((), "give --gpu, such as H100, or --memory"),
        (("--gpu", "H100", "--context", "9k"), "--context-length 9216 exceeds the 8192 positions"),
        (("--gpu", "H100", "--context", "lots"), "such as 32768 or 32k, not 'lots'"),
        (("--gpu", "H100", "--tp", "3"), "tp_size 3"),
        (("--gpu", "H100", "--budget", "4"), "a budget is written 4bit"),
        (("--gpu", "H100", "--weights", "500GiB"), "does not fit: each rank's weights take 500.0 GiB"),
        (("--gpu", "H100", "--weights", "100GiB"), "take --tp-size 2"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_way_out(
    run: RunCommand, folder: Path, flags: tuple[str, ...], text: str
) -> None:
    status, out, err = run("plan", "--model", folder, *flags)
    assert status == 2 and out == ""
    assert text in err and err.count("\n") == 1, err


def test_a_model_is_needed(run: RunCommand) -> None:
    status, _, err = run("plan", "--gpu", "T4")
    assert status == 2 and "give --model, as in: kvtuner plan --model Qwen/Qwen2.5-7B-Instruct --gpu H100" in err


def test_weights_without_safetensors_files_are_asked_for(run: RunCommand, folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    status, _, err = run("plan", "--model", folder, "--gpu", "T4")
    assert (
        status == 2 and "no safetensors files that can be counted; give the bytes" in err and "--weights 14GiB" in err
    )
    status, out, _ = run("plan", "--model", folder, "--gpu", "T4", "--weights", "2GiB", "--json")
    assert status == 0 and json.loads(out)["weights"]["served_bytes"] == 2 << 30


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_model_of_the_hub_is_counted_at_its_revision_and_no_weights_are_fetched(
    run: RunCommand, hub: LoopbackHub
) -> None:
    files = {"config.json": CONFIG, "model-00001-of-00001.safetensors": b"0" * 1000}
    repo = hub.repo("me/model", {**files, "model.safetensors.index.json": index_of(TOTAL)})
    commit = repo.refs["main"]
    repo.commit({**files, "model.safetensors.index.json": index_of(2 * TOTAL)})
    for revision, total in ((None, 2 * TOTAL), (commit, TOTAL)):
        flags = () if revision is None else ("--revision", revision)
        status, out, err = run("plan", "--model", "me/model", *flags, "--gpu", "H100", "--json")
        assert status == 0, err
        plan = json.loads(out)
        assert plan["weights"]["stored_bytes"] == total
        assert (f"--revision {revision}" in plan["search_command"]) == (revision is not None)
    assert not hub.requested("GET", r"00001\.safetensors")


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_hub_that_answers_something_else_names_the_weights_flag(run: RunCommand, hub: LoopbackHub) -> None:
    hub.repo("me/other", {"config.json": CONFIG, "model.safetensors.index.json": index_of(TOTAL)})
    hub.fail("GET", r"index\.json", body=b"<html>")
    status, _, err = run("plan", "--model", "me/other", "--gpu", "H100")
    assert status == 2 and "or give the bytes of its weights, such as --weights 14GiB" in err


def test_a_plan_a_search_and_a_profile_count_keys_of_indexes_alike(
    run: RunCommand, hub_model: Callable[..., Path], tmp_path: Path
) -> None:
    """SGLang keeps 128 channels in fp8 and a scale of 4 bytes, in each of DeepSeek V3.2's 61 layers."""
    folder, keys, tokens, gib = hub_model("deepseek-v32"), 61 * (128 + 4), 8 * 32_768, 2**30
    copies = Fraction(61 * 32 * (2 * (512 + 64) + 4), 32_768)  # of a request, for each of its tokens
    command = ("--model", folder, "--budget", "12GiB@8x32k", "--json")
    status, out, error = run("plan", *command, "--gpu", "H200", "--tp", "8", "--context", "32k", "--concurrency", "8")
    assert status == 0, error
    rows = json.loads(out)["schemes"]
    assert {row["index_bytes_per_token"] for row in rows} == {keys}
    assert rows[-1]["bytes_per_token"] == math.floor(Fraction(12 * gib, tokens) - keys - copies)
    status, out, error = run("search", *command, "--dry-run")
    assert status == 0, error
    facts = json.loads(out)
    assert facts["index_bytes_per_token"] == keys
    least = {row["name"]: row["bytes_per_token"] for row in facts["uniform"]}["K2V2"]
    smallest = Fraction(facts["budgets"][0]["smallest"].partition("GiB")[0])
    assert smallest - Fraction(1, 100) < (least + keys + copies) * tokens / gib <= smallest
    geometry = read_shape(ModelSource(str(folder))).cache
    profile = uniform_profile(geometry, PrecisionPair(4, 4), make_profile(layers_of(2)).model)
    (tmp_path / "profile.json").write_bytes(dump_profile(profile))
    status, out, error = run("show", tmp_path / "profile.json", "--json")
    assert status == 0, error
    shown = json.loads(out)
    assert shown["index_bytes_per_token"] == keys
    assert shown["tokens_per_gib"] == gib // (61 * (256 + 16 + 2 * 64) + keys)
    status, out, error = run("show", tmp_path / "profile.json")
    assert "an index with keys of 128 channels, 132 bytes more of each token in fp8" in " ".join(out.split())
