"""Searches and evaluations on data of images and text, by commands and with the processor that the checkpoint has."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tiny.image_models import make_reader
from tiny.image_readers import make_processor, write_image_data
from tiny.small_search import TRIALS

from kvtuner.exported_configs.profile.load import load_profile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import MakeTokenizer, ModelFolder, RunCommand

SMALL = ("--sequence-length", "96", "--sequences", "3,2,3", "--fisher-draws", "1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, sentences: Callable[..., list[str]]) -> Path:
    """Text, and conversations and texts with images."""
    return write_image_data(tmp_path_factory.mktemp("images"), sentences(200, seed=5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_tokenizer: MakeTokenizer) -> Path:
    """A tiny Gemma 3 with its processor, which AutoProcessor loads."""
    folder, processor = tmp_path_factory.mktemp("gemma3"), make_processor("Gemma3", make_tokenizer())
    make_reader("Gemma3", processor.tokenizer).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_search_reads_images_and_an_evaluation_scores_them(
    run: RunCommand, folder: Path, data: Path, corpus_file: Path, tmp_path: Path
) -> None:
    profiles = {}
    for name, corpus in (("images", data), ("text", corpus_file)):
        out = tmp_path / name
        measured = ("--model", folder, "--data", corpus, *SMALL)
        status, text, error = run(
            "search", *measured, *TRIALS, "--out", out, "--budget", "4bit", "--no-report", "--json"
        )
        assert status == 0, error
        profiles[name] = load_profile(out / "profile.json")
    hashes = [profile.provenance.calibration.token_ids_sha256 for profile in profiles.values()]
    assert hashes[0] != hashes[1]
    assert profiles["images"].tuned_geometry().ids == (1, 2)
    measured = ("--model", folder, "--data", data, "--json")
    status, text, error = run("eval", tmp_path / "images/profile.json", *measured, "--levels", "likelihood")
    assert status == 0, error
    result = json.loads(text)
    assert result["data"]["is_unseen"]
    measures = {cell["measure"]: cell["results"] for cell in result["cells"]}
    assert all(row["mean"] > 0 for row in measures["kl_nats_per_token"]) and len(measures["kl_nats_per_token"]) > 1
    status, _, error = run("eval", tmp_path / "images/profile.json", *measured)
    assert status == 2
    assert "levels other than likelihood read text alone, but the data holds images; give --levels likelihood" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--batch-size", "2"), "--batch-size runs on text alone, but the data holds images"),
        (("--stream",), "--stream runs on text alone, but the data holds images"),
    ],
)
def test_what_runs_on_text_alone_is_refused_by_its_flag(
    run: RunCommand, folder: Path, data: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    arguments = ("--model", folder, "--data", data, *SMALL, "--out", tmp_path / "run", "--budget", "4bit")
    status, _, error = run("search", *arguments, *flags)
    assert status == 2
    assert message in error


def test_a_model_without_a_processor_of_images_is_refused(
    run: RunCommand, model_folder: ModelFolder, data: Path, tmp_path: Path
) -> None:
    arguments = ("--data", data, *SMALL, "--out", tmp_path / "run", "--budget", "4bit")
    status, _, error = run("search", "--model", model_folder("llama-gqa"), *arguments)
    assert status == 2
    assert "processor of images, but the data holds images; give --data of text alone" in error
