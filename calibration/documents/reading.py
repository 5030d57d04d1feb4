"""Reads the documents of a corpus: texts, conversations, and both with images. Knows nothing of models and tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtuner.calibration.documents.image_document import ImageDocument, image_document
from kvtuner.calibration.documents.text_files import JSON_LINES, json_of, lines_of, text_of
from kvtuner.errors import CorpusError
from kvtuner.exported_configs.identity.model_identity import DEMO

if TYPE_CHECKING:
    from kvtuner.calibration.corpus import CorpusSource

DEMO_CORPUS = Path(__file__).parents[1] / "demo" / "corpus.jsonl"
_TEXTS: Final = (".txt", ".md")
_SUFFIXES: Final = (*_TEXTS, *JSON_LINES, ".json")
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
        raise CorpusError(f"cannot read {source.data[:60]}: {error.strerror or error}; name another file") from error
    if is_folder:
        yield from _folder_documents(path, source.text_field)
    elif is_file:
        yield from _file_documents(path, source.text_field)
    elif path.is_fifo():
        raise CorpusError(f"{source.data} is a named pipe; write what comes by it to a file")
    elif path.suffix.lower() in _SUFFIXES or source.data.startswith((".", "/", "~")):
        raise CorpusError(f"{source.data} does not exist; name a file or folder that does, or the id of a data set")
    else:
        yield from _dataset_documents(source)


def _folder_documents(folder: Path, text_field: str) -> Iterator[Document]:
    try:
        files = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in _SUFFIXES and not file.is_dir()]
        others = [file for file in files if not file.is_file()]
    except OSError as error:
        raise CorpusError(f"cannot read {folder}: {error.strerror or error}; name a folder that can be read") from error
    if others:
        raise CorpusError(f"{others[0]} is a pipe or a device, or a link to nothing; move it out of {folder}")
    if not files:
        raise CorpusError(f"{folder} holds no {_READ} file; name another folder, or convert what it holds")
    for file in files:
        try:
            yield from _file_documents(file, text_field)
        except CorpusError as error:
            raise CorpusError(f"{error}; if {file.name} is no data, move it out of {folder}") from error


def _file_documents(path: Path, text_field: str) -> Iterator[Document]:
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise CorpusError(
            f"data of a file must end in {_READ}, but {path} does not; rename it if it is one text, and convert rows,"
            " such as of CSV or Parquet, to JSON lines"
        )
    if suffix in _TEXTS:
        if (text := text_of(path, str(path))).strip():
            yield text
        return
    for where, row in _rows(path):
        yield from _row_document(row, text_field, where, path.parent)


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of JSON lines or of a JSON list, each behind its place, numbered from 1."""
    if path.suffix.lower() in JSON_LINES:
        for where, line in lines_of(path, str(path)):
            yield where, json_of(line, where, "one JSON object")
        return
    rows = json_of(text_of(path, str(path)), str(path), "a JSON list of objects")
    if not isinstance(rows, list):
        raise CorpusError(
            f"{path} must hold a JSON list of objects, not {type(rows).__name__}; write objects between [ and ], or"
            " one on each line of a .jsonl file"
        )
    for number, row in enumerate(rows, 1):
        yield f"{path}, item {number}", row


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
