"""Searches, shows and evaluations of models whose layers differ, from a checkpoint on disk to the loaded cache."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING

import optuna
import pytest
from tiny.small_search import SMALL, TOKENS, TRIALS

from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.pipeline.stages.budget_search import BudgetSearch
from kvtuner.run_folder import sha256_of
from kvtuner.tuner.trials import TrialReader

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import ModelFolder, RunCommand
    from tiny.small_search import SearchWhole

pytestmark = pytest.mark.slow

KINDS = {
    "gemma2": "window:24 full", "gemma3": "window:24 full", "gpt-oss": "window:24 full", "cohere2": "window:24 full",
    "olmo3": "window:24 full", "mimo-v2": "window:24 full", "gemma4": "window:24 full", "qwen3-next": "none full",
    "qwen3.5": "none full", "lfm2": "none full", "granite4": "none full", "nemotron-h": "none full",
    "qwen3.5-images": "none full", "falcon-h1": "full", "qwen2.5-vl": "full", "mistral3": "full",
    "llama4-images": "window:24 full", "gemma4-readers": "full window:24 shared:2 shared:3",
    "gemma3n": "full window:24 shared:2 shared:3",
}  # fmt: skip
BITS = {"gemma4-readers": 6}
"""The budget where it is another than 4 bits: keys that several layers read move predictions more."""
LIKE_OTHERS = ("gemma3", "cohere2", "olmo3", "qwen3.5", "granite4", "qwen3.5-images")
"""Those whose layers are of the kinds of others, or that other tests search too: for `make test-full`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in LIKE_OTHERS)) for name in KINDS]
)
def test_a_search_tunes_full_layers_by_their_ids_and_a_loaded_model_serves_the_profile(
    name: str, search_whole: SearchWhole
) -> None:
    searched = search_whole(name, f"{BITS.get(name, 4)}bit")
    profile = searched.profile
    layers = profile.geometry.by_layer().layers if profile.geometry.is_by_layer else ()
    assert " ".join(dict.fromkeys(str(layer.kind) for layer in layers)) in (KINDS[name], "")
    assert profile.mean_bits <= BITS.get(name, 4)
    assert {row["layer"] for row in searched.scores} == set(profile.tuned_geometry().ids)
    for kind in KINDS[name].split() if profile.geometry.is_by_layer else ():
        assert f"kind {kind}" in searched.shown
    # transformers loads the text of these alone, whose configuration lacks the images' part.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=rf"the profile of {name} is for configuration")
        cache = searched.read_back(allow_derived=name in ("llama4-images", "qwen3.5-images"))
    assert cache.stored_bytes == TOKENS * profile.bytes_per_token()


def test_layers_that_read_another_ones_keys_take_no_bytes(search_whole: SearchWhole) -> None:
    """Two full layers of two heads of 32 channels own rows; a window, and three readers, take no more with a token."""
    searched = search_whole("gemma4-readers", "6bit")
    profile, geometry = searched.profile, searched.profile.geometry
    assert (geometry.num_layers, geometry.num_shared_layers) == (4, 3)
    assert profile.tuned_geometry().ids == (0, 2)
    assert [entry.layer for entry in profile.layers] == [0, 1, 2, 3]
    assert profile.bytes_per_token() == sum(map(profile.row_shape().pair_bytes, profile.tuned_pairs))
    assert profile.bf16_bytes_per_token() == 2 * 2 * 2 * 32 * 2  # layers, sides, heads, channels, bytes
    assert "kind shared:2" in searched.shown and "kind shared:3" in searched.shown


