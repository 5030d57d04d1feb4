"""Prompts of files, whose lines end where those of calibration's data do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvtuner.calibration.corpus import CorpusSource
from kvtuner.calibration.documents.reading import documents_of
from kvtuner.errors import CorpusError
from kvtuner.pipeline.local.engine_flags import GenerateFlags
from kvtuner.pipeline.local.prompts import read_prompts

if TYPE_CHECKING:
    from pathlib import Path

# JSON leaves these unescaped, and str.splitlines() ends lines at them.
SEPARATORS = ("\u2028", "\u2029", "\x85")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("separator", SEPARATORS)
def test_a_line_of_json_may_hold_separators_behind_a_byte_order_mark(
    tmp_path: Path, encoding: str, separator: str
) -> None:
    texts, file = [f"one{separator}two", "three"], tmp_path / "prompts.jsonl"
    rows = [json.dumps({"prompt": text, "text": text}, ensure_ascii=False) for text in texts]
    file.write_text("\r\n".join(rows), encoding=encoding, newline="")
    assert read_prompts(GenerateFlags(prompts=str(file))) == texts
    assert list(documents_of(CorpusSource(str(file)))) == texts


def test_a_file_of_text_begins_behind_its_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo", encoding="utf-8-sig")
    assert read_prompts(GenerateFlags(prompts=str(file))) == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9\n", r"--prompts .* is not UTF-8 text: .*; convert it, as by iconv"),
        (b"{\n", "line 1 is not JSON: .*; write an object with prompt or messages there"),
        (b"[" * 100_000, "line 1 is nested too deeply"),
        (b'{"prompt": ' + b"7" * 5001 + b"}", "line 1 holds an integer of too many digits"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        read_prompts(GenerateFlags(prompts=str(tmp_path / "prompts.jsonl")))
