"""Bad input gets one line on stderr that names the rule and the way out, exit status 2, and nothing is lost."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtuner.pipeline import search as search_module
from kvtuner.pipeline.stages.budget_search import BudgetSearch
from kvtuner.pipeline.stages.search_targets import bind_targets, targets_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import MakeTokenizer, ModelFolder, RunCommand, Search

    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.pipeline.options import SearchOptions
    from kvtuner.run_folder import RunFolder

    Refused = Callable[..., str]


@pytest.fixture
def refused(run: RunCommand) -> Refused:
    """Run a command that must be refused; returns the line that says why."""
    return refusal_of(run)


@pytest.fixture
def refused_search(run_search: RunCommand, tmp_path: Path) -> Refused:
    """Run a small search that must be refused; returns the line that says why."""
    refused = refusal_of(run_search)
    return lambda *flags: refused("--trials", "2", "--out", tmp_path / "run", *flags)


def refusal_of(run: RunCommand) -> Refused:
    def call(*args: object) -> str:
        status, out, err = run(*args)
        assert status == 2, (status, err)
        assert out == ""
        message = err.strip().splitlines()[-1]
        assert "error:" in message
        assert "Traceback" not in err
        return message

    return call


@pytest.fixture
def copied(model_folder: ModelFolder, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny model with some fields of its configuration changed."""

    def call(name: str = "llama-gqa", **changes: Any) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(model_folder(name), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    return call


@pytest.mark.parametrize("args", [
    ("search", "--sampler", "best"), ("search", "--trials", "0"), ("search", "--no-such-flag"), ("search",), ("tune",),
    ("show",), ("search", "--config", "no/such.yaml"),
])  # fmt: skip
def test_flags_that_are_wrong_are_refused_in_one_line(run: RunCommand, args: tuple[str, ...]) -> None:
    status, out, err = run(*args)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert "error:" in line
    assert line.endswith("--help")


def test_code_of_a_checkpoint_is_not_run_unless_asked_for(
    refused_search: Refused, copied: Callable[..., Path], tmp_path: Path
) -> None:
    folder, marker = copied(model_type="foreign", auto_map={"AutoConfig": "foreign.Foreign"}), tmp_path / "marker"
    (folder / "foreign.py").write_text(
        f"from pathlib import Path\nfrom transformers import LlamaConfig\nPath({str(marker)!r}).touch()\n"
        "class Foreign(LlamaConfig):\n    model_type = 'foreign'\n"
    )
    assert "--trust-remote-code" in refused_search("--model", folder, "--budget", "4bit", "--dry-run")
    assert not marker.exists()


def test_an_unknown_model_is_named(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "'nobody/nothing'" in refused("search", "--model", "nobody/nothing", "--budget", "4bit")


@pytest.mark.parametrize("command", [("search", "--budget", "4bit"), ("search", "--budget", "4bit", "--dry-run"),
                                     ("calibrate",)])  # fmt: skip
def test_a_revision_of_what_is_not_on_the_hub_is_refused(
    refused: Refused, model_folder: ModelFolder, tmp_path: Path, command: tuple[str, ...]
) -> None:
    for model in (model_folder("llama-gqa"), "demo"):
        message = refused(*command, "--model", model, "--revision", "v2", "--out", tmp_path / "run")
        assert f"--revision v2 needs a model on the hub, but {model} lies on this machine" in message
    assert not (tmp_path / "run").exists()


def test_weights_that_are_missing_are_named(refused_search: Refused, copied: Callable[..., Path]) -> None:
    folder = copied()
    (folder / "model.safetensors").unlink()
    assert "cannot load model" in refused_search("--model", folder, "--budget", "4bit")


@pytest.mark.parametrize(("changes", "complaint"), [
    ({"kv_lora_rank": 16}, "no qk_rope_head_dim"),
    ({"model_type": "mistral", "sliding_window": 32, "architectures": ["MistralForCausalLM"]}, "--context-length 32"),
    ({"head_dim": 20}, "cannot be packed"),
    ({"num_key_value_heads": 3}, "no multiple of"),
])  # fmt: skip
def test_a_model_without_a_cache_of_the_kind_is_refused_before_weights_are_loaded(
    refused: Refused, copied: Callable[..., Path], changes: dict[str, Any], complaint: str
) -> None:
    folder = copied(**changes)
    (folder / "model.safetensors").unlink()
    message = refused("search", "--model", folder, "--budget", "4bit", "--dry-run")
    assert complaint in message


def test_a_budget_that_bf16_fits_leaves_nothing_to_search(
    refused: Refused, run: RunCommand, copied: Callable[..., Path]
) -> None:
    search = ("search", "--model", copied(), "--dry-run", "--budget")
    for budget, less in (("100bit", "16bit"), ("16bit", "16bit"), ("100%", "100%"), ("1GiB@1x64", "GiB@1x64")):
        message = refused(*search, budget)
        assert f"{budget} holds every layer in bf16" in message
        assert re.search(rf"give less than [0-9.]*{less},", message)
    assert run(*search, "15.9bit")[0] == 0


def test_heads_that_3_bits_do_not_fill_are_searched_without(run: RunCommand, copied: Callable[..., Path]) -> None:
    command = ("search", "--model", copied(head_dim=24), "--budget", "4bit", "--dry-run")
    status, out, _ = run(*command)
    assert status == 0
    assert "K3V3" not in out and "K4V2" in out
    message = refusal_of(run)(*command, "--keep", "0:K4V3")
    assert "K4V3 needs 3 bits to be measured too; head_dim 24 cannot be packed at 3 bits" in message


def test_encoder_decoders_are_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert "encoder-decoder" in refused("search", "--model", tmp_path, "--budget", "4bit")


def test_a_model_without_the_attention_hook_is_refused(
    refused_search: Refused, make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    from transformers import MptConfig, MptForCausalLM

    config = MptConfig(d_model=64, n_heads=2, n_layers=2, vocab_size=320, max_seq_len=256)
    MptForCausalLM(config).save_pretrained(tmp_path / "mpt")
    make_tokenizer().save_pretrained(tmp_path / "mpt")
    message = refused_search("--model", tmp_path / "mpt", "--budget", "4bit", "--context-length", "128")
    assert "AttentionInterface" in message


def test_a_budget_below_the_smallest_configuration_says_the_smallest(
    refused: Refused, model_folder: ModelFolder
) -> None:
    for budget, smallest in (("1.5bit", "2.00bit"), ("2bpe", "bpe"), ("5%", "%"), ("3B/token", "B/token")):
        message = refused("search", "--model", model_folder("llama-gqa"), "--budget", budget)
        assert "smallest possible is" in message
        assert smallest.removeprefix("2.00") in message


@pytest.mark.parametrize("flags", [
    ("--budget", "four"), ("--budget", "0bit"), ("--budget", "4bit", "4.0bit"), (),
    ("--budget", "4bit", "--layers", "0-2:8"),
    ("--layers", "0:8"), ("--layers", "0-2:8,1:4"), ("--layers", "0-5:8"), ("--budget", "4bit", "--keep", "9:8"),
    ("--budget", "4bit", "--nested"), ("--budget", "4bit", "--context-length", "99999999"),
    ("--budget", "4bit", "--k-group-size", "7"), ("--budget", "4bit", "--tp-size", "3"),
    ("--budget", "4bit", "--pp-size", "4"),
    ("--budget", "2bit", "--keep", "0:K8V8"), ("--layers", "0-2:8", "--tp-size", "3"),
])  # fmt: skip
def test_flags_that_contradict_the_model_or_themselves_are_refused(
    run_search: RunCommand, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    message = refusal_of(run_search)(*flags, "--out", tmp_path / "run")
    assert "unrecognized" not in message  # refused for what it says, not for how the test spells it
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("flags", "complaint"), [
    (("--layers", "0-2:K4V2", "--nested"), "--nested"), (("--layers", "0-2:K4V2", "--groups"), "--groups"),
    (("--layers", "0-2:K4V2", "--keep", "0:8"), "--keep"),
    (("--layers", "0-2:K4V2", "--sampler", "nsga2"), "--sampler is of a search, but --layers writes one"),
    (("--layers", "0-2:K4V2", "--trials", "100"), "--trials is of a search, but --layers writes one"),
    (("--layers", "0-2:K4V2", "--storage", "sqlite:///x.db"), "--storage is of a search, but --layers writes one"),
    (("--budget", "4bit", "--keep", "0:16,1:K4V4"), "smallest possible is"),
    (("--budget", "4bit", "--no-three-bits", "--keep", "0:K4V3"), "K4V3 needs 3 bits to be measured too; leave --no-"),
    (("--layers", "0-1:K4V2,2:3", "--no-three-bits"), "K3V3 needs 3 bits to be measured too; leave --no-three-bits"),
    (("--budget", "4bit", "3bit", "--nested", "--sampler", "none"), "must ascend, but 3bit is smaller than 4bit"),
    (("--budget", "3bit", "50%", "--nested", "--sampler", "none"), "do not mix"),
    (("--budget", "4bit", "--sequence-length", "513"), "context of 512 tokens"),
    (("--budget", "4bit", "--sequence-length", "65", "--context-length", "64"), "context of 64 tokens"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_weights_are_loaded(
    refused: Refused, copied: Callable[..., Path], flags: tuple[str, ...], complaint: str
) -> None:
    folder = copied()
    (folder / "model.safetensors").unlink()
    assert complaint in refused("search", "--model", folder, *flags)
    assert complaint in refused("search", "--model", folder, *flags, "--dry-run")


def test_flags_of_a_search_in_a_file_are_refused_beside_layers(
    refused: Refused, copied: Callable[..., Path], tmp_path: Path
) -> None:
    file = tmp_path / "search.yaml"
    file.write_text("trials: 50\n")
    message = refused("search", "--config", file, "--model", copied(), "--layers", "0-2:K4V2", "--dry-run")
    assert "--trials is of a search" in message
    assert "in --config" in message


@pytest.mark.slow
def test_a_run_folder_of_another_profile_is_refused_and_kept(
    refused: Refused, search: Search, model_folder: ModelFolder, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    search(out, "--budget", "3bit", trials=2)
    before = {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}
    # The data does not exist: all is refused before anybody looks for it.
    shared = ("search", "--model", model_folder("llama-gqa"), "--data", tmp_path / "no.jsonl", "--out", out)
    for flags, field in (
        (("--budget", "6bit"), "asked"),
        (("--budget", "3bit", "--keep", "0:K2V2"), "keep"),
        (("--budget", "3bit", "--groups"), "groups"),
        (("--budget", "3bit", "--sampler", "tpe"), "sampler"),
        (("--budget", "3bit", "--tp-size", "2"), "tp_size"),
        (("--budget", "3bit", "--score", "fisher"), "score"),
        (("--layers", "0-2:K4V2"), "asked"),
    ):
        message = refused(*shared, *flags)
        assert f"{field} is" in message
        assert "--out" in message
        assert "--budget 3bit 6bit" in message
    assert {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()} == before


@pytest.mark.slow
def test_a_search_that_another_one_overtook_is_refused_before_it_measures_for_its_own_profile(
    refused_search: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both begin in an empty folder, and the other one is done with calibration first."""
    out = tmp_path / "run"
    measure = search_module.measure_sensitivity

    def overtaken(options: SearchOptions, shape: ModelShape, folder: RunFolder, **phases: Any) -> Any:
        measured = measure(options, shape, folder, **phases)
        other = replace(options, budget=("3bit",))
        bind_targets(folder, targets_of(other, shape, measured[0].bench.options.quant))
        return measured

    monkeypatch.setattr(search_module, "measure_sensitivity", overtaken)
    message = refused_search("--budget", "6bit", "--trials", "2", "--out", out)
    assert "asked is" in message and "--budget 3bit 6bit" in message
    assert (out / "sensitivity.json").exists()
    assert not any((out / name).exists() for name in ("measured.jsonl", "study.db", "profile.json"))


@pytest.mark.slow
def test_an_interrupted_search_keeps_its_folder_for_the_same_command(
    run_search: RunCommand, refused_search: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = ("--trials", "2", "--no-report", "--out", tmp_path / "run")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BudgetSearch, "winner", interrupt)
        assert run_search("--budget", "3bit", *flags)[0] == 130
    assert not (tmp_path / "run" / "profile.json").exists()
    assert "asked is" in refused_search("--budget", "6bit", *flags)
    status, _, error = run_search("--budget", "3bit", *flags)
    assert status == 0, error


@pytest.mark.parametrize(("content", "complaint"), [
    (None, "does not exist"),
    ('{"text": "short"}\n', "too short"),
    ('{"content": "x"}\n', "--text-field"),
    ('{"text": "' + "round and round it goes " * 900 + '"}\n', "also stand in the"),
])  # fmt: skip
def test_data_that_cannot_be_split_honestly_is_refused(
    refused_search: Refused, tmp_path: Path, content: str | None, complaint: str
) -> None:
    """Every other refusal of data is in tests/calibration/test_corpus.py; the command prints them alike."""
    file = tmp_path / "data.jsonl"
    if content is not None:
        file.write_text(content)
    assert complaint in refused_search("--data", file, "--budget", "4bit")


@pytest.mark.slow
def test_a_run_folder_of_another_model_or_data_is_refused_by_field(
    refused_search: Refused, search: Search, model_folder: ModelFolder, sentences: Any, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    search(out, "--budget", "3bit")
    before = {file.name: file.read_bytes() for file in out.iterdir() if file.suffix == ".json"}
    other_data = tmp_path / "other.jsonl"
    other_data.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(400, seed=9)))
    for flags, field in (
        (("--model", model_folder("llama-gqa", seed=1)), "model_weights"),
        (("--model", model_folder("qwen2-bias")), "model_config"),
        (("--data", other_data), "calibrate_tokens"),
        (("--read-plan", "hit"), "read_plan"),
    ):
        message = refused_search("--budget", "3bit", *flags)
        assert field in message
        assert "--out" in message
    assert {file.name: file.read_bytes() for file in out.iterdir() if file.suffix == ".json"} == before


@pytest.mark.parametrize("name", ["sensitivity.json", "run.json", "study.db"])
@pytest.mark.parametrize("damage", ["half", "flipped", "garbage"])
def test_a_damaged_file_is_named(
    refused_search: Refused, finished: Path, tmp_path: Path, name: str, damage: str
) -> None:
    out = shutil.copytree(finished, tmp_path / "run")
    data = bytearray((out / name).read_bytes())
    if damage == "half":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        position = data.index(b'"payload"') + 40 if name.endswith(".json") else 30
        data[position : position + 8] = bytes(255 - byte for byte in data[position : position + 8])
    else:
        data = bytearray(b"garbage" * 100)
    (out / name).write_bytes(bytes(data))
    assert name in refused_search("--trials", "3", "--budget", "3bit")


def test_nan_in_the_activations_names_the_layer(refused_search: Refused, copied: Callable[..., Path]) -> None:
    folder = copied()
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = refused_search("--model", folder, "--budget", "4bit")
    assert "layer 1" in message
    assert "NaN" in message


def test_a_device_or_dtype_that_is_not_there_is_refused(refused_search: Refused) -> None:
    for flags in (("--device", "warp"), ("--dtype", "int3"), ("--device", "cuda")):
        if flags == ("--device", "cuda") and torch.cuda.is_available():
            continue
        assert flags[1] in refused_search("--budget", "4bit", *flags)


def test_debug_shows_the_traceback(run: RunCommand) -> None:
    from kvtuner.errors import KVTunerError

    with pytest.raises(KVTunerError):
        run("validate", "/nonexistent/profile.json", "--debug")


def test_an_output_folder_that_cannot_be_made_is_named(refused_search: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = refused_search("--budget", "4bit", "--out", tmp_path / "file" / "run")
    assert f"cannot write {tmp_path / 'file' / 'run'}" in message and "choose another place" in message
