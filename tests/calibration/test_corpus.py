"""Text to token sequences: every kind of input, every kind of bad input, and no token in two splits."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvtuner.calibration import corpus as corpus_module
from kvtuner.calibration.corpus import SPLITS, Corpus, CorpusSource, load_corpus
from kvtuner.calibration.documents.reading import documents_of
from kvtuner.errors import CorpusError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from fixture_types import MakeTokenizer
    from transformers import PreTrainedTokenizerFast as Tokenizer

LENGTH = 48
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: MakeTokenizer) -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="module")
def texts(sentences: Callable[..., list[str]]) -> list[str]:
    """Forty documents of five sentences."""
    lines = sentences(200, seed=5)
    return [" ".join(lines[n : n + 5]) for n in range(0, 200, 5)]


def source(path: Path | str, **changes: Any) -> CorpusSource:
    return CorpusSource(**{"data": str(path), "sequence_length": LENGTH, "num_sequences": (3, 2, 4), **changes})


def write_jsonl(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def refusal(data: CorpusSource, tokenizer: Tokenizer) -> str:
    with pytest.raises(CorpusError) as caught:
        load_corpus(data, tokenizer)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def joined(corpus: Corpus) -> torch.Tensor:
    return torch.cat([corpus.splits[name] for name in SPLITS])


def test_every_kind_of_file_gives_the_same_documents(texts: list[str], tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "data.jsonl", ({"text": text} for text in texts))
    (tmp_path / "list.json").write_text(json.dumps([{"text": text} for text in texts]))
    folder = tmp_path / "folder"
    (folder / "deeper").mkdir(parents=True)
    for number, text in enumerate(texts):
        suffix, place = (".txt", folder) if number % 2 else (".md", folder / "deeper")
        (place / f"{number:03}{suffix}").write_text(text)
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    expected = sorted(sentence for text in texts for sentence in text.split(". "))
    # Documents differ in order only, so all of them must be there: as many sequences as the text holds.
    wanted = joined(load_corpus(source(lines, num_sequences=(1, 1, 1)), tokenizer)).shape
    assert wanted == (3, LENGTH)
    read = {}
    for name, path in (("lines", lines), ("list", tmp_path / "list.json"), ("folder", folder)):
        documents = list(documents_of(source(path)))
        read[name] = sorted(sentence for text in documents for sentence in text.split(". "))
    assert read == {"lines": expected, "list": expected, "folder": expected}


def test_one_text_file_is_cut_in_its_own_order(texts: list[str], tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n".join(texts), encoding="utf-8")
    ids = tokenizer("\n".join(texts))["input_ids"]
    expected = torch.tensor(ids[: 9 * LENGTH]).reshape(9, LENGTH)
    assert torch.equal(joined(load_corpus(source(path), tokenizer)), expected)


def test_splits_are_disjoint_in_order_and_leave_no_token_out(
    texts: list[str], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ({"text": text} for text in texts))
    corpus = load_corpus(source(path, num_sequences=(30, 20, 40)), tokenizer)
    assert {name: tuple(ids.shape) for name, ids in corpus.splits.items()} == {
        "calibrate": (30, LENGTH),
        "select": (20, LENGTH),
        "report": (40, LENGTH),
    }
    read = tokenizer.decode(joined(corpus).flatten().tolist())
    remaining = dict.fromkeys(texts)
    while read:
        match = next((text for text in remaining if read.startswith(text) or text.startswith(read)), None)
        assert match is not None, f"text that is no document, or comes twice: {read[:60]}"
        del remaining[match]
        read = read[len(match) :]
    assert len(remaining) < len(texts) - 5


def test_the_seed_alone_decides_the_order(texts: list[str], tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ({"text": text} for text in texts))
    first, again = (load_corpus(source(path), tokenizer) for _ in range(2))
    assert first.hashes() == again.hashes()
    other = load_corpus(source(path, seed=1), tokenizer)
    assert all(other.hashes()[name] != first.hashes()[name] for name in SPLITS)


def test_hashes_are_those_of_little_endian_token_ids() -> None:
    ids = torch.tensor([[1, 2, 300], [4, 5, 6]])
    corpus = Corpus(dict.fromkeys(SPLITS, ids))
    data = b"".join(token.to_bytes(8, "little") for token in (1, 2, 300, 4, 5, 6))
    assert corpus.hashes() == dict.fromkeys(SPLITS, "sha256:" + hashlib.sha256(data).hexdigest())


def test_another_field_can_hold_the_text(texts: list[str], tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ({"body": text, "id": 7} for text in texts))
    assert load_corpus(source(path, text_field="body"), tokenizer).splits["report"].shape == (4, LENGTH)
    message = refusal(source(path), tokenizer)
    assert "line 1: no text in field 'text' (fields: ['body', 'id']); choose one with --text-field" in message


def test_conversations_go_through_the_chat_template(
    texts: list[str], make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]} for text in texts
    ]
    path = write_jsonl(tmp_path / "chat.jsonl", rows)
    tokenizer = make_tokenizer(adds_bos=True, chat_template=TEMPLATE)
    corpus = load_corpus(source(path), tokenizer)
    read = tokenizer.decode(joined(corpus).flatten().tolist())
    assert "<|user|>" in read
    assert "<|assistant|>Yes.<|user|>" in read


def test_conversations_without_a_chat_template_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "Hello"}]}])
    assert "no chat template; give 'text'" in refusal(source(path), tokenizer)


def test_a_conversation_that_the_template_refuses_is_an_error(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "Hello"}]}])
    tokenizer = make_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    message = refusal(source(path), tokenizer)
    assert "the chat template refuses a conversation: roles must alternate" in message


def test_a_tokenizer_that_adds_a_first_token_has_it_in_front_of_every_sequence(
    texts: list[str], make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ({"text": text} for text in texts))
    with_bos = load_corpus(source(path), make_tokenizer(adds_bos=True))
    assert (joined(with_bos)[:, 0] == 0).all()
    # Documents that begin inside a sequence keep theirs; nothing else gets one.
    begins = int((joined(with_bos)[:, 1:] == 0).sum())
    assert 0 < begins < len(texts)


def test_a_tokenizer_that_adds_no_first_token_gets_none(texts: list[str], tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ({"text": text} for text in texts))
    assert not (joined(load_corpus(source(path), tokenizer)) == 0).any()


def test_no_more_documents_are_read_than_the_limit(
    texts: list[str], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "MAX_DOCUMENTS", 2)
    path = write_jsonl(tmp_path / "data.jsonl", ({"text": text} for text in texts))
    with path.open("a") as handle:
        handle.write("this line is never reached")
    corpus = load_corpus(source(path, num_sequences=(1, 1, 1)), tokenizer)
    read = tokenizer.decode(joined(corpus).flatten().tolist())
    assert any(read.startswith(text[: len(read)]) or text.startswith(read) for text in texts[:2])


def test_a_text_of_too_many_short_documents_is_refused_for_what_is_left_out(
    texts: list[str], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ({"text": text} for text in texts))
    monkeypatch.setattr(corpus_module, "MAX_DOCUMENTS", 2)
    message = refusal(source(path, num_sequences=(10, 10, 10)), tokenizer)
    assert "is too short in its first 2 documents, and no more are read: 30 sequences" in message
    assert "; join short documents to longer ones, or give fewer --sequences" in message
    monkeypatch.setattr(corpus_module, "MAX_DOCUMENTS", 40)  # all that there are
    load_corpus(source(path, num_sequences=(10, 10, 10)), tokenizer)


def test_the_name_is_the_last_part_of_a_path(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    assert source(tmp_path / "mine.txt").name == "mine.txt"
    assert source("wikitext@main").name == "wikitext@main"


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n{"text": "  "}\n'])
def test_data_without_text_is_refused(content: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    assert "holds no text" in refusal(source(path), tokenizer)


def test_data_too_short_for_three_splits_says_how_much_is_there(
    texts: list[str], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ({"text": text} for text in texts[:2]))
    tokens = sum(len(tokenizer(text)["input_ids"]) for text in texts[:2])
    message = refusal(source(path, num_sequences=(20, 20, 20)), tokenizer)
    assert f"60 sequences of {LENGTH} tokens are needed, {tokens // LENGTH} were found; give more text" in message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("just text", "line 2: an object with 'text' or 'messages' is expected, not str"),
        ([1, 2], "not list"),
        ({"text": 7}, "line 2: no text in field 'text'"),
        ({"text": None}, "line 2: no text in field 'text'"),
        ({"other": "x"}, "(fields: ['other'])"),
        ({"messages": "hello"}, "line 2: 'messages' must be a list of objects"),
        ({"messages": ["hello"]}, "line 2: 'messages' must be a list of objects"),
        ({"messages": [{"content": "hello"}]}, "'role' and 'content'"),
    ],
)
def test_a_row_of_another_form_is_refused_with_its_line(
    row: object, message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "A good line."}, row])
    assert message in refusal(source(path), tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.jsonl", b'{"text": "a"}\n{"text": "cut off', "; write one JSON object there"),
        ("data.json", b'[{"text": "a"},\n\n{"text": 7}]', "item 2: no text in field 'text'"),
        ("data.json", b'[{"text": "a"}', "; write a JSON list of objects there"),
        ("data.json", b'{"text": "a"}', "must hold a JSON list of objects, not dict; write objects between [ and ]"),
        ("data.txt", b"latin \xe9\xe8 text", "; convert it, as by iconv"),
        ("data.jsonl", b'{"text": "latin \xe9"}\n', "is not UTF-8 text"),
        ("data.json", b'[{"text": "latin \xe9"}]', "is not UTF-8 text"),
        ("data.jsonl", b'{"text": "a"}\n{"text": "cut', "line 2 is not JSON: Unterminated string starting at, column"),
        ("data.json", b'[{"text": "a"},\n{"text": 1,}]', "is not JSON: Expecting property name"),
        ("data.jsonl", b'{"text": "a"}\n{"text": "\\ud800 x"}\n', r"line 2: the text holds the lone surrogate \ud800"),
        ("data.json", b'[\n\n{"text": "x \\udfff"}]', r"item 1: the text holds the lone surrogate \udfff"),
        (
            "data.jsonl",
            b'{"text": "a"}\n{"messages": [{"role": "user", "content": [{"text": "\\udc00"}]}]}',
            r"line 2: the text holds the lone surrogate \udc00",
        ),
        ("data.jsonl", b'{"text": "a"}\n{"text": ' + b"[" * 100_000, "line 2 is nested too deeply"),
        ("data.json", b"[" * 100_000, "is nested too deeply"),
        ("data.jsonl", b'{"text": "a", "id": ' + b"7" * 5001 + b"}", "line 1 holds an integer of too many digits"),
        ("data.json", b"[" + b"7" * 5001 + b"]", "holds an integer of too many digits"),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    name: str, content: bytes, message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    refused = refusal(source(tmp_path / name), tokenizer)
    assert message in refused
    assert name in refused


@pytest.mark.parametrize("name", ["c.JSONL", "c.ndjson", "c.Json", "c.TXT"])
def test_the_end_of_a_name_decides_in_any_case(name: str, tmp_path: Path) -> None:
    contents = {"c.Json": '[{"text": "One."}, {"text": "Two."}]', "c.TXT": "One. Two."}
    (tmp_path / name).write_text(contents.get(name, '{"text": "One."}\n{"text": "Two."}\n'))
    expected = ["One. Two."] if name == "c.TXT" else ["One.", "Two."]
    assert list(documents_of(source(tmp_path / name))) == expected == list(documents_of(source(tmp_path)))


@pytest.mark.parametrize("name", ["data.csv", "data.parquet", "data.jsonl.gz", "data"])
def test_a_file_of_another_end_is_no_text(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / name).write_text("text\nOne.\n")
    refused = refusal(source(tmp_path / name), tokenizer)
    assert "must end in .txt, .md, .jsonl, .ndjson or .json" in refused
    assert f"{tmp_path / name} does not" in refused


@pytest.mark.parametrize("depth", range(100, 1100, 50))
def test_a_conversation_of_any_depth_is_read_or_refused(
    depth: int, make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    message = b'{"role": "user", "content": "Hello", "more": ' + b"[" * depth + b"]" * depth + b"}"
    (tmp_path / "chat.jsonl").write_bytes(b'{"messages": [' + message + b"]}\n")
    refused = refusal(source(tmp_path / "chat.jsonl"), make_tokenizer(chat_template=TEMPLATE))
    assert "is too short" in refused or "line 1" in refused


@pytest.mark.parametrize("name", ["data.txt", "data.jsonl", "data.json"])
def test_a_byte_order_mark_is_no_text(name: str, texts: list[str], tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"text": text} for text in texts]
    content = {
        "data.txt": "\n".join(texts),
        "data.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "data.json": json.dumps(rows),
    }[name]
    plain, marked = tmp_path / "plain" / name, tmp_path / "marked" / name
    for path, encoding in ((plain, "utf-8"), (marked, "utf-8-sig")):
        path.parent.mkdir()
        path.write_text(content, encoding=encoding)
    assert marked.stat().st_size == plain.stat().st_size + 3
    assert torch.equal(joined(load_corpus(source(marked), tokenizer)), joined(load_corpus(source(plain), tokenizer)))


@pytest.mark.parametrize("data", ["d" * 5000, "/" + "d" * 5000, "d" * 300 + ".jsonl"])
def test_data_of_a_name_that_no_file_can_have_is_refused(data: str, tokenizer: Tokenizer) -> None:
    message = refusal(source(data), tokenizer)
    assert f"cannot read {data[:60]}: File name too long" in message
    assert len(message) < 200


def test_data_that_does_not_exist_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    message = refusal(source(tmp_path / "absent.jsonl"), tokenizer)
    assert message.endswith("does not exist; name a file or folder that does, or the id of a data set")
    assert "does not exist" in refusal(source("absent.txt"), tokenizer)
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "is a named pipe" in refusal(source(tmp_path / "pipe.jsonl"), tokenizer)
    (tmp_path / "empty").mkdir()
    message = refusal(source(tmp_path / "empty"), tokenizer)
    assert "holds no .txt, .md, .jsonl, .ndjson or .json file; name another folder" in message


@pytest.mark.parametrize("name", ["dataset_info.json", "package.json", "notes.txt"])
def test_a_file_of_a_folder_that_is_no_data_is_named_with_the_way_out(
    name: str, texts: list[str], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "data.jsonl", ({"text": text} for text in texts))
    (tmp_path / name).write_bytes(b"\xff" if name.endswith(".txt") else b'{"name": "letters"}')
    message = refusal(source(tmp_path), tokenizer)
    assert str(tmp_path / name) in message
    assert message.endswith(f"; if {name} is no data, move it out of {tmp_path}")


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_no_file_in_a_folder_is_refused_without_waiting_for_it(
    kind: str, texts: list[str], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "data.jsonl", ({"text": text} for text in texts))
    (tmp_path / "folder.json").mkdir()  # its end does not make it a file
    if kind == "pipe":
        os.mkfifo(tmp_path / "x.jsonl")
    else:
        (tmp_path / "x.jsonl").symlink_to(tmp_path / "absent.jsonl")
    message = refusal(source(tmp_path), tokenizer)
    assert f"{tmp_path / 'x.jsonl'} is a pipe or a device, or a link to nothing; move it out of {tmp_path}" in message


def test_repeated_documents_are_refused_or_dropped(texts: list[str], tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [*texts, "  " + texts[0].replace(" ", "\n"), texts[7]]
    repeated = write_jsonl(tmp_path / "repeated.jsonl", ({"text": text} for text in rows))
    message = refusal(source(repeated), tokenizer)
    assert "holds 2 repeated documents" in message
    assert "--deduplicate" in message
    unique = write_jsonl(tmp_path / "unique.jsonl", ({"text": text} for text in texts))
    dropped = load_corpus(source(repeated, deduplicate=True), tokenizer)
    assert dropped.hashes() == load_corpus(source(unique), tokenizer).hashes()


def test_documents_that_share_long_passages_are_refused_even_when_deduplicated(
    texts: list[str], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    letterhead = texts[0]
    rows = [{"text": f"Letter {number}. {letterhead} {text}"} for number, text in enumerate(texts)]
    path = write_jsonl(tmp_path / "letters.jsonl", rows)
    message = refusal(source(path, num_sequences=(20, 20, 20), deduplicate=True), tokenizer)
    assert "-token windows of the select split also stand in the calibrate split" in message


def test_short_phrases_in_common_are_no_overlap(texts: list[str], tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"text": f"Dear reader, {text} Yours truly."} for text in texts]
    path = write_jsonl(tmp_path / "letters.jsonl", rows)
    corpus = load_corpus(source(path, num_sequences=(20, 20, 20)), tokenizer)
    assert [len(ids) for ids in corpus.splits.values()] == [20, 20, 20]


def test_a_datasets_id_that_cannot_be_reached_is_one_line(tokenizer: Tokenizer) -> None:
    message = refusal(source("nobody/no-such-data"), tokenizer)
    assert message.startswith("cannot load data 'nobody/no-such-data': no such file, and as a datasets id: ")


@pytest.mark.parametrize("name", ["DatasetGenerationError", "ManualDownloadError", "DefunctDatasetError"])
@pytest.mark.parametrize("is_late", [False, True])
def test_what_datasets_itself_refuses_is_one_line(
    name: str, is_late: bool, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    error = getattr(datasets.exceptions, name)("told\nby datasets")

    def fail() -> Iterable[dict[str, str]]:
        yield {"text": "one good row"}
        raise error

    def load_dataset(*_: object, **__: object) -> Any:
        if is_late:
            return datasets.IterableDataset.from_generator(fail)
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = refusal(source("someone/letters"), tokenizer)
    assert message.startswith("cannot load data 'someone/letters': ")
    assert message.endswith(": told by datasets")


@pytest.mark.parametrize("length", [-1, 0, 1, 3])
def test_sequences_that_leave_nothing_to_score_are_refused(
    length: int, tokenizer: Tokenizer, corpus_file: Path
) -> None:
    message = refusal(source(corpus_file, sequence_length=length), tokenizer)
    assert f"at least 4 tokens, a prompt and predictions to score, but would have {length}" in message
    assert "--sequence-length" in message
    load_corpus(source(corpus_file, sequence_length=4), tokenizer)


def test_a_datasets_id_is_read_with_its_revision_configuration_and_split(
    texts: list[str], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    request = {}

    def load_dataset(name: str, config: str | None, **options: Any) -> Any:
        request.update(name=name, config=config, **options)
        return datasets.IterableDataset.from_generator(lambda: ({"body": text} for text in texts))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = source("someone/letters@v2", data_config="en", data_split="validation", text_field="body", seed=3)
    first, again = (load_corpus(data, tokenizer) for _ in range(2))
    assert request == {
        "name": "someone/letters",
        "config": "en",
        "revision": "v2",
        "split": "validation",
        "streaming": True,
    }
    assert first.hashes() == again.hashes()
    with pytest.raises(CorpusError, match="row 1: no text in field 'text'"):
        load_corpus(source("someone/letters"), tokenizer)
