"""Rows with images as files and data sets have them, by the function that reads documents."""

from __future__ import annotations

import datetime
import io
import json
from typing import TYPE_CHECKING, Any

import datasets
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from PIL import Image

from kvtuner.calibration.corpus import CorpusSource
from kvtuner.calibration.documents.image_document import ImageDocument
from kvtuner.calibration.documents.reading import documents_of, without_repeats
from kvtuner.errors import CorpusError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (number, 0, 0)).save(file, "PNG")
    return file.getvalue()


def images_of(source: CorpusSource) -> list[Image.Image]:
    """The images of documents, in the order of their first channel."""
    documents = [document for document in documents_of(source) if isinstance(document, ImageDocument)]
    found = [image.read() for document in documents for image in document.images]
    return sorted(found, key=lambda image: image.tobytes())


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`stream(rows, features)`: a source whose data set has rows, as its stream gives them."""

    def make(rows: Sequence[dict[str, Any]], features: dict[str, Any] | None = None) -> CorpusSource:
        data = datasets.IterableDataset.from_generator(
            lambda: iter(rows), features=None if features is None else datasets.Features(features)
        )
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data)
        return CorpusSource("someone/pictures")

    return make


FEATURES = {"image": datasets.Image(), "text": datasets.Value("string")}


def test_images_of_a_data_set_are_kept_encoded_and_read_from_their_bytes_or_a_file_of_the_hub(
    stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_registry, "hf", MemoryFileSystem)  # the hub is not reachable
    MemoryFileSystem().pipe("hf://datasets/someone/pictures/own.png", png(3))
    values = [{"bytes": png(1), "path": "a.png"}, {"bytes": png(2), "path": None}]
    values.append({"bytes": None, "path": "hf://datasets/someone/pictures/own.png"})
    source = stream([{"image": value, "text": f"number {n}"} for n, value in enumerate(values)], FEATURES)
    assert [image.getpixel((0, 0)) for image in images_of(source)] == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]
    kept = [document.images[0].value for document in documents_of(source) if isinstance(document, ImageDocument)]
    assert sum(isinstance(value, dict) and isinstance(value["bytes"], bytes) for value in kept) == 2


def test_a_path_in_a_row_of_a_data_set_names_no_file_of_this_machine(stream: Any, tmp_path: Path) -> None:
    (tmp_path / "own.png").write_bytes(png(3))
    path = str(tmp_path / "own.png")
    with pytest.raises(CorpusError, match="someone/pictures, row 1: an image of a data set must be there"):
        images_of(stream([{"images": [path], "text": "one"}]))
    with pytest.raises(CorpusError, match="someone/pictures, row 1: an image of a data set must be there"):
        images_of(stream([{"image": {"bytes": None, "path": path}, "text": "one"}], FEATURES))
    assert list(documents_of(stream([{"image": path, "text": "one"}]))) == ["one"]


def test_messages_beside_images_may_hold_what_json_does_not(stream: Any) -> None:
    parts = [{"type": "image", "image": {"bytes": png(1), "path": None}}, {"type": "text", "text": "?", "raw": b"x"}]
    when = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    source = stream([{"messages": [{"role": "user", "when": when, "content": parts}]}])
    assert len(images_of(source)) == 1


def test_messages_with_images_need_a_role(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    row = {"messages": [{"content": [{"type": "image", "path": "a.png"}]}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(CorpusError, match="line 1: 'messages' must be a list of objects with 'role'"):
        list(documents_of(CorpusSource(str(tmp_path))))


def test_equal_names_in_other_folders_are_no_repeats(tmp_path: Path) -> None:
    for number, name in enumerate(("first", "second")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(png(number))
        row = json.dumps({"images": ["0.png"], "text": "Describe it."})
        (tmp_path / name / "rows.jsonl").write_text(row, encoding="utf-8")
    source = CorpusSource(str(tmp_path), deduplicate=True)
    assert len(without_repeats(list(documents_of(source)), source)) == 2
