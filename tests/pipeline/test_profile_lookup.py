"""Commands that read JSON do not import what measures, draws and searches."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest

from kvtuner.exported_configs.sharing.catalogue import catalogue_file

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
