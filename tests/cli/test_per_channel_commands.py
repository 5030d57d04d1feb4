"""Profiles with keys per channel are shown, compared, checked, evaluated and answered by the engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvtuner.calibration.model_loading import ModelSource, read_config
from kvtuner.exported_configs.identity.model_identity import identity_of
from kvtuner.exported_configs.profile.build import dump_profile, uniform_profile
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair, ScaleLayout

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import RunCommand


@pytest.fixture
def two_files(tmp_path: Path) -> tuple[Path, Path]:
    """K4V2 of the demo model, with keys per token and per channel."""
    config = read_config(ModelSource("demo"))
    geometry = ModelGeometry.from_config(config)
    model = identity_of(config, id="demo", revision=None, dtype="float32")
    files = tmp_path / "token.json", tmp_path / "channel.json"
    for file, k_granularity, group in zip(files, ("per_token", "per_channel"), (None, 32), strict=True):
        profile = uniform_profile(
            geometry, PrecisionPair(4, 2), model, k_layout=ScaleLayout(group, granularity=k_granularity)
        )
        file.write_bytes(dump_profile(profile))
    return files


def test_show_says_which_keys_are_per_channel(run: RunCommand, two_files: tuple[Path, Path]) -> None:
    token, channel = (run("show", file)[1] for file in two_files)
    assert "per channel, 32 tokens per scale" in channel
    assert "per channel" not in token
    facts = json.loads(run("show", two_files[1], "--json")[1])
    assert facts["k_granularity"] == "per_channel"


def test_diff_says_that_granularity_changed(run: RunCommand, two_files: tuple[Path, Path]) -> None:
    status, out, _ = run("diff", *two_files, "--exit-code")
    assert status == 1
    (line,) = (line for line in out.splitlines() if "granularity" in line and "_" in line)
    assert line.split() == ["k.granularity", "per_token", "per_channel", "*"]
    facts = json.loads(run("diff", *two_files, "--json")[1])
    assert facts["k_granularity"] == ["per_token", "per_channel"] and facts["defaults_differ"]
    assert json.loads(run("diff", two_files[1], two_files[1], "--json")[1])["same_digest"]


def test_a_window_shorter_than_a_group_is_valid_and_no_cache_s(run: RunCommand, two_files: tuple[Path, Path]) -> None:
    assert run("validate", *two_files)[0] == 0
    assert run("validate", two_files[0], "--model", "demo")[0] == 0
    status, _, err = run("validate", two_files[1], "--model", "demo")
    assert status == 2 and "need residual_length 32 or more, not 0: tokens are kept exactly until their group" in err


@pytest.fixture
def preset(run: RunCommand, tmp_path: Path) -> Path:
    """A preset of KIVI, K4V2 in every layer of the demo model, as a profile."""
    layers = read_config(ModelSource("demo")).num_hidden_layers
    file, out = tmp_path / "demo_kivi_KVTuner4_0.yaml", tmp_path / "kivi.json"
    file.write_text("".join(f"{layer}:\n  nbits_key: 4\n  nbits_value: 2\n" for layer in range(layers)))
    assert run("import", file, "--from", "kvtuner-yaml", "--model", "demo", "--out", out)[0] == 0
    return out


@pytest.mark.slow
def test_an_imported_preset_of_kivi_is_evaluated(run: RunCommand, preset: Path, tmp_path: Path) -> None:
    assert run("validate", preset, "--model", "demo")[0] == 0
    asked = ("--levels", "likelihood,recall", "--lengths", "120", "--problems", "2", "--sequences", "2,2,4", "--json")
    against = ("--against", "K4V2,K4V2-per-channel,K2V2-per-channel")
    status, out, err = run("eval", preset, "--model", "demo", *asked, *against, "--out", tmp_path / "out")
    assert status == 0, err
    results = {
        (cell["measure"], result["subject"]): result["mean"]
        for cell in json.loads(out)["cells"]
        for result in cell["results"]
    }
    kl = {subject: mean for (measure, subject), mean in results.items() if measure == "kl_nats_per_token"}
    assert 0 < kl["profile"] < kl["K2V2-per-channel"]
    assert ("accuracy", "profile") in results, "the engine answers"
    assert "transformers cache" not in err


@pytest.mark.slow
def test_the_engine_answers_by_it_in_pages_of_whole_groups(run: RunCommand, preset: Path) -> None:
    prompt = "def main(" + 20 * "a, b, "
    asked = (
        "generate",
        "--profile",
        preset,
        "--model",
        "demo",
        "--prompt",
        prompt,
        "--max-tokens",
        "40",
        "--json",
        "--ignore-eos",
    )
    answers = []
    for pages in ((), ("--page-size", "64")):
        status, out, err = run(*asked, *pages)
        assert status == 0, err
        answers.append(json.loads(out)["answers"][0]["token_ids"])
    assert answers[0] == answers[1] and len(answers[0]) == 40


def test_pages_that_cut_its_groups_are_refused_before_weights_are_loaded(
    run: RunCommand, preset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtuner.pipeline.local.opened_engine.load_model", None)
    asked = ("--profile", preset, "--model", "demo", "--page-size", "48")
    for command in (("generate", "--prompt", "a"), ("serve-local",)):
        status, _, err = run(*command, *asked)
        assert status == 2 and "pages of 48 tokens do not work with keys per channel of 32 tokens per scale" in err
