"""The printed command to serve finds the model and the profile from wherever it is run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from profile_samples import MODEL

from kvtuner.calibration.model_loading import DEMO_MODEL
from kvtuner.exported_configs.identity.checkpoint_hash import checkpoint_sha256
from kvtuner.exported_configs.profile.records import ModelIdentity
from kvtuner.exported_configs.sharing.serve_command import asks_for_folder, serve_command

COMMIT = "0123456789" * 4


def words_of(reference: str, folder: Path, **model: Any) -> list[str]:
    """The words behind the launcher's name that a shell makes of a command, run in some folder."""
    command = serve_command(ModelIdentity.model_validate({**MODEL, "revision": None, **model}), reference)
    start, launcher, words = command.partition("python -m sglang.launch_server ")
    assert launcher and not start
    # The reader's python is the one that SGLang and kvtuner are installed for.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    printed = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {words}"],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return printed.stdout.splitlines()


@pytest.mark.parametrize("reference", ["catalogue:demo-4bit", "me/x@main#sha256:00", "/a folder/it's.json"])
def test_the_demo_model_is_the_folder_of_the_installed_package(reference: str, tmp_path: Path) -> None:
    words = ["--model-path", str(DEMO_MODEL), "--kvtuner-profile", reference]
    assert words_of(reference, tmp_path, id="demo", checkpoint_sha256=checkpoint_sha256(DEMO_MODEL)) == words


@pytest.mark.parametrize("weights", [None, "sha256:" + "0" * 64])
def test_a_folder_of_the_users_own_that_is_called_demo_is_not_the_shipped_model(
    weights: str | None, tmp_path: Path
) -> None:
    model = {"id": "demo", "checkpoint_sha256": weights}
    assert words_of("p.json", tmp_path, **model)[1] == "FOLDER_OF_THE_MODEL"
    assert asks_for_folder(ModelIdentity.model_validate({**MODEL, "revision": None, **model}))


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({"id": "Qwen/Qwen2.5-7B-Instruct"}, ["Qwen/Qwen2.5-7B-Instruct"]),
        ({"id": "a/b", "revision": COMMIT}, ["a/b", "--revision", COMMIT]),
        ({"id": "gpt2", "revision": COMMIT}, ["gpt2", "--revision", COMMIT]),
        ({"id": "m2"}, ["FOLDER_OF_THE_MODEL"]),
        ({"id": "x; touch $(id)"}, ["FOLDER_OF_THE_MODEL"]),
    ],
)
def test_a_model_is_named_as_the_reader_can_find_it(model: dict[str, str], path: list[str], tmp_path: Path) -> None:
    assert words_of("p.json", tmp_path, **model) == ["--model-path", *path, "--kvtuner-profile", "p.json"]
    assert asks_for_folder(ModelIdentity.model_validate({**MODEL, "revision": None, **model})) == (path[0].isupper())


def test_hostile_names_are_words_and_no_commands(tmp_path: Path) -> None:
    words = words_of("a b$(touch x)`touch y`'", tmp_path, id="x; touch z", revision="a && b")
    assert shlex.join(words) == shlex.join(
        ["--model-path", "x; touch z", "--revision", "a && b", "--kvtuner-profile", "a b$(touch x)`touch y`'"]
    )
    assert list(tmp_path.iterdir()) == []
