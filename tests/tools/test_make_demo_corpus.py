"""The program that writes the demo corpus writes the shipped one."""

from __future__ import annotations

import json
import sys

import pytest

from kvtuner.calibration.model_loading import DEMO_MODEL
from tools import make_demo_corpus


def test_the_shipped_corpus_is_what_its_script_writes_of_the_generated_tasks() -> None:
    shipped = {json.loads(line)["text"] for line in (DEMO_MODEL.parent / "corpus.jsonl").read_text().splitlines()}
    written = set(make_demo_corpus.documents(2026, num_excerpts=330, num_tables=220, num_additions=50))
    # Excerpts are of this Python's own library, tables and additions are drawn after as many excerpts.
    assert len(written) == pytest.approx(600, abs=5)
    assert sum("?\n" in text and ":" in text for text in shipped) >= 200
    if sys.version_info[:3] == (3, 11, 7):
        assert written == shipped
