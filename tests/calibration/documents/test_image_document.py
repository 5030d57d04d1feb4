"""Rows of data that hold images, in the forms that data sets have."""

from __future__ import annotations

import base64
import hashlib
import io
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kvtuner.calibration.documents.image_document import ImageDocument, ImageSource, image_document
from kvtuner.errors import CorpusError

BYTES = io.BytesIO()
Image.new("RGBA", (3, 2), (10, 20, 30, 255)).save(BYTES, "PNG")
ENCODED = base64.b64encode(BYTES.getvalue()).decode()


def broken_png() -> bytes:
    """A file whose pixels are in two parts, the second without a name: Pillow raises a SyntaxError."""
    whole = BYTES.getvalue()
    start = whole.index(b"IDAT") - 4
    length = int.from_bytes(whole[start : start + 4], "big")
    data = whole[start + 8 : start + 8 + length]
    half = b"IDAT" + data[:5]
    part = (5).to_bytes(4, "big") + half + zlib.crc32(half).to_bytes(4, "big")
    return whole[:start] + part + bytes((0, 0, 0, 5, 1, 2, 3, 4)) + data[5:]


def document(row: dict[str, Any]) -> ImageDocument | None:
    return image_document(row, "text", Path("/nowhere"), "data.jsonl, line 3")


def values(row: dict[str, Any]) -> list[Any]:
    found = document(row)
    assert found is not None
    return [image.value for image in found.images]


def talk(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "yes"}]}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "a.png"},
        {"type": "image", "url": "a.png"},
        {"type": "image", "base64": "a.png"},
    ],
)
def test_parts_of_messages_name_their_images(part: dict[str, str]) -> None:
    row = talk({"type": "text", "text": "what is"}, part, {"type": "text", "text": "?"})
    assert values(row) == [{"base64": "a.png"} if "base64" in part else "a.png"]
    found = document(row)
    assert found is not None
    assert found.content[0] == {  # type: ignore[comparison-overlap]  # messages, as asserted above
        "role": "user",
        "content": [{"type": "text", "text": "what is"}, {"type": "image"}, {"type": "text", "text": "?"}],
    }


def test_images_beside_messages_take_the_places_that_name_none() -> None:
    row = {**talk({"type": "image"}, {"type": "image", "path": "own.png"}, {"type": "image"}), "images": ["a", "b"]}
    assert values(row) == ["a", "own.png", "b"]
    marked = {"images": ["a"], "messages": [{"role": "user", "content": "see <image>!"}]}
    found = document(marked)
    assert found is not None
    assert found.content == (
        {
            "role": "user",
            "content": [{"type": "text", "text": "see "}, {"type": "image"}, {"type": "text", "text": "!"}],
        },
    )


def test_texts_have_images_beside_them() -> None:
    found = document({"image": "a.png", "text": "one <image> two"})
    assert found == ImageDocument("one <image> two", (ImageSource("a.png", Path("/nowhere"), "data.jsonl, line 3"),))


def test_a_string_beside_a_text_is_an_image_where_it_names_a_file_or_holds_bytes_or_the_text_marks_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.png").write_bytes(BYTES.getvalue())

    def is_image(value: Any, text: str = "run it", folder: Path | None = tmp_path) -> bool:
        return image_document({"image": value, "text": text}, "text", folder, "row 1") is not None

    assert is_image("a.png") and is_image(ENCODED) and is_image(f"data:image/png;base64,{ENCODED}")
    assert is_image("lost.png", "see <image>") and is_image(["lost.png"])
    names = ("python:3.12", "lost.png", "https://somewhere/a.png", hashlib.sha256().hexdigest(), "a" * 2000, "a\0", ".")
    assert not any(map(is_image, names))
    assert not is_image("a.png", folder=None), "data from elsewhere name no file here"


def test_files_of_other_folders_and_images_of_other_sizes_are_told_apart(tmp_path: Path) -> None:
    sources = [ImageSource("a.png", tmp_path / name, "row 1") for name in ("first", "second")]
    for number, source in enumerate(sources):
        assert source.folder is not None
        source.folder.mkdir()
        Image.new("RGB", (3, 2), (number, 0, 0)).save(source.folder / "a.png")
    sources += [ImageSource(Image.new("RGB", size), tmp_path, "row 1") for size in ((4, 2), (2, 4))]
    sources += [ImageSource(Image.new("L", (12, 2)), tmp_path, "row 1"), ImageSource("\ud800.png", tmp_path, "row 1")]
    sources += [ImageSource({"bytes": content, "path": None}, tmp_path, "row 1") for content in (b"a", b"b")]
    assert len({ImageDocument("one", (source,)).key for source in sources}) == len(sources)
    same = ImageSource("first/a.png", tmp_path, "row 1")
    assert same.identity == sources[0].identity


@pytest.mark.parametrize(
    "row", [{"text": "a <image> of it"}, talk({"type": "text", "text": "x"}), {"images": [], "text": "x"}]
)
def test_rows_without_images_are_none(row: dict[str, Any]) -> None:
    assert document(row) is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (talk({"type": "image"}), "an image that neither it nor 'images' names"),
        ({**talk({"type": "text", "text": "x"}), "images": ["a"]}, "1 images have no place; mark each"),
    ],
)
def test_images_and_places_that_do_not_match_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(CorpusError, match=message) as caught:
        document(row)
    assert str(caught.value).startswith("data.jsonl, line 3: ")


def test_images_are_read_from_files_urls_of_data_bytes_and_what_a_data_set_decoded(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(BYTES.getvalue())
    forms = [
        "a.png", str(tmp_path / "a.png"), f"data:image/png;base64,{ENCODED}", {"bytes": BYTES.getvalue(), "path": None},
        {"path": "a.png"}, {"url": f"data:image/png;base64,{ENCODED}"}, Image.new("RGB", (3, 2), (10, 20, 30)),
        ENCODED, {"base64": ENCODED},
    ]  # fmt: skip
    for form in forms:
        image = ImageSource(form, tmp_path, "row 1").read()
        assert (image.mode, image.size, image.getpixel((1, 1))) == ("RGB", (3, 2), (10, 20, 30))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("https://somewhere/a.png", "images are not fetched; download https://somewhere/a.png"),
        ("a.png", "image a.png does not exist; paths begin in"),
        ("data:image/png;base64,???", "an image is no base64"),
        (f"data:image/png;base64,{ENCODED[:60]}", "cannot read an image"),
        (broken_png(), "cannot read an image: broken PNG file"),
        ({"base64": "a.png"}, "an image is no base64: a.png"),
        ("a" * 2000, "image a+ does not exist"),
        (7, "an image is a path, a data URL or its bytes, not int"),
    ],
)
def test_what_is_no_image_is_refused_by_its_row(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=message) as caught:
        ImageSource(value, tmp_path, "data.jsonl, line 3").read()
    assert str(caught.value).startswith("data.jsonl, line 3: ")


def test_data_from_elsewhere_must_not_name_files_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(BYTES.getvalue())
    for value in (str(path), f"file://{path}", {"bytes": None, "path": str(path)}):
        with pytest.raises(CorpusError, match="row 1: an image of a data set must be there with its bytes, not as"):
            ImageSource(value, None, "row 1").read()
    assert ImageSource({"bytes": BYTES.getvalue(), "path": str(path)}, None, "row 1").read().size == (3, 2)


def test_equal_questions_about_other_images_are_other_documents() -> None:
    first, second = (document({"images": [name], "text": "what is it?"}) for name in ("a.png", "b.png"))
    assert first is not None
    assert second is not None
    assert first.key != second.key
