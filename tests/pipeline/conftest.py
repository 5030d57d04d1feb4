"""A search of the whole pipeline, for the tests of models of several kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tiny.small_search import Searched, search_by_command

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import ModelFolder, RunCommand
    from tiny.small_search import SearchWhole


@pytest.fixture
def search_whole(run: RunCommand, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path) -> SearchWhole:
    """`search_whole(name, budget)`: a small search of a tiny model, and what other commands say of its profile."""

    def search(name: str, budget: str) -> Searched:
        return search_by_command(run, model_folder(name), corpus_file, tmp_path / "run", budget)

    return search
