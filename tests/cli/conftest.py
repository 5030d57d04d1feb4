from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.cli import main

if TYPE_CHECKING:
    from fixture_types import ModelFolder, RunCommand, Search, SmallCommand, StartCommand

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--sequence-length", "64", "--sequences", "2,2,3", "--fisher-draws", "1")


@pytest.fixture
def run_search(run: RunCommand, model_folder: ModelFolder, corpus_file: Path) -> RunCommand:
    """Run a small search of a tiny model in this process; a flag that is given takes the place of the small one."""

    def call(*flags: object) -> tuple[int, str, str]:
        return run("search", "--model", model_folder("llama-gqa"), "--data", corpus_file, *SMALL, *flags)

    return call


@pytest.fixture
def search(run_search: RunCommand, model_folder: ModelFolder) -> Search:
    """Make a small search of a tiny model, without the report unless asked for; returns the JSON result."""

    def call(out: Path, *args: str, model: str = "llama-gqa", trials: int | None = 6, report: bool = False) -> Any:
        status, stdout, stderr = run_search(
            "--model", model_folder(model), *(() if trials is None else ("--trials", trials)), "--out", out, "--json",
            *(() if report else ("--no-report",)), *args,
        )  # fmt: skip
        assert status == 0, stderr
        return json.loads(stdout)

    return call


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: ModelFolder, corpus_file: Path) -> Path:
    """The run folder of a search of 3 bit with two trials, to be copied; `search` with the same flags goes on there."""
    out = tmp_path_factory.mktemp("finished") / "run"
    status = main([
        "search", "--model", str(model_folder("llama-gqa")), "--data", str(corpus_file), *SMALL,
        "--budget", "3bit", "--trials", "2", "--out", str(out), "--no-report", "--json",
    ])  # fmt: skip
    assert status == 0
    return out


@pytest.fixture
def small_command(model_folder: ModelFolder, corpus_file: Path) -> SmallCommand:
    """`small_command(out, *args, command="search")`: the arguments of a small search of 3 bits, 30 trials long."""

    def call(out: Path, *args: str, command: str = "search") -> list[str]:
        flags = ["--budget", "3bit", "--trials", "30"] if command == "search" else []
        model = str(model_folder("llama-gqa"))
        return [command, "--model", model, "--data", str(corpus_file), *SMALL, *flags, "--out", str(out), *args]

    return call


@pytest.fixture
def start(small_command: SmallCommand) -> StartCommand:
    """Start the same search in a process of its own, to be killed."""

    def call(out: Path, *args: str, command: str = "search") -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "kvtuner", *small_command(out, *args, command=command)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=out.parent,
        )  # fmt: skip

    return call
