"""``kvtuner validate --model`` checks a profile against the context that it was made for, and against its model."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.calibration.model_loading import ModelSource, load_tokenizer, read_config
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.identity.model_identity import identity_of
from kvtuner.exported_configs.profile.build import LayerQuantization, dump_profile
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.pipeline.sources import warn_of_mismatches

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import ModelFolder, ProfileOf, RunCommand


@pytest.mark.parametrize(("context_length", "is_valid"), [(64, True), (65, False)])
def test_a_windowed_model_is_checked_against_the_context_of_the_profile(
    context_length: int,
    is_valid: bool,
    run: RunCommand,
    model_folder: ModelFolder,
    profile_of: ProfileOf,
    tmp_path: Path,
) -> None:
    model = model_folder("mistral-no-window", sliding_window=64)
    config = read_config(ModelSource(str(model)))
    exported = profile_of(
        config, [LayerQuantization(4, 4)] * config.num_hidden_layers, last_position=context_length - 1
    )
    profile = tmp_path / "profile.json"
    profile.write_bytes(dump_profile(exported))
    status, out, err = run("validate", profile, "--model", model)
    if is_valid:
        assert status == 0, err
        assert ": valid, for tiny\n  sha256:" in out
    else:
        assert status == 2
        assert "a window of 64 tokens, shorter than the context of 65" in err


@pytest.fixture
def recorded(profile_of: ProfileOf, model_folder: ModelFolder, tmp_path: Path) -> Path:
    """A profile of a hub's model that is also here as a folder, with all that is recorded of it."""
    source = ModelSource(str(model_folder("llama-gqa")))
    config = read_config(source)
    exported = profile_of(config, [LayerQuantization(4, 4)] * config.num_hidden_layers, last_position=511)
    tokenizer = load_tokenizer(source)
    model = identity_of(config, id="Owner/llama-gqa", revision="v1", dtype="float32", tokenizer=tokenizer)
    path = tmp_path / "profile.json"
    path.write_bytes(dump_profile(exported.model_copy(update={"model": model})))
    return path


def derived(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy of a model's configuration, with some fields changed."""
    to.mkdir()
    values = {**json.loads((folder / "config.json").read_text()), **changes}
    (to / "config.json").write_text(json.dumps(values))
    return to


def test_the_model_of_a_profile_fits_it_and_nothing_is_said(
    run: RunCommand, recorded: Path, model_folder: ModelFolder
) -> None:
    for flags in ((), ("--strict",), ("--allow-derived",)):
        status, out, err = run("validate", recorded, "--model", model_folder("llama-gqa"), *flags)
        assert (status, out.count("\n"), err) == (0, 2, "")
    (result,) = json.loads(run("validate", recorded, "--model", model_folder("llama-gqa"), "--json")[1])
    assert (result["valid"], result["fits"], result["mismatches"]) == (True, True, [])
    (result,) = json.loads(run("validate", recorded, "--json")[1])
    assert (result["valid"], result["fits"], result["mismatches"]) == (True, None, [])


@pytest.mark.parametrize(
    ("changes", "kind", "usual", "strict", "allowed"),
    [
        ({"intermediate_size": 112}, "configuration", 1, 1, 0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rope", 0, 1, 0),
        ({"max_position_embeddings": 1024}, "context", 0, 1, 0),
        ({"quantization_config": {"quant_method": "awq"}}, "weights", 0, 1, 0),
    ],
)
def test_what_differs_is_listed_and_decides_the_status(
    changes: dict[str, Any],
    kind: str,
    usual: int,
    strict: int,
    allowed: int,
    run: RunCommand,
    recorded: Path,
    model_folder: ModelFolder,
    tmp_path: Path,
) -> None:
    other = derived(model_folder("llama-gqa"), tmp_path / "llama-gqa", **changes)
    for expected, flags in ((usual, ()), (strict, ("--strict",)), (allowed, ("--allow-derived",))):
        status, out, err = run("validate", recorded, "--model", other, *flags, "--json")
        assert (status, err) == (expected, "")
        (result,) = json.loads(out)
        worst = result["mismatches"][0]
        assert (worst["kind"], worst["severity"]) == (kind, "error" if expected else "warning")
        assert result["fits"] is not bool(expected)
        text = run("validate", recorded, "--model", other, *flags)[1].splitlines()
        assert f"{worst['severity']}: {worst['text']}" in " ".join(" ".join(text[2:]).split())


def test_a_copy_in_the_hub_s_cache_is_known_by_its_name_and_commit(
    run: RunCommand, recorded: Path, model_folder: ModelFolder, tmp_path: Path
) -> None:
    for name, kinds in (("Owner--llama-gqa", []), ("Owner--llama-chat", ["fine-tune"])):
        folder = tmp_path / f"models--{name}" / "snapshots" / ("0" * 40)
        folder.mkdir(parents=True)
        shutil.copy(model_folder("llama-gqa") / "config.json", folder)
        status, out, _ = run("validate", recorded, "--model", folder, "--json")
        (result,) = json.loads(out)
        assert status == len(kinds)
        assert [mismatch["kind"] for mismatch in result["mismatches"]] == kinds  # v1 may be that commit


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--strict",), "--strict is about the model that a profile is for; give --model too"),
        (("--allow-derived",), "--allow-derived is about the model"),
        (("--model", "demo", "--strict", "--allow-derived"), "--strict and --allow-derived exclude each other"),
    ],
)
def test_flags_that_say_nothing_are_refused(
    flags: tuple[str, ...], message: str, run: RunCommand, recorded: Path
) -> None:
    status, out, err = run("validate", recorded, *flags)
    assert (status, out) == (2, "")
    assert message in err


def test_eval_and_bench_say_what_differs_and_measure_it(
    recorded: Path, model_folder: ModelFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = load_profile(recorded)
    folder = model_folder("llama-gqa", chat=True)
    other = read_config(ModelSource(str(derived(folder, tmp_path / "tuned", intermediate_size=112))))
    tokenizer = load_tokenizer(ModelSource(str(folder)))
    model_identity = identity_of(other, id="Owner/tuned", revision=None, dtype="float32", tokenizer=tokenizer)
    kinds = [mismatch.kind for mismatch in warn_of_mismatches(profile, model_identity, 512)]
    assert kinds == ["configuration", "tokenizer"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["warning", "warning"]
    assert lines[0].endswith("; allowed: this evaluation tells what that costs")
    assert warn_of_mismatches(profile, profile.model, 512) == []
    assert capsys.readouterr().err == ""
    with pytest.raises(ProfileError, match="is for LlamaForCausalLM"):
        warn_of_mismatches(profile, model_identity.model_copy(update={"architecture": "XForCausalLM"}), 512)


@pytest.mark.slow
def test_a_search_records_what_its_profile_is_for(finished: Path, model_folder: ModelFolder, run: RunCommand) -> None:
    """A profile records the model by the same function that everything else asks."""
    source = ModelSource(str(model_folder("llama-gqa")))
    model_identity = load_profile(finished / "profile.json").model
    config = read_config(source)
    wanted = identity_of(
        config, id="llama-gqa", revision=None, dtype="float32", tokenizer=load_tokenizer(source), files=source.path
    )
    assert model_identity == wanted
    assert None not in (
        model_identity.rope_sha256,
        model_identity.tokenizer_sha256,
        model_identity.max_positions,
        model_identity.checkpoint_sha256,
    )
    assert run("validate", finished / "profile.json", "--model", source.model, "--strict")[0] == 0
