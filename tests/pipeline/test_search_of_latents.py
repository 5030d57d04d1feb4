"""Searches, shows, validations and evaluations of models that cache latents, from a checkpoint to the loaded cache."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tiny.latent_models import INDEX, INDEXES, LATENT, RANK, ROPE
from tiny.small_search import SMALL, TOKENS, TRIALS

from kvtuner.precision import row_bytes
from kvtuner.report.plots.tokens_that_fit import FittedMemory
from kvtuner.report.search_data import DATA_FILE, ReportData

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import ModelFolder, RunCommand
    from tiny.small_search import SearchWhole

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", LATENT)
def test_a_search_tunes_latents_and_a_loaded_model_serves_the_profile(name: str, search_whole: SearchWhole) -> None:
    # By hidden states that read rows an index may select other tokens, of which each one matters to a tiny model.
    budget, most = (8, 1.0) if name in INDEXES else (6, 0.5)
    searched = search_whole(name, f"{budget}bit")
    profile = searched.profile
    rope_bits = 16 * ROPE / (RANK + ROPE)
    uniform = {row["name"]: row["mean_bits"] for row in searched.plan["uniform"]}
    assert uniform["K4V4"] == pytest.approx(4 * RANK / (RANK + ROPE) + rope_bits)
    assert all(f"K{b}V{b}" in uniform for b in (2, 3, 4, 8)) and "K8V4" not in uniform
    assert profile.schema_version == 2
    geometry = profile.tuned_geometry()
    assert (geometry.head_dim, geometry.v_head_dim, geometry.rope_dim) == (RANK, 0, ROPE)
    widths = [entry.k.bits for entry in profile.layers]
    assert all(entry.v is None for entry in profile.layers) and len(widths) == geometry.num_layers
    assert sum(bits * RANK for bits in widths) <= (budget * (RANK + ROPE) - 16 * ROPE) * len(widths)
    group = profile.defaults.k.group_size
    rows = [row_bytes(1, RANK, bits, group, word_bits=profile.defaults.k.grid_word_bits) for bits in widths]
    assert profile.bytes_per_token() == sum(rows) + len(rows) * 2 * ROPE
    assert {row["side"] for row in searched.scores} == {"k"}
    latent = f"a latent of {RANK} channels and {ROPE} rotary ones, 4 query heads"
    shown = " ".join(searched.shown.split())
    assert latent in shown
    index = f"{latent}, an index with keys of {INDEX} channels, {INDEX} bytes more of each token in fp8"
    assert (index in shown) == (name in INDEXES)
    cache = searched.read_back(most=most)
    # Rotary channels, and keys of indexes, take float32 in a model of float32.
    assert cache.stored_bytes == TOKENS * (profile.bytes_per_token() + len(rows) * 2 * ROPE)
    assert cache.index_bytes == TOKENS * 4 * INDEX * INDEXES.get(name, 0)
    keys = INDEX * INDEXES.get(name, 0)
    assert profile.index_bytes == keys
    budget_facts = searched.result["budget"]
    stored, native = budget_facts["bytes_per_token"], budget_facts["bf16_bytes_per_token"]
    assert budget_facts["tokens_per_gib"] == 2**30 // (stored + keys)
    assert budget_facts["bf16_tokens_per_gib"] == 2**30 // (native + keys)
    assert budget_facts["tokens_against_bf16"] == round((native + keys) / (stored + keys), 4)
    assert searched.plan.get("index_bytes_per_token", 0) == keys
    for row in searched.plan["uniform"]:
        assert row["tokens_per_gib"] == 2**30 // (row["bytes_per_token"] + keys)


def test_a_report_of_a_budget_for_requests_counts_those_that_fit_beside_keys_of_indexes(
    run: RunCommand, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path
) -> None:
    measured = ("--model", model_folder("glm-moe-dsa"), "--data", corpus_file, *SMALL, *TRIALS, "--out", tmp_path)
    status, text, error = run("search", *measured, "--budget", "0.005GiB@32x512")
    assert status == 0, error
    assert "keys of indexes 32 bytes more of each token in fp8" in " ".join(text.split())
    data = ReportData.from_json(json.loads((tmp_path / DATA_FILE).read_text())["payload"])
    *_, profile = FittedMemory.of(data).schemes
    memory, copies = 0.005 * 2**30, data.budget.window_bytes or 0
    assert memory // (512 * profile.bytes_per_token + copies) == 36
    assert profile.requests == (memory // (512 * (profile.bytes_per_token + 32) + copies),) == (32,)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-moe-dsa"])
def test_an_evaluation_asks_the_loaded_model_beside_other_schemes(
    name: str, run: RunCommand, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path
) -> None:
    folder, out = model_folder(name), tmp_path / "run"
    measured = ("--model", folder, "--data", corpus_file)
    assert run("search", *measured, *SMALL, *TRIALS, "--out", out, "--budget", "6bit", "--no-report")[0] == 0
    lengths = ("--lengths", "128", "--problems", "2", "--questions", "2", "--sequences", "2,2,2")
    asked = ("--levels", "likelihood,recall", "--all-questions", "--sequence-length", "64", *lengths, "--json")
    against = ("--against", "fp8,K4V4,best-uniform")
    status, text, error = run("eval", out / "profile.json", *measured, *asked, *against)
    assert status == 0, error
    cells = json.loads(text)["cells"]
    assert {cell["level"] for cell in cells} == {"likelihood", "recall"}
    for cell in cells:
        assert {"profile", "fp8", "K4V4"} <= {result["subject"] for result in cell["results"]}
    for other, reason in (("K8V4", "has one width, not K8V4"), ("K4V4-per-channel", "this model caches latents")):
        status, _, error = run("eval", out / "profile.json", *measured, *asked, "--against", other)
        assert status != 0 and reason in error


def test_options_of_keys_and_values_are_refused(
    run: RunCommand, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path
) -> None:
    search = ("search", "--model", model_folder("deepseek-v2"), "--data", corpus_file, *SMALL, "--out", tmp_path / "r")
    for options, reason in (
        (("--budget", "6bit", "--v-group-size", "16"), "--v-group-size is of keys and values"),
        (("--budget", "6bit", "--pairs"), "--pairs is of keys and values"),
        (("--budget", "6bit", "--keep", "0:K8V4"), "has one width, not K8V4; give 8 or 4"),
        (("--layers", "0-1:K8V4"), "has one width, not K8V4"),
        (("--budget", "4bit"), "the smallest possible is 4.8bit"),
    ):
        status, _, error = run(*search, *options)
        assert status != 0 and reason in error, error
