"""Flags over the YAML file, and what help promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest

from kvtuner.calibration.sensitivity import ScoreName
from kvtuner.cli.parser import build_parser, parse
from kvtuner.evaluation.backends.endpoint import Api
from kvtuner.pipeline import options
from kvtuner.tuner.samplers import SamplerName

if TYPE_CHECKING:
    from pathlib import Path


def parsed(tmp_path: Path, text: str, *flags: str) -> dict[str, Any]:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return vars(parse(build_parser(), ["search", "--config", str(file), *flags]))


@pytest.mark.parametrize(("copy", "alias"), [(options.SCORES, ScoreName), (options.SAMPLERS, SamplerName)])
def test_the_choices_of_options_are_those_of_the_modules_that_they_do_not_import(
    copy: tuple[str, ...], alias: object
) -> None:
    assert copy == get_args(alias)


def test_the_apis_of_the_flags_are_those_of_the_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("eval", "bench"):
        with pytest.raises(SystemExit):
            parse(build_parser(), [command, "profile.json", "--api", "none of them"])
        refusal = capsys.readouterr().err
        assert [name for name in get_args(Api) if f"'{name}'" not in refusal] == []


def test_null_in_the_yaml_file_is_the_default(tmp_path: Path) -> None:
    text = "model: demo\nrevision: null\ntrials: ~\nbudget: null\nsymmetric: null\nsequences: null\n"
    args = parsed(tmp_path, text, "--budget", "4bit")
    defaults = vars(parse(build_parser(), ["search", "--model", "demo", "--budget", "4bit"]))
    assert {**args, "config": None} == defaults


@pytest.mark.parametrize(
    "flag", ["symmetric", "pairs", "groups", "nested", "deduplicate", "trust-remote-code", "dry-run", "json"]
)
def test_what_the_yaml_file_switches_on_the_command_line_switches_off(tmp_path: Path, flag: str) -> None:
    text, name = f"model: demo\n{flag}: true\n", flag.replace("-", "_")
    assert parsed(tmp_path, text)[name] is True
    assert parsed(tmp_path, text, f"--no-{flag}")[name] is False


def test_the_home_folder_is_expanded_in_paths_of_the_yaml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    args = parsed(tmp_path, "model: ~/model\ndata: ~/text.jsonl\nout: ~/run\ntext-field: ~x\n")
    names = ("model", "text.jsonl", "run")
    assert [args[name] for name in ("model", "data", "out")] == [str(tmp_path / name) for name in names]
    assert args["text_field"] == "~x"


def test_the_help_of_calibrate_says_which_search_reuses_it() -> None:
    assert "search with the same --out reuses it" in " ".join(build_parser().format_help().split())


@pytest.mark.parametrize("command", ["search", "calibrate"])
def test_a_model_is_needed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(build_parser(), [command])
    error = capsys.readouterr().err
    assert f"kvtuner {command}: error: give --model, as in: kvtuner {command} --model Qwen/" in error
    assert ("--budget 4bit" in error) == (command == "search")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["serch"], "kvtuner: error: there is no command 'serch' (did you mean search?); see"),
        (["xyz"], "kvtuner: error: there is no command 'xyz'; see kvtuner --help"),
        (
            ["search", "--mod", "demo"],
            "kvtuner search: error: there is no flag or argument '--mod' (did you mean --model?); see",
        ),
        (
            ["show", "a", "--jsno=1"],
            "kvtuner show: error: there is no flag or argument '--jsno' (did you mean --json?); see",
        ),
        (["search", "--trials", "many"], "argument --trials: must be a whole number, not 'many'"),
        (["search", "--seed", "1.5"], "argument --seed: must be a whole number, not '1.5'"),
        (["search", "--residual-length", "x"], "--residual-length: must be a whole number of tokens, or auto, not 'x'"),
    ],
)
def test_what_is_mistyped_is_named_with_what_is_meant(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(build_parser(), command)
    error = capsys.readouterr().err
    assert end.value.code == 2 and message in error and error.count("\n") == 1


def test_help_shows_only_the_switches_that_change_something(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(build_parser(), ["search", "--help"])
    described = [line.strip() for line in capsys.readouterr().out.partition("options:")[2].splitlines()]
    starts = {line.split("  ")[0] for line in described if line.startswith("--")}
    assert {"--json", "--debug", "--report, --no-report", "--three-bits, --no-three-bits"} <= starts
