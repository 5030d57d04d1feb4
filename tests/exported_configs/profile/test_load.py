"""Reading a hostile file: size, encoding, nesting, keys, versions and digest, each refusal in one line."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.exported_configs.profile.field_types import MAX_PROFILE_BYTES
from kvtuner.exported_configs.profile.load import load_profile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Document = dict[str, Any]
    Put = Callable[[Document, tuple[str | int, ...], Any], Document]
    Refusal = Callable[[bytes | str | Path], str]

WIDE_SIDE = b"{" + b",".join(b'"a%d":0' % number for number in range(64)) + b"}"
LAYERS = b'{"schema_version":1,"layout":"halfword-sliced-v1","layers":['
WIDE_LAYER = b'{"k":%b,"v":%b,"layer":%b}' % (WIDE_SIDE, WIDE_SIDE, WIDE_SIDE)


def encode(document: Document) -> bytes:
    return json.dumps(document).encode()


def test_edited_storage_without_a_new_digest_is_refused(put: Put, refusal: Refusal, pristine: Document) -> None:
    for steps, value in (
        (("layers", 0, "k", "bits"), 4),
        (("layers", 4, "v", "bits"), 8),
        (("layers", 3, "v", "transform"), "hadamard"),
        (("defaults", "v", "symmetric"), True),
        (("defaults", "k", "group_size"), 48),
        (("geometry", "num_attention_heads"), 3),
        (("geometry", "num_shared_layers"), 1),
    ):
        message = refusal(encode(put(pristine, steps, value)))
        assert f"digest is {pristine['digest']}, but layout, geometry, layers and window give sha256:" in message


def test_edited_digest_is_refused(put: Put, refusal: Refusal, pristine: Document) -> None:
    for wrong in ("sha256:" + "0" * 64, pristine["digest"].upper(), pristine["digest"][7:], ""):
        assert "digest" in refusal(encode(put(pristine, ("digest",), wrong)))


@pytest.mark.parametrize("version", [3, 4, 999])
def test_newer_schema_is_told_apart_from_a_broken_file(refusal: Refusal, pristine: Document, version: int) -> None:
    newer = {"schema_version": version, "layout": "other", "nobody_knows": {"this": [1.5, None] * 1000}}
    for document in (newer, {**pristine, **newer}):
        message = refusal(encode(document))
        assert f"schema_version is {version}, but this kvtuner reads 1 to 2; upgrade kvtuner" in message


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None, [1], {"major": 1}])
def test_schema_version_that_never_existed_is_refused(refusal: Refusal, pristine: Document, version: Any) -> None:
    assert "schema_version must be 1 to 2, not" in refusal(encode({**pristine, "schema_version": version}))


@pytest.mark.parametrize("layout", ["halfword-sliced-v2", "", None, 1, ["halfword-sliced-v1"], "\x1b[2J"])
def test_unknown_layout_is_refused_by_name(refusal: Refusal, pristine: Document, layout: Any) -> None:
    message = refusal(encode({**pristine, "layout": layout}))
    assert "layout must be 'halfword-sliced-v1', not" in message and "upgrade kvtuner" in message


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b" ", b"{", b"}", b"{]", b"[}", b"]" * 99, b"{,}", b"{} {}", b"{}", b'{"a":1,}', b'{"a": 01}'),
        *(b"[]", b"null", b"1", b'"text"', b"'a'", b"// x", b'{"a": "\x00"}', b"\x00", b"PK\x03\x04", b"\x80\x04\x95"),
    ],
)
def test_text_that_is_no_json_object_is_refused(refusal: Refusal, data: bytes) -> None:
    assert refusal(data).startswith("profile: ")


def test_encodings_other_than_plain_utf_8_are_refused(refusal: Refusal, pristine: Document) -> None:
    text = json.dumps(pristine)
    assert "byte order mark" in refusal(b"\xef\xbb\xbf" + text.encode())
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        refusal(text.encode(encoding))
    latin = text.replace("4bit", "4bit f\u00fcr").encode("latin-1")
    assert f"must be UTF-8, but byte {latin.index(0xFC)} is not" in refusal(latin)


def test_truncated_file_is_refused_wherever_it_is_cut(refusal: Refusal, pristine: Document) -> None:
    data = encode(pristine)
    refusals = [refusal(data[:length]) for length in range(0, len(data), 97)]
    assert all(refusals) and len(refusals) > 10


def test_every_refusal_names_the_file(refusal: Refusal, tmp_path: Path, pristine: Document) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(encode({**pristine, "extra": 1}))
    assert refusal(path) == f"{path}: extra: unknown field; export the profile again"


def test_path_that_cannot_be_read_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.json")
    assert "Is a directory" in refusal(tmp_path)
    assert r"'nul\x00byte.json': cannot be read" in refusal("nul\x00byte.json")


def test_named_pipe_is_refused_and_one_that_a_shell_opened_is_read(
    refusal: Refusal, tmp_path: Path, pristine: Document
) -> None:
    """A reader of a pipe that nobody writes to would wait without an end."""
    os.mkfifo(tmp_path / "profile.json")
    assert "cannot be read (a named pipe, where a file is expected)" in refusal(tmp_path / "profile.json")
    reader, writer = os.pipe()
    os.write(writer, encode(pristine))
    os.close(writer)
    assert load_profile(f"/dev/fd/{reader}").digest == pristine["digest"]
    os.close(reader)


def test_file_over_8_mib_is_refused_and_one_of_8_mib_is_read(
    refusal: Refusal, tmp_path: Path, pristine: Document
) -> None:
    path = tmp_path / "padded.json"
    path.write_bytes(encode(pristine).ljust(MAX_PROFILE_BYTES))
    assert load_profile(path).digest == pristine["digest"]
    for size in (MAX_PROFILE_BYTES + 1, 9 * 2**20):
        path.write_bytes(encode(pristine).ljust(size))
        assert "must be at most 8388608 bytes" in refusal(path)
        assert "must be at most 8388608 bytes" in refusal(path.read_bytes())


@pytest.mark.parametrize("unit", [b"[", b'{"a":', b'[{"a":', b'["]",', b'["\\"]",'])
@pytest.mark.parametrize("depth", [17, 1000, 500_000])
def test_deep_nesting_is_refused_before_parsing(refusal: Refusal, unit: bytes, depth: int) -> None:
    assert "must nest at most 16 deep" in refusal(unit * depth)


def test_brackets_inside_texts_are_no_nesting(put: Put, pristine: Document) -> None:
    asked = '[[[{{{"\\' * 20
    assert load_profile(encode(put(pristine, ("budget", "asked"), asked))).budget.asked == asked


@pytest.mark.parametrize(
    ("bomb", "message"),
    [
        (b'{"a": "' + b'\\"' * (4 * 2**20 - 8), "must be JSON"),
        (b'""' * (4 * 2**20), "must be JSON"),
        (b'"\\' * (4 * 2**20), "must be JSON"),
        (b"[" + b"0," * (4 * 2**20 - 2) + b"0]", "must be a JSON object, not list"),
        (LAYERS + b"{}," * (2**21) + b"{}]}", "a list must have at most 1024 items, not 2097153"),
        (LAYERS + b",".join([WIDE_LAYER] * 1024) + b"]}", "digest: the field is missing"),
        (b"{" + b",".join(b'"a%d":0' % n for n in range(600_000)) + b"}", "at most 64 fields, not 600000"),
        (b'{"schema_version":' + b"1" * (8 * 2**20 - 100) + b"}", "at most 20 digits, not 8388508"),
        (b'{"schema_version":0.' + b"1" * (8 * 2**20 - 100) + b"}", "schema_version must be 1 to 2, not 0.1111"),
    ],
    ids=["escapes", "texts", "unclosed", "numbers", "layers", "wide", "fields", "digits", "decimals"],
)
def test_bomb_within_8_mib_is_refused_in_seconds(refusal: Refusal, bomb: bytes, message: str) -> None:
    assert len(bomb) <= MAX_PROFILE_BYTES
    start = time.process_time()
    assert message in refusal(bomb)
    assert time.process_time() - start < 10


def test_file_larger_than_any_memory_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    path = tmp_path / "sparse.json"
    with path.open("wb") as handle:
        handle.truncate(2**40)
    assert "must be at most 8388608 bytes" in refusal(path)
