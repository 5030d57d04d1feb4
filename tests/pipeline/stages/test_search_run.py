"""What a search says of its settings before it loads the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tiny.latent_models import TOPK

from kvtuner.errors import KVTunerError

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import ModelFolder, RunCommand


@pytest.mark.parametrize(
    ("name", "length", "is_said"),
    [("deepseek-v32", TOPK - 1, True), ("glm-moe-dsa", TOPK, True), ("axk2", TOPK + 1, False), ("axk1", TOPK, False)],
)
def test_sequences_that_an_index_selects_whole_are_said_to_measure_attention_to_all(
    name: str,
    length: int,
    is_said: bool,
    run: RunCommand,
    model_folder: ModelFolder,
    corpus_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(*_: object) -> None:
        raise KVTunerError("the model is not loaded")

    monkeypatch.setattr("kvtuner.pipeline.stages.search_run.load_model", end)
    search = ("search", "--model", model_folder(name), "--data", corpus_file, "--out", tmp_path, "--budget", "6bit")
    status, _, error = run(*search, "--sequence-length", str(length))
    assert status != 0 and "the model is not loaded" in error
    warning = f"--sequence-length {length} is not above the {TOPK} tokens that an index selects (index_topk)"
    assert (warning in error) == is_said
