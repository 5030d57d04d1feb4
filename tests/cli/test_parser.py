"""Flags over the YAML file, and what help promises."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, get_args

import pytest

from kvtuner.calibration.sensitivity import ScoreName
from kvtuner.cli.parser import build_parser, parse
from kvtuner.evaluation.backends.endpoint import Api
from kvtuner.pipeline import options
from kvtuner.tuner.samplers import SamplerName

if TYPE_CHECKING:
    from pathlib import Path


SUB_PARSERS: dict[str, argparse.ArgumentParser] = next(
    action.choices for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)
)
ACTIONS = [(name, action) for name, sub_parser in SUB_PARSERS.items() for action in sub_parser._actions]
"""Every flag and argument, behind the name of its command."""
SHOWN = [(name, action) for name, action in ACTIONS if action.option_strings and action.help != argparse.SUPPRESS]
TYPED = [(name, action) for name, action in ACTIONS if action.type is not None]
NUMBERS = [
    (name, action)
    for name, action in ACTIONS
    if isinstance(action.default, int | float) and not isinstance(action.default, bool)
]


def ids(pairs: list[tuple[str, argparse.Action]]) -> list[str]:
    return [" ".join((name, *action.option_strings)) for name, action in pairs]


def line_of_help(command: str, flag: str) -> str:
    """What the help of a command says of a flag, which it shows."""
    (action,) = (action for action in SUB_PARSERS[command]._actions if flag in action.option_strings)
    assert action.help != argparse.SUPPRESS
    return SUB_PARSERS[command].formatter_class("kvtuner")._expand_help(action)


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
        (["bench", "p.json", "--memory-bandwidth", "fast"], "--memory-bandwidth: must be a number, not 'fast'"),
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


@pytest.mark.parametrize(("command", "action"), NUMBERS, ids=ids(NUMBERS))
def test_help_says_the_default_of_every_number(command: str, action: argparse.Action) -> None:
    assert line_of_help(command, action.option_strings[0]).endswith(f"(default: {action.default})")


def test_help_says_no_default_of_what_is_empty_or_off() -> None:
    shown = [line_of_help(name, action.option_strings[0]) for name, action in SHOWN]
    assert [text for text in shown if text.endswith(("(default: )", "(default: False)", "(default: None)"))] == []
    assert {(name, action.default) for name, action in NUMBERS} >= {("search", 0), ("generate", 0.0), ("bench", 20)}


@pytest.mark.parametrize(("command", "action"), TYPED, ids=ids(TYPED))
def test_what_a_flag_cannot_read_is_refused_by_what_it_takes(
    command: str, action: argparse.Action, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "," if action.metavar in ("SCHEME[,...]", "NAME[,...]") else "½"  # any other is a name
    with pytest.raises(SystemExit):
        parse(build_parser(), [command, f"{action.option_strings[0]}={text}"])
    error = capsys.readouterr().err
    assert f"argument {action.option_strings[0]}" in error and text in error
    assert "invalid" not in error


@pytest.mark.parametrize("command", ["eval", "bench"])
@pytest.mark.parametrize("flag", ["--context-length", "--sequence-length", "--sequences", "--seed"])
def test_help_of_what_measures_a_profile_says_that_its_search_fills_gaps(command: str, flag: str) -> None:
    assert "; the search's by default" in line_of_help(command, flag)


@pytest.mark.parametrize("command", ["eval", "bench", "show", "export"])
def test_help_of_what_takes_a_profile_says_all_that_names_one(command: str) -> None:
    (action,) = (action for action in SUB_PARSERS[command]._actions if action.metavar == "PROFILE")
    assert "owner/name[@revision][:path] of the hub, or catalogue:name" in str(action.help)


def test_help_says_the_run_folder_of_each_command() -> None:
    assert "runs/<model>-<budget> by default" in line_of_help("search", "--out")
    assert "runs/<model>-calibration by default" in line_of_help("calibrate", "--out")


def test_help_tells_the_ranks_of_a_search_from_those_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert "while it is measured" in line_of_help("search", "--tp")
    assert "that will serve, beside which --tp is of the search's own" in line_of_help("search", "--tp-size")
    for command in ("plan", "report"):
        with pytest.raises(SystemExit):
            parse(build_parser(), [command, "--help"])
        shown = capsys.readouterr().out.split()
        assert "--tp-size" in shown and "--tp" not in shown


@pytest.mark.parametrize(
    ("command", "old", "name"),
    [
        (("plan",), "--tp", "tp_size"),
        (("plan",), "--pp", "pp_size"),
        (("plan",), "--context", "context_length"),
        (("report", "folder"), "--tp", "tp_size"),
        (("bench", "profile.json"), "--prompt", "prompt_tokens"),
        (("bench", "profile.json"), "--output", "output_tokens"),
    ],
)
def test_other_names_of_a_flag_work_and_are_left_out_of_help(command: tuple[str, ...], old: str, name: str) -> None:
    given = ["--model", "demo"] if command == ("plan",) else []
    args, plain = (vars(parse(build_parser(), [*command, *given, *flags])) for flags in ([old, "7"], []))
    assert args[name] == 7 != plain[name]
    assert {**args, name: plain[name]} == plain


@pytest.mark.parametrize("command", ["search", "plan"])
def test_tokens_and_bytes_are_written_alike_in_all_commands(command: str) -> None:
    args = parse(build_parser(), [command, "--model", "demo", "--context-length", "32k", "--residual-length", "1k"])
    assert (args.context_length, args.residual_length) == (32_768, 1024)
    assert parse(build_parser(), ["plan", "--model", "demo", "--memory", "80gib"]).memory == 80 << 30
    assert parse(build_parser(), ["bench", "p.json", "--kv-memory", "40gb"]).kv_memory == 40_000_000_000
