"""Reads the documents of a corpus: texts, conversations, and both with images. Knows nothing of models and tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtuner.calibration.documents.image_document import ImageDocument, image_document
from kvtuner.errors import CorpusError
from kvtuner.exported_configs.identity.model_identity import DEMO

if TYPE_CHECKING:
    from kvtuner.calibration.corpus import CorpusSource

DEMO_CORPUS = Path(__file__).parents[1] / "demo" / "corpus.jsonl"
_ENCODING = "utf-8-sig"  # with or without a byte order mark
_TEXTS: Final = (".txt", ".md")
_LINES: Final = (".jsonl", ".ndjson")
_SUFFIXES: Final = (*_TEXTS, *_LINES, ".json")
"""The ends of files that are read, in any case: one text each, rows of JSON lines, and a JSON list of rows."""
_READ: Final = f"{', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}"
Message = Mapping[str, Any]
Document = str | tuple[Message, ...] | ImageDocument


def documents_of(source: CorpusSource) -> Iterator[Document]:
    """The documents of a source as it has them.

    Raises:
        CorpusError: It cannot be read, or holds something else.
    """
    path = DEMO_CORPUS if source.data == DEMO else Path(source.data)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise CorpusError(f"cannot read {source.data[:60]}: {error.strerror or error}") from error
    if is_folder:
        files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in _SUFFIXES]
        if not files:
            raise CorpusError(f"{path} holds no {_READ} file")
        for file in files:
            yield from _file_documents(file, source.text_field)
    elif is_file:
        yield from _file_documents(path, source.text_field)
    elif path.is_fifo():
        raise CorpusError(f"{source.data} is a named pipe; write what comes by it to a file")
    elif path.suffix.lower() in _SUFFIXES or source.data.startswith((".", "/", "~")):
        raise CorpusError(f"{source.data} does not exist")
    else:
        yield from _dataset_documents(source)


def _file_documents(path: Path, text_field: str) -> Iterator[Document]:
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise CorpusError(
            f"data of a file must end in {_READ}, but {path} does not; rename it if it is one text, and convert rows,"
            " such as of CSV or Parquet, to JSON lines"
        )
    try:
        if suffix in _TEXTS:
            if (text := path.read_text(encoding=_ENCODING)).strip():
                yield text
            return
        for number, row in _rows(path):
            yield from _row_document(row, text_field, f"{path}, line {number}", path.parent)
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror or error}") from error


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a JSON list or of JSON lines, numbered from 1."""
    if path.suffix.lower() not in _LINES:
        rows = _parsed(path.read_text(encoding=_ENCODING), str(path))
        if not isinstance(rows, list):
            raise CorpusError(f"{path} must hold a JSON list of objects")
        yield from enumerate(rows, 1)
        return
    with path.open(encoding=_ENCODING) as handle:
        for number, line in enumerate(handle, 1):
            if line.strip():
                yield number, _parsed(line.rstrip("\n"), f"{path}, line {number}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise CorpusError(f"{where} is not JSON: {error.msg}, {place}") from error
    except RecursionError as error:
        raise CorpusError(f"{where} is nested too deeply; a text needs one object, a conversation three") from error
    except ValueError as error:  # an integer of too many digits, for which Python advises a call
        raise CorpusError(f"{where} holds an integer of too many digits; give it as a string") from error


def _row_document(row: Any, text_field: str, where: str, folder: Path | None) -> Iterator[Document]:
    if not isinstance(row, Mapping):
        raise CorpusError(f"{where}: an object with {text_field!r} or 'messages' is expected, not {type(row).__name__}")
    messages = row.get("messages")
    if messages is not None and not _are_messages(messages):
        raise CorpusError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
    document: Document | None = image_document(row, text_field, folder, where)
    if document is None and messages is not None:
        document = tuple(messages)
    if document is None:
        document = row.get(text_field)
        if not isinstance(document, str):
            raise CorpusError(
                f"{where}: no text in field {text_field!r} (fields: {sorted(row)}); choose one with --text-field"
            )
    content = document.content if isinstance(document, ImageDocument) else document
    try:
        _refuse_surrogates(content if isinstance(content, str) else _plain_text(content), where)
    except RecursionError as error:
        raise CorpusError(f"{where}: 'messages' are nested too deeply") from error
    if not isinstance(document, str) or document.strip():
        yield document


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(m, Mapping) and "role" in m for m in value)


def _refuse_surrogates(text: str, where: str) -> None:
    """Refuse half of a character, which JSON can spell; a tokenizer has no bytes for it, and a model never reads it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise CorpusError(f"{where}: the text holds the lone surrogate \\u{code:04x}; drop or replace it") from error


def _plain_text(messages: Sequence[Message]) -> str:
    return json.dumps(messages, sort_keys=True, default=str, ensure_ascii=False)


def _dataset_documents(source: CorpusSource) -> Iterator[Document]:
    import datasets
    from datasets.exceptions import DatasetsError

    name, _, revision = source.data.partition("@")
    try:
        rows = datasets.load_dataset(
            name, source.data_config, split=source.data_split, revision=revision or None, streaming=True
        ).shuffle(seed=source.seed, buffer_size=10_000)
        features = rows.features if hasattr(rows, "decode") else None  # older releases decode in any case
        # Decoded, the images of all documents would fill memory.
        for number, row in enumerate(rows.decode(False) if features else rows, 1):
            own = features.decode_example(row) if features and _names_file_of_hub(row) else row
            yield from _row_document(own, source.text_field, f"{source.data}, row {number}", None)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CorpusError(f"cannot load data {source.data!r}: no such file, and as a datasets id: {reason}") from error


def _names_file_of_hub(value: Any) -> bool:
    """Whether a row of a data set has an image that a file of the hub holds, which `datasets` reads."""
    if isinstance(value, dict):
        if value.keys() == {"bytes", "path"}:
            return value["bytes"] is None and str(value["path"]).split("::")[-1].startswith("hf://")
        return any(map(_names_file_of_hub, value.values()))
    return isinstance(value, list) and any(map(_names_file_of_hub, value))


def without_repeats(documents: list[Document], source: CorpusSource) -> list[Document]:
    """The documents, each once; repeated ones are a `CorpusError` unless the source drops them."""
    unique: dict[str, Document] = {}
    for document in documents:
        unique.setdefault(_content_of(document), document)
    repeats = len(documents) - len(unique)
    if repeats and not source.deduplicate:
        raise CorpusError(
            f"{source.data} holds {repeats} repeated documents, which would stand in more than one split;"
            " drop them with --deduplicate"
        )
    return list(unique.values())


def _content_of(document: Document) -> str:
    """What repeated documents have in common."""
    if isinstance(document, ImageDocument):
        return document.key
    text = document if isinstance(document, str) else _plain_text(document)
    return " ".join(text.split())