@pytest.mark.parametrize("name", ["gemma3", "qwen3.5", "gemma4-readers"])
def test_an_evaluation_asks_the_loaded_model_beside_other_schemes(
    name: str, run: RunCommand, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path
) -> None:
    folder, out = model_folder(name), tmp_path / "run"
    measured = ("--model", folder, "--data", corpus_file)
    assert run("search", *measured, *SMALL, *TRIALS, "--out", out, "--budget", "4bit", "--no-report")[0] == 0
    lengths = ("--lengths", "128", "--problems", "2", "--questions", "2", "--sequences", "2,2,2")
    asked = ("--levels", "likelihood,recall", "--all-questions", "--sequence-length", "64", *lengths, "--json")
    status, text, error = run("eval", out / "profile.json", *measured, *asked)
    assert status == 0, error
    cells = json.loads(text)["cells"]
    assert {cell["level"] for cell in cells} == {"likelihood", "recall"}
    for cell in cells:
        assert {"profile", "fp8"} <= {result["subject"] for result in cell["results"]}


def test_layers_are_given_by_their_ids(
    run: RunCommand, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path
) -> None:
    search = ("search", "--model", model_folder("gemma3"), "--data", corpus_file, *SMALL, "--out", tmp_path / "run")
    status, _, error = run(*search, "--layers", "0-3:K4V4")
    assert status != 0 and "layers 1, 3 that are tuned" in error and "layer 0 cannot be given" in error
    status, _, error = run(*search, "--budget", "4bit", "--pp-size", "2")
    assert status != 0 and "only some are tuned here; use pp_size 1" in error
    assert run(*search, "--layers", "1:K8V4,3:K4V4", "--no-report")[0] == 0
    profile = load_profile(tmp_path / "run" / "profile.json")
    assert [str(pair) for pair in profile.pairs] == ["K16V16", "K8V4", "K16V16", "K4V4"]


def test_trials_name_layers_by_their_ids_and_a_study_that_named_places_is_left_as_it_is(
    run: RunCommand, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = ("search", "--model", model_folder("gemma3"), "--data", corpus_file, *SMALL, "--out", tmp_path / "run")
    budget = ("--budget", "4bit", "--trials", "4", "--no-report")
    with monkeypatch.context() as before:
        before.setattr(TrialReader, "_name", lambda self, group: f"layer_{group:03d}")
        before.setattr(
            BudgetSearch,
            "_identity",
            lambda self, target: {"measurements": sha256_of(self.run.table.identity), **target.identity},
        )
        assert run(*search, *budget)[0] == 0
    first = load_profile(tmp_path / "run" / "profile.json")
    status, _, error = run(*search, *budget)
    assert status == 0, error
    assert load_profile(tmp_path / "run" / "profile.json").digest == first.digest
    storage = f"sqlite:///{tmp_path}/run/study.db"
    studies = [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]
    older, newer = sorted(studies, key=lambda study: "layer_003" in study.user_attrs)
    assert {frozenset(trial.params) for trial in older.trials} == {frozenset({"layer_000", "layer_001"})}
    for trial in newer.trials:
        assert set(trial.params) == {"layer_001", "layer_003"}
        for name, number in trial.params.items():
            text = trial.user_attrs["layers"][f"layer {int(name.removeprefix('layer_'))}"]
            assert text == newer.user_attrs[name][number]
    assert [trial.value for trial in newer.trials] == [trial.value for trial in older.trials]


def test_memory_for_requests_holds_their_windows(
    run: RunCommand, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path
) -> None:
    """Two windows of 24 tokens take 2 * 24 * 128 bytes of a request, beside the rows of two layers."""
    search = ("search", "--model", model_folder("gemma3"), "--data", corpus_file, *SMALL, "--out", tmp_path / "run")
    exact = ("--residual-length", "0", "--dry-run", "--json")
    smallest = json.loads(run(*search, *exact, "--budget", "0.02MiB@1x128")[1])["budgets"][0]["smallest"]
    assert smallest.endswith("MiB@1x128")
    rows = 2 * 2 * 16 * 128  # two layers, keys and values, rows of 2 bits
    assert float(smallest.removesuffix("MiB@1x128")) * 2**20 == pytest.approx(rows + 2 * 24 * 128, rel=0.02)
