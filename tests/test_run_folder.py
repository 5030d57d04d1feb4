"""What a run folder writes, and what it refuses to read: damaged files, foreign identities, full disks."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvtuner import run_folder
from kvtuner.errors import RunFolderError
from kvtuner.run_folder import EVENTS, RunFolder, canonical_json, refuse_difference, sha256_of, write_atomically


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run_folder = RunFolder(tmp_path / "run")
    run_folder.create()
    return run_folder


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


def raise_error(code: int) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_canonical_json_is_sorted_dense_and_unescaped() -> None:
    assert canonical_json({"b": [1, 2.5, None], "a": {"é": "ü"}}) == '{"a":{"é":"ü"},"b":[1,2.5,null]}'
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})


def test_hash_is_of_the_canonical_text() -> None:
    expected = hashlib.sha256('{"a":"é","b":[1]}'.encode()).hexdigest()
    assert sha256_of({"b": [1], "a": "é"}) == f"sha256:{expected}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_refused_before_anything_is_written(folder: RunFolder, value: float) -> None:
    folder.write_checked("table.json", {"score": 1.0})
    folder.append("log.jsonl", {"score": 1.0})
    before = {name: folder.file(name).read_bytes() for name in names(folder)}
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json([value])
    with pytest.raises(ValueError, match="not JSON compliant"):
        folder.write_checked("table.json", {"score": value})
    with pytest.raises(ValueError, match="not JSON compliant"):
        folder.append("log.jsonl", {"score": value})
    assert {name: folder.file(name).read_bytes() for name in names(folder)} == before


def test_checked_file_reads_back_what_was_written(folder: RunFolder) -> None:
    payload = {"é": [1, 2.5, None, True], "nested": {"a": {"b": "\u2028"}}, "float": 0.1 + 0.2}
    folder.write_checked("table.json", payload)
    assert folder.read_checked("table.json") == payload
    folder.write_checked("table.json", {})
    assert folder.read_checked("table.json") == {}
    assert names(folder) == ["table.json"]


def test_integer_keys_and_tuples_are_read_back_as_json_has_them(folder: RunFolder) -> None:
    folder.write_checked("table.json", {"layers": {10: (1, 2), 2: (3,)}})
    assert folder.read_checked("table.json") == {"layers": {"10": [1, 2], "2": [3]}}


def test_file_is_written_into_folders_that_do_not_exist_yet(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deeper" / "page.html"
    write_atomically(path, "é")
    write_atomically(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert [entry.name for entry in path.parent.iterdir()] == ["page.html"]


def test_checked_file_cut_anywhere_is_refused(folder: RunFolder) -> None:
    folder.write_checked("table.json", {"scores": [0.25, 0.5], "name": "é"})
    path = folder.file("table.json")
    whole = path.read_bytes()
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(
            RunFolderError, match=r"table\.json is damaged .*; delete it and run the command that wrote it again"
        ):
            folder.read_checked("table.json")


def test_checked_file_with_any_one_bit_flipped_is_refused(folder: RunFolder) -> None:
    payload = {"scores": [0.25, 0.5], "name": "é"}
    folder.write_checked("table.json", payload)
    path = folder.file("table.json")
    whole = path.read_bytes()
    for position in range(len(whole) - 1):
        for bit in range(8):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :])
            with pytest.raises(RunFolderError, match="is damaged"):
                folder.read_checked("table.json")
    path.write_bytes(whole)
    assert folder.read_checked("table.json") == payload


def checked(payload_text: str, checksum: str | None = None) -> str:
    digest = "sha256:" + hashlib.sha256(payload_text.encode("utf-8", "surrogatepass")).hexdigest()
    return f'{{"checksum": {json.dumps(checksum or digest)}, "payload": {payload_text}}}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        '"text"',
        '{"a": 1}',
        '{"payload": {}}',
        '{"checksum": null, "payload": {}}',
        '{"checksum": null, "payload": {"a": 1e999}}',
        checked("{}", checksum="sha256:0"),
        checked("[]"),
        checked("1"),
        checked("null"),
        checked("{}").replace("}", ', "more": 1}', 1),
        checked('{"a":NaN}'),
        checked('{"a":Infinity}'),
        checked('{"a":1e999}'),
        checked('{"a":"\\ud800"}'),
        checked('{"a": 1}'),  # a checksum, but not of the canonical text
        "[" * 100_000,
        '{"checksum": "", "payload": ' + '{"a":' * 100_000,
        "9" * 10_000,
    ],
)
def test_text_that_write_checked_never_writes_is_refused(folder: RunFolder, text: str) -> None:
    folder.file("table.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunFolderError, match="is damaged"):
        folder.read_checked("table.json")


def test_bytes_that_are_no_text_are_refused(folder: RunFolder) -> None:
    folder.file("table.json").write_bytes(b"\xff\xfe\x00" * 100)
    with pytest.raises(RunFolderError, match="is damaged"):
        folder.read_checked("table.json")


def test_folder_opens_again_for_the_identity_that_it_was_made_for(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new")
    identity = {"model": "a/b", "positions": (0, 4096), "bits": {8: "x", 16: "y"}, "revision": None}
    for _ in range(2):
        folder.check_identity("identity.json", identity, "measurements")
    assert folder.read_checked("identity.json")["positions"] == [0, 4096]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"seed": "0"}, 'seed is 0 there and "0" here'),
        ({"zeta": True, "model": "c/d"}, 'model is "a/b" there and "c/d" here'),
        ({"zeta": True}, "zeta is null there and true here"),
        ({"corpus": "x" * 500}, 'corpus is "wiki" there and "' + "x" * 56 + r"\.\.\. here"),
    ],
)
def test_folder_of_another_run_names_the_first_field_that_differs(
    folder: RunFolder, change: dict[str, Any], complaint: str
) -> None:
    identity = {"model": "a/b", "seed": 0, "corpus": "wiki"}
    folder.check_identity("identity.json", identity, "measurements")
    before = folder.file("identity.json").read_bytes()
    with pytest.raises(RunFolderError, match=f"holds the measurements of another run: {complaint}.*--out"):
        folder.check_identity("identity.json", {**identity, **change}, "measurements")
    assert folder.file("identity.json").read_bytes() == before


def test_identity_that_lost_a_field_is_another() -> None:
    with pytest.raises(RunFolderError, match=r"^complaint: seed is 3 there and null here"):
        refuse_difference({"a": 1, "seed": 3}, {"a": 1}, "complaint")
    refuse_difference({"a": 1, "b": [1, 2]}, {"b": (1, 2), "a": 1}, "complaint")


def test_damaged_identity_is_not_replaced(folder: RunFolder) -> None:
    folder.file("identity.json").write_text("{", encoding="utf-8")
    with pytest.raises(RunFolderError, match="is damaged"):
        folder.check_identity("identity.json", {"seed": 0}, "measurements")
    assert folder.file("identity.json").read_text(encoding="utf-8") == "{"


def test_log_cut_anywhere_in_its_last_line_keeps_the_others_and_the_next(folder: RunFolder) -> None:
    for index in range(3):
        folder.append("log.jsonl", {"index": index, "text": "é\u2028\n"})
    path = folder.file("log.jsonl")
    whole = path.read_bytes()
    start_of_last = whole.rindex(b"\n", 0, -1) + 1
    for size in range(start_of_last, len(whole) + 1):
        path.write_bytes(whole[:size])
        survivors = [0, 1, 2] if size >= len(whole) - 1 else [0, 1]
        assert [record["index"] for record in folder.records("log.jsonl")] == survivors
        folder.append("log.jsonl", {"index": 9})
        assert [record["index"] for record in folder.records("log.jsonl")] == [*survivors, 9]


def test_log_lines_that_are_no_objects_are_skipped(folder: RunFolder) -> None:
    folder.append("log.jsonl", {"a": 1})
    with folder.file("log.jsonl").open("ab") as handle:
        handle.write(b'\n[1]\n7\n"x"\nnull\n\xff\xfe\n{"a":\n{"a":2}\n')
    folder.append("log.jsonl", {"a": 3})
    assert list(folder.records("log.jsonl")) == [{"a": 1}, {"a": 3}]


def test_a_log_line_with_any_character_changed_is_skipped(folder: RunFolder) -> None:
    record = {"kl": 0.1875, "configuration": "K4:hadamard V2:none, ä", "sums": (1, 2.5e-7)}
    folder.append("log.jsonl", record)
    line = folder.file("log.jsonl").read_bytes()
    assert [r["kl"] for r in folder.records("log.jsonl")] == [0.1875]
    for position in range(len(line) - 1):
        changed = bytes([line[position] ^ 1])
        folder.file("log.jsonl").write_bytes(line[:position] + changed + line[position + 1 :])
        assert list(folder.records("log.jsonl")) == []


def test_event_has_its_time_process_and_fields(folder: RunFolder) -> None:
    before = time.time()
    folder.log("started", layer=3, name="é")
    (event,) = folder.records(EVENTS)
    assert before - 0.001 <= event.pop("time") <= time.time() + 0.001
    assert event == {"pid": os.getpid(), "event": "started", "layer": 3, "name": "é"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_full_disk_keeps_the_old_file_and_says_how_to_go_on(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, step: str, code: int
) -> None:
    folder.write_checked("table.json", {"version": 1})
    with (
        monkeypatch.context() as patch,
        pytest.raises(RunFolderError, match=r"no space left to write .*table\.json.*resume"),
    ):
        patch.setattr(run_folder.os, step, raise_error(code))
        folder.write_checked("table.json", {"version": 2})
    assert names(folder) == ["table.json"]
    assert folder.read_checked("table.json") == {"version": 1}


def test_an_interrupt_while_a_file_is_written_keeps_the_old_one_and_leaves_no_other(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    folder.write_checked("table.json", {"version": 1})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_folder.os, "fsync", interrupt)
        folder.write_checked("table.json", {"version": 2})
    assert names(folder) == ["table.json"]
    assert folder.read_checked("table.json") == {"version": 1}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_device_without_space_is_reported_by_its_own_error(folder: RunFolder) -> None:
    folder.write_checked("table.json", {"version": 1})
    folder.file(f".table.json.{os.getpid()}.partial").symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match="no space left"):
        folder.write_checked("table.json", {"version": 2})
    assert names(folder) == ["table.json"]
    assert folder.read_checked("table.json") == {"version": 1}
    folder.file("log.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match=r"no space left to write .*log\.jsonl"):
        folder.append("log.jsonl", {"index": 0})


def test_folder_that_cannot_be_written_is_refused_with_another_in_mind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for folder in (RunFolder(tmp_path / "file"), RunFolder(tmp_path / "file" / "below")):
        with pytest.raises(RunFolderError, match=r"cannot write .*choose another place, or make it writable"):
            folder.create()
        with pytest.raises(RunFolderError, match="cannot write"):
            folder.write_checked("table.json", {})
        with pytest.raises(RunFolderError, match="cannot write"):
            folder.append("log.jsonl", {})
        with pytest.raises(RunFolderError, match="cannot write"), folder.lock("run.lock"):
            pytest.fail("locked in a folder that is none")
