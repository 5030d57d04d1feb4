from __future__ import annotations

from typing import TYPE_CHECKING

from kvtuner.journal import Journal
from kvtuner.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path


def test_a_record_is_found_by_its_key_as_json_gives_it_back(tmp_path: Path) -> None:
    journal = Journal(RunFolder(tmp_path), "log.jsonl", "sha256:a")
    assert journal.get("one") is None
    journal.append({"key": "one", "values": (1, 2)}, {"key": "two"})
    assert journal.get("one") == {"identity": "sha256:a", "key": "one", "values": [1, 2]}
    assert journal.get("two") is not None


def test_another_process_and_a_later_one_find_what_was_appended(tmp_path: Path) -> None:
    first, second = (Journal(RunFolder(tmp_path), "log.jsonl", "sha256:a") for _ in range(2))
    assert second.get("one") is None
    first.append({"key": "one", "value": 1})
    assert second.get("one") == Journal(RunFolder(tmp_path), "log.jsonl", "sha256:a").get("one")


def test_records_of_another_identity_are_left_alone(tmp_path: Path) -> None:
    ours, theirs = (Journal(RunFolder(tmp_path), "log.jsonl", f"sha256:{name}") for name in "ab")
    theirs.append({"key": "one"})
    assert ours.get("one") is None
    assert theirs.get("one") is not None


def test_without_an_identity_every_record_counts_and_none_is_added(tmp_path: Path) -> None:
    journal = Journal(RunFolder(tmp_path), "log.jsonl", None)
    journal.append({"key": "one"})
    assert journal.get("one") == {"key": "one"}


def test_a_key_may_be_made_of_several_fields_and_the_last_record_counts(tmp_path: Path) -> None:
    journal = Journal(
        RunFolder(tmp_path), "log.jsonl", "sha256:a", lambda record: (record["layer"], tuple(record["bits"]))
    )
    journal.append({"layer": 1, "bits": [4, 2], "kl": 0.5})
    journal.append({"layer": 1, "bits": [4, 2], "kl": 0.25})
    record = journal.get((1, (4, 2)))
    assert record is not None
    assert record["kl"] == 0.25


def test_a_reader_of_a_log_goes_on_where_it_stopped_wherever_the_last_line_is_cut(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    reader, path = Journal(folder, "log.jsonl", None), folder.file("log.jsonl")
    assert list(reader.unread()) == []
    folder.append("log.jsonl", {"index": 0})
    assert list(reader.unread()) == [{"index": 0}]
    assert list(reader.unread()) == []
    before = path.read_bytes()
    folder.append("log.jsonl", {"index": 1, "text": "é\u2028\n"}, {"index": 2})
    whole = path.read_bytes()
    for size in range(len(before), len(whole) + 1):
        path.write_bytes(before)
        reader = Journal(folder, "log.jsonl", None)
        assert len(list(reader.unread())) == 1
        path.write_bytes(whole[:size])
        records = list(reader.unread())
        path.write_bytes(whole)
        folder.append("log.jsonl", {"index": 9})
        records += reader.unread()
        assert [record["index"] for record in records] == [1, 2, 9]


def test_a_line_that_is_finished_while_a_log_is_read_is_not_lost(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    path = folder.file("log.jsonl")
    folder.append("log.jsonl", *({"index": index} for index in range(3)))
    whole = path.read_bytes()
    cut = whole.index(b"\n") + 5
    path.write_bytes(whole[:cut])
    reader = Journal(folder, "log.jsonl", None)
    unread = reader.unread()
    assert next(unread) == {"index": 0}
    assert list(unread) == []
    path.write_bytes(whole)
    assert list(reader.unread()) == [{"index": 1}, {"index": 2}]


def test_a_log_that_was_replaced_by_a_shorter_one_is_read_from_its_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append("log.jsonl", *({"index": index} for index in range(3)))
    reader = Journal(folder, "log.jsonl", None)
    assert len(list(reader.unread())) == 3
    folder.file("log.jsonl").unlink()
    folder.append("log.jsonl", {"index": 10})
    assert list(reader.unread()) == [{"index": 10}]
