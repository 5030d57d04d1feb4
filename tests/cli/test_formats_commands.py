"""``kvtuner import`` and ``kvtuner export``, as they are typed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtuner.exported_configs.formats.conversion import EXPORTABLE
from kvtuner.exported_configs.profile.load import load_profile

if TYPE_CHECKING:
    from fixture_types import ModelFolder, RunCommand, Search

NUM_LAYERS = 3
VECTORS = Path(__file__).resolve().parents[2] / "exported_configs" / "vectors" / "valid"


@pytest.fixture
def model(model_folder: ModelFolder, tmp_path: Path) -> Path:
    """A folder with a configuration of three layers and nothing else: no weights, no tokenizer."""
    folder = tmp_path / "Tiny-3B"
    folder.mkdir()
    shutil.copy(model_folder("llama-gqa") / "config.json", folder)
    return folder


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    path = tmp_path / "Tiny-3B_pertoken_KVTuner4_0.yaml"
    path.write_text("".join(f"{n}:\n  nbits_key: 4\n  nbits_value: 2\n" for n in range(NUM_LAYERS)))
    return path


def test_a_preset_becomes_a_profile_of_the_model(run: RunCommand, model: Path, preset: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    status, stdout, err = run("import", preset, "--from", "kvtuner-yaml", "--model", model, "--out", out)
    assert (status, err) == (0, "")
    profile = load_profile(out)
    assert profile.digest in stdout
    assert [str(pair) for pair in profile.pairs] == ["K4V2"] * NUM_LAYERS
    assert (profile.model.id, profile.model.architecture, profile.model.dtype) == (
        "Tiny-3B",
        "LlamaForCausalLM",
        "float32",
    )
    assert run("validate", out, "--model", model)[0] == 0
    assert "imported from kvtuner-yaml" in run("show", out)[1]


def test_without_out_the_profile_is_on_stdout_and_notes_are_not(run: RunCommand, model: Path, preset: Path) -> None:
    renamed = preset.rename(preset.with_name("Other-7B_kivi_KVTuner6_1.yaml"))
    flags = ("--from", "kvtuner-yaml", "--model", model, "--group-size", "16")
    status, stdout, err = run("import", renamed, *flags)
    assert status == 0
    profile = load_profile(stdout.encode())
    assert profile.has_per_channel_keys and profile.defaults.v.group_size == 16
    assert "note: the file's name says 'Other-7B', but it is imported for 'Tiny-3B'" in err
    assert "no GPU reads such keys yet" in err


def test_a_file_is_overwritten_by_force_only(run: RunCommand, model: Path, preset: Path, tmp_path: Path) -> None:
    out = tmp_path / "there.json"
    out.write_text("mine")
    flags = ("--from", "kvtuner-yaml", "--model", model, "--out", out)
    status, _, err = run("import", preset, *flags)
    assert status == 2 and "is there already" in err and out.read_text() == "mine"
    out.unlink()
    beside = tmp_path / "there.constants.safetensors"
    beside.write_text("mine too")
    status, _, err = run("import", preset, *flags)
    assert status == 2 and "there.constants.safetensors is there already" in err and beside.exists()
    assert run("import", preset, *flags, "--force")[0] == 0
    assert not beside.exists()
    digest = load_profile(out).digest
    status, _, err = run("export", out, "--to", "kvtuner-yaml", "--out", out)
    assert status == 2 and "is there already" in err and load_profile(out).digest == digest
    assert run("export", out, "--to", "kvtuner-yaml", "--out", out, "--force")[0] == 0
    assert out.read_text() == preset.read_text()


def test_ranges_are_a_text_or_a_file(run: RunCommand, model: Path, tmp_path: Path) -> None:
    flags = ("--from", "ranges", "--model", model)
    file = tmp_path / "ranges.yaml"
    file.write_text("kv_cache_per_layer_dtype:\n  0: bf16\n  2: bf16\n")
    by_text = run("import", "0:bf16,2:bf16", *flags, "--default-dtype", "fp8", "--map", "FP8=8", "--symmetric")
    by_file = run("import", file, *flags, "--default-dtype", "int8", "--symmetric")
    assert by_text[0] == by_file[0] == 0
    assert "note: FP8 is stored as K8V8" in by_text[2] and by_file[2] == ""
    digests = {load_profile(result[1].encode()).digest for result in (by_text, by_file)}
    assert len(digests) == 1
    status, _, err = run("import", "0" * 5000 + ":8", *flags)
    assert status == 2 and "an entry is written" in err


@pytest.mark.parametrize(
    "source", ["nofile.yaml", "nofile.YML", "0:nofile.json", "2-3:x.txt", "a:b/0-1", "nofile", "0-1", "8" * 5000]
)
def test_a_path_of_no_file_is_not_taken_for_ranges(run: RunCommand, model: Path, source: str) -> None:
    status, stdout, err = run("import", source, "--from", "ranges", "--model", model)
    assert (status, stdout) == (2, "") and f"there is no file {source[:200]}" in err
    assert "ranges such as 0-1:bf16" in err


def test_both_answers_can_be_json(run: RunCommand, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    flags = ("--from", "ranges", "--model", model, "--out", out, "--json")
    facts = json.loads(run("import", "0:bf16,1-2:int8", *flags)[1])
    assert facts["file"] == str(out) and facts["digest"] == load_profile(out).digest and facts["notes"] == []
    facts = json.loads(run("export", out, "--to", "vllm-skip-layers", "--lossy", "--json")[1])
    assert facts["text"] == "0\n" and "--kv-cache-dtype int8_per_token_head" in facts["notes"][0]


def test_what_is_lost_is_refused_or_said(run: RunCommand, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    assert run("import", "0-2:int4", "--from", "ranges", "--model", model, "--symmetric", "--out", out)[0] == 0
    status, stdout, err = run("export", out, "--to", "ranges")
    assert (status, stdout) == (2, "") and "layer 0: keys are symmetric (and 1 more); --lossy" in err
    status, stdout, err = run("export", out, "--to", "ranges", "--lossy")
    assert (status, stdout) == (0, "0-2:int4\n") and "note: dropped, from layer 0 on: keys are symmetric" in err
    assert run("export", out, "--to", "kvtuner-yaml", "--lossy")[:2] == (0, preset_of(4, 4))
    for name in ("modelopt", "optiq"):
        status, _, err = run("export", out, "--to", name, "--lossy")
        assert status == 2 and "leave --lossy out" in err


def preset_of(k_bits: int, v_bits: int) -> str:
    return "".join(f"{n}:\n  nbits_key: {k_bits}\n  nbits_value: {v_bits}\n" for n in range(NUM_LAYERS))


@pytest.fixture
def three_bits(run: RunCommand, model: Path, tmp_path: Path) -> Path:
    out = tmp_path / "profile.json"
    assert run("import", "0-1:int8,2:fp8", "--from", "ranges", "--map", "FP8=3", "--model", model, "--out", out)[0] == 0
    assert [str(pair) for pair in load_profile(out).pairs] == ["K8V8", "K8V8", "K3V3"]
    return out


@pytest.mark.slow
def test_a_search_with_the_flags_that_a_refusal_names_is_exported_without_a_loss(
    run: RunCommand, search: Search, model_folder: ModelFolder, tmp_path: Path
) -> None:
    layers = ("--layers", "0-2:K4V2", "--score", "fisher")
    search(tmp_path / "usual", *layers, trials=None)
    status, _, err = run("export", tmp_path / "usual", "--to", "kvtuner-yaml")
    assert status == 2 and f"a search with {EXPORTABLE} has nothing to lose" in err
    plain = search(tmp_path / "plain", *layers, *EXPORTABLE.split(), trials=None)
    assert {row["transforms"] for row in plain["quality"][0]["baselines"]} == {False}
    preset = tmp_path / "Tiny_pertoken_KVTuner4_0.yaml"
    assert run("export", tmp_path / "plain", "--to", "kvtuner-yaml", "--out", preset)[0] == 0
    assert preset.read_text() == preset_of(4, 2)
    back = tmp_path / "back.json"
    model = model_folder("llama-gqa")
    assert run("import", preset, "--from", "kvtuner-yaml", "--model", model, "--out", back)[0] == 0
    assert load_profile(back).digest == load_profile(plain["profile"]).digest


@pytest.mark.parametrize("name", ["kvtuner-yaml", "optiq", "ranges", "modelopt"])
def test_no_other_format_has_three_bits(run: RunCommand, three_bits: Path, name: str) -> None:
    status, stdout, err = run("export", three_bits, "--to", name)
    assert (status, stdout) == (2, "")
    assert "layer 2: 3 bits, for which the file has 4" in err
    assert "--no-three-bits" in err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ranges", "0-1:int8,2:int4\n"),
        (
            "kvtuner-yaml",
            preset_of(8, 8).replace("2:\n  nbits_key: 8\n  nbits_value: 8", "2:\n  nbits_key: 4\n  nbits_value: 4"),
        ),
    ],
)
def test_a_lossy_file_has_four_bits_for_three_and_says_so(
    run: RunCommand, three_bits: Path, name: str, text: str
) -> None:
    before = three_bits.read_bytes()
    status, stdout, err = run("export", three_bits, "--to", name, "--lossy")
    assert (status, stdout) == (0, text), err
    assert "widened, from layer 2 on: 3 bits, for which the file has 4" in err
    assert three_bits.read_bytes() == before


def test_what_four_bits_in_place_of_three_cannot_mend_is_said_of_them(run: RunCommand, three_bits: Path) -> None:
    for flags in ((), ("--lossy",)):
        status, stdout, err = run("export", three_bits, "--to", "vllm-skip-layers", *flags)
        assert (status, stdout) == (2, "")
        assert "with 4 bits in place of 3: vLLM quantizes all layers alike" in err and "--lossy" not in err


def test_a_way_out_that_does_not_suffice_is_not_named(run: RunCommand) -> None:
    for name in ("demo-3bit", "demo-4bit"):  # with 3 bits, and without, keys have other bits than values
        for flags in ((), ("--lossy",)):
            status, stdout, err = run("export", f"catalogue:{name}", "--to", "ranges", *flags)
            assert (status, stdout) == (2, "")
            assert "has other bits for keys than for values" in err
            assert "--layers 0-3:K4V4" in err and "--lossy" not in err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kvtuner-yaml", "ranges"])
def test_what_a_search_finds_by_default_is_exported_with_its_loss_named(
    run: RunCommand, search: Search, tmp_path: Path, name: str
) -> None:
    search(tmp_path / "run", "--layers", "0-1:K4V4,2:K3V3", "--score", "fisher", trials=None)
    status, stdout, err = run("export", tmp_path / "run", "--to", name, "--lossy")
    assert status == 0, err
    assert "3 bits, for which the file has 4" in err
    assert stdout == {"ranges": "0-2:int4\n", "kvtuner-yaml": preset_of(4, 4)}[name]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--from", "optiq", "--model", "demo"), "demo.yaml cannot be read"),
        (("--from", "ranges", "--model", "demo"), "there is no file demo.yaml"),
        (("--from", "vllm-skip-layers", "--model", "demo"), "invalid choice"),
        (("--from", "ranges", "--model", "demo", "--symmetric", "--asymmetric"), "not allowed with"),
        (("--from", "ranges"), "--model"),
        (("--model", "demo"), "--from"),
    ],
)
def test_wrong_flags_are_refused_in_words(run: RunCommand, flags: tuple[str, ...], says: str) -> None:
    status, stdout, err = run("import", "demo.yaml", *flags)
    assert (status, stdout) == (2, "") and says in err


def test_a_named_pipe_is_refused(run: RunCommand, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "map.json")
    status, stdout, err = run("import", tmp_path / "map.json", "--from", "optiq", "--model", "demo")
    assert (status, stdout) == (2, "") and "map.json cannot be read (a named pipe" in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--model", "/nowhere/model"), "model folder /nowhere/model does not exist"),
        (("--model", "demo", "--group-size", "-4"), "--group-size must be at least 1"),
        (("--model", "demo", "--map", "fp8"), "--map is written FP8=8"),
        (("--model", "demo", "--scheme", "kivi"), "leave --scheme out"),
    ],
)
def test_wrong_flags_of_ranges_are_refused_in_words(run: RunCommand, flags: tuple[str, ...], says: str) -> None:
    status, stdout, err = run("import", "0-8:int8", "--from", "ranges", *flags)
    assert (status, stdout) == (2, "") and says in err


def test_no_code_of_a_model_is_run(run: RunCommand, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config.update(model_type="mine", auto_map={"AutoConfig": "evil.Config"})
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(f"open({str(model / 'ran')!r}, 'w')\nclass Config: pass\n")
    status, _, err = run("import", "0-2:8", "--from", "ranges", "--model", model)
    assert status == 2 and "code of its own" in err
    assert not (model / "ran").exists()


def test_a_side_file_for_a_profile_without_constants_is_said_to_be_missing(run: RunCommand, tmp_path: Path) -> None:
    source, out = tmp_path / "plain.json", tmp_path / "again.json"
    assert run("import", "0-8:8", "--from", "ranges", "--model", "demo", "--out", source)[0] == 0
    status, stdout, err = run("export", source, "--to", "kvtuner", "--constants", "file", "--out", out)
    assert status == 0 and stdout.startswith(f"{out}: sha256:") and out.read_bytes() == source.read_bytes()
    assert "--constants file: the profile has neither mu nor lambda" in err


def test_profile_is_written_anew_with_its_constants_beside_it_and_back(run: RunCommand, tmp_path: Path) -> None:
    source, out, again = VECTORS / "transforms.json", tmp_path / "two.json", tmp_path / "one.json"
    status, stdout, _ = run("export", source, "--to", "kvtuner", "--constants", "file", "--out", out)
    assert status == 0 and f"{out}, {tmp_path / 'two.constants.safetensors'}: sha256:" in stdout
    assert run("validate", out)[0] == 0
    assert "in a side file, sha256:" in " ".join(run("show", out)[1].split())
    assert json.loads(run("diff", source, out, "--json")[1])["layers"] == []
    assert run("export", out, "--to", "kvtuner", "--constants", "inline", "--out", again)[0] == 0
    assert again.read_bytes() == source.read_bytes() and not (tmp_path / "one.constants.safetensors").exists()
    again.unlink()
    (tmp_path / "one.constants.safetensors").write_bytes(b"of another profile")
    for flags, message in (
        (("--to", "kvtuner"), "loses nothing and may write two files: give --out"),
        (("--to", "kvtuner", "--out", out), "is there already"),
        (("--to", "kvtuner", "--out", again), "one.constants.safetensors is there already"),
        (("--to", "ranges", "--constants", "file"), "--constants is for --to kvtuner"),
    ):
        status, _, err = run("export", source, *flags)
        assert status == 2 and message in err
