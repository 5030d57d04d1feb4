"""``import kvtuner``: light, with every public name at hand, and searches as the command does."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest

import kvtuner
from kvtuner.cli.parser import build_parser
from kvtuner.errors import BudgetError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HEAVY: Final = ("torch", "transformers", "optuna", "sglang", "matplotlib", "numpy", "pydantic")
COMMAND_ONLY: Final = {"command", "config", "dry_run", "html", "json", "debug", "verbose"}


def test_the_import_brings_nothing_heavy() -> None:
    program = f"import sys, kvtuner, kvtuner.pipeline.python_interface; print([n for n in {HEAVY} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", kvtuner.__all__)
def test_every_public_name_is_there_when_it_is_asked_for(name: str) -> None:
    assert callable(getattr(kvtuner, name))
    assert name in dir(kvtuner)


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvtuner.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("plan", ["plan"]),
        ("search", ["search"]),
        ("calibrate", ["calibrate"]),
        ("evaluate", ["eval", "profile.json"]),
    ],
)
def test_a_function_takes_what_its_command_takes_with_the_same_defaults(name: str, command: list[str]) -> None:
    flags = {
        flag: default for flag, default in vars(build_parser().parse_args(command)).items() if flag not in COMMAND_ONLY
    }
    parameters = inspect.signature(getattr(kvtuner, name)).parameters
    assert set(parameters) == set(flags)
    for flag, default in flags.items():
        if flag != "budget" and parameters[flag].default is not inspect.Parameter.empty:
            assert parameters[flag].default == default, flag


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"budgets": "4bit"}, TypeError, "'budgets' is no option"),
        ({}, BudgetError, "--budget"),
        ({"budget": "4bit", "trials": 0}, OptionError, "trials must be at least 1, not 0"),
        ({"budget": "4bit", "score": "best"}, OptionError, "score must be one of 'kl', 'fisher', 'e_o', not 'best'"),
        ({"budget": "4bit", "word_bits": 16}, OptionError, "word_bits must be one of '32', '16', 'auto', not 16"),
        ({"budget": "4bit", "seed": -1}, OptionError, "seed must be within"),
        ({"budget": "4bit", "sequences": (2, 2, 1)}, OptionError, "at least 2 to report on, .* not 1"),
        ({"budget": "4bit", "workers": 2.5}, OptionError, "workers must be a whole number, not '2.5'"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_loaded(
    options: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        kvtuner.search("demo", **options)  # type: ignore[call-overload]


def test_a_search_returns_its_profile_its_folder_and_its_tables(
    model_folder: Callable[[str], Path], corpus_file: Path, tmp_path: Path
) -> None:
    result = kvtuner.search(
        model_folder("llama-gqa"), budget="3bit", data=corpus_file, sequence_length=64, sequences=(2, 2, 3),
        fisher_draws=1, trials=2, report=False, out=tmp_path / "run",
    )  # fmt: skip
    assert result.run_folder == tmp_path / "run"
    assert result.profile == kvtuner.load_profile(result.file)
    assert repr(result.profile) in repr(result) and "\n" not in repr(result)
    assert str(result.profile) == repr(result.profile)
    assert result.profile.digest[:19] in repr(result.profile) and len(repr(result.profile)) < 150
    assert result._repr_html_() == result.profile._repr_html_()
    assert "K" in result.profile._repr_html_() and "<script" not in result.profile._repr_html_()
    assert list(result.layers["layer"]) == [0, 1, 2]
    assert {"name", "kl", "bytes_per_token"} <= set(result.quality.columns)
    assert len(result.trials) >= 2
    command = json.loads(result.file.read_text())["provenance"]["command"]
    assert command.startswith("kvtuner search --budget 3bit --data ") and "--fisher-draws 1" in command


def test_without_pandas_tables_are_lists_of_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtuner.report import table

    monkeypatch.setattr(table, "find_spec", lambda name: None)
    assert table.record_table([{"layer": 0}]) == [{"layer": 0}]
