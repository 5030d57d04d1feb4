"""The journal of answers: an answer is asked for once, and one of an earlier version is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.evaluation.backends.base import AnswerJournal, HitCount
from kvtuner.journal import Journal
from kvtuner.run_folder import RunFolder, sha256_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("field", ["answer", "said"])
def test_answers_of_this_and_earlier_versions_are_not_asked_for_again(field: str, tmp_path: Path) -> None:
    folder, backend = RunFolder(tmp_path), SimpleNamespace(key="key", hits=None)
    Journal(folder, "answers.jsonl", "identity").append({"key": sha256_of([1, "key", "question"]), field: "kept"})
    journal = AnswerJournal(folder, "answers.jsonl", "identity", version=1)
    asked: Any = iter(["new"])
    assert journal.ask(backend, ["question"], lambda: next(asked)) == ("kept", HitCount())  # type: ignore[arg-type]
    assert journal.ask(backend, ["other"], lambda: next(asked)) == ("new", HitCount())  # type: ignore[arg-type]
    assert journal.ask(backend, ["other"], lambda: next(asked)) == ("new", HitCount())  # type: ignore[arg-type]
