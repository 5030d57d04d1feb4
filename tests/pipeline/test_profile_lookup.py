"""Profiles are found by what they hold, and commands that read them import nothing that measures or draws."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest

from kvtuner.exported_configs.sharing.catalogue import FOLDER, catalogue_file, load_index
from kvtuner.pipeline.profile_lookup import list_profiles

if TYPE_CHECKING:
    from pathlib import Path

    from hub_server import LoopbackHub

HEAVY: Final = {"datasets", "matplotlib", "optuna", "scipy", "torch", "transformers"}
PROGRAM: Final = """
import json, sys
from kvtuner.cli import main
status = main(sys.argv[1:])
print(json.dumps([status, sorted(sys.modules)]), file=sys.stderr)
"""
REPO: Final = "me/demo-kv4"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with two profiles and their evaluations, one with constants."""
    folder = tmp_path_factory.mktemp("light")
    for budget in ("3bit", "4bit"):
        for source in catalogue_file(f"demo-{budget}").parent.glob(f"demo-{budget}.*"):
            shutil.copy(source, folder / source.name.replace(f"demo-{budget}", f"profile-{budget}"))
    return folder


def heavy_imports(*words: str | Path) -> set[str]:
    """The packages of `HEAVY` that a command imports, in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    status, modules = json.loads(done.stderr.splitlines()[-1])
    assert status == 0 and done.stdout, done.stderr
    return HEAVY & set(modules)


@pytest.mark.parametrize("command", ["show", "validate"])
@pytest.mark.parametrize("name", ["profile-4bit.json", "", "catalogue:demo-4bit"], ids=["file", "run", "catalogue"])
def test_a_profile_is_read_without_what_measures_and_draws(command: str, name: str, run_folder: Path) -> None:
    assert heavy_imports(command, name if name.startswith("catalogue:") else run_folder / name) == set()


def test_profiles_are_compared_and_listed_without_it(run_folder: Path) -> None:
    assert heavy_imports("diff", run_folder / "profile-3bit.json", run_folder / "profile-4bit.json") == set()
    assert heavy_imports("list", run_folder) == set()


def test_a_profile_is_pulled_without_it(run_folder: Path, hub: LoopbackHub) -> None:
    hub.repo(REPO, {"profile.json": (run_folder / "profile-4bit.json").read_bytes()})
    assert heavy_imports("pull", REPO) == set()


def test_a_command_that_measures_is_seen_to_import_it() -> None:
    assert heavy_imports("search", "--model", "demo", "--budget", "4bit", "--dry-run") >= {"torch", "transformers"}


def listed_in(folder: Path) -> list[str]:
    """The names of the files of a folder, and of those below it, that are listed."""
    return [found.path.name for found in list_profiles(folder) if found.where == "folder"]


def test_a_folder_lists_profiles_by_any_name_and_no_other_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [entry.name for entry in load_index().profiles]
    assert names and listed_in(FOLDER) == [f"{name}.json" for name in names]
    (tmp_path / "below").mkdir()
    shutil.copy(FOLDER / "demo-4bit.json", tmp_path / "below" / "mine.json")
    shutil.copy(FOLDER / "index.json", tmp_path / "index.json")
    shutil.copy(FOLDER.parent / "schema.json", tmp_path / "schema.json")
    (tmp_path / "package.json").write_text('{"name": "x", "digest": "y", "layout": 1}')
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\x00" * 100)
    os.mkfifo(tmp_path / "pipe.json")
    assert listed_in(tmp_path) == ["mine.json"] and capsys.readouterr().err == ""


def test_a_file_that_would_be_a_profile_and_is_not_valid_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (FOLDER / "demo-4bit.json").read_text()
    (tmp_path / "mine.json").write_text(text.replace('"bits": 4', '"bits": 8', 1))
    (tmp_path / "profile-4bit.json").write_text("{}")
    assert listed_in(tmp_path) == []
    lines = capsys.readouterr().err.splitlines()
    assert [name for line in lines for name in re.findall(r"not shown: .*/(\S+\.json): ", line)] == [
        "mine.json",
        "profile-4bit.json",
    ]
