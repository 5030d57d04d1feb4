"""Text to token sequences in three disjoint splits. Knows nothing of models but their tokenizer."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from kvtuner.errors import CorpusError
from kvtuner.exported_configs.identity.model_identity import DEMO, public_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SplitName = Literal["calibrate", "select", "report"]
SPLITS: tuple[SplitName, ...] = ("calibrate", "select", "report")
DEMO_CORPUS = Path(__file__).parent / "demo" / "corpus.jsonl"
MAX_DOCUMENTS = 20_000
MIN_SEQUENCE_LENGTH = 4  # the first quarter is read exactly, and of the rest one token at least predicts another
OVERLAP_WINDOW = 48  # tokens, long enough that phrases which many texts share do not count
MAX_OVERLAP = 0.10
_ENCODING = "utf-8-sig"  # with or without a byte order mark
Message = Mapping[str, Any]
Document = str | tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class CorpusSource:
    """The source of a corpus, and how its text is cut into sequences.

    Attributes:
        data: ``demo``, a .txt, .md, .jsonl or .json file, a folder of them, or a `datasets` id as ``name[@revision]``.
        data_config: configuration of the `datasets` id.
        data_split: split of the `datasets` id to read.
        text_field: field of a JSON line or `datasets` row that holds the text; ``messages`` is always understood.
        sequence_length: tokens per sequence, at least `MIN_SEQUENCE_LENGTH`.
        num_sequences: sequences of each split, in the order calibrate, select, report.
        seed: The seed of the order of documents.
        deduplicate: drop repeated documents instead of refusing them.
    """

    data: str = DEMO
    data_config: str | None = None
    data_split: str = "train"
    text_field: str = "text"
    sequence_length: int = 512
    num_sequences: tuple[int, int, int] = (8, 8, 16)
    seed: int = 0
    deduplicate: bool = False

    @property
    def name(self) -> str:
        """A dataset id, or the last part of a path: what may be written into a profile."""
        return public_name(self.data)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token sequences, [num_sequences, sequence_length] int64 per split; no token stands in two of them."""

    splits: Mapping[SplitName, Tensor]

    def hashes(self) -> dict[str, str]:
        """sha256 of each split's token ids."""
        return {
            name: "sha256:" + hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()
            for name, ids in self.splits.items()
        }


def load_corpus(source: CorpusSource, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Read, shuffle, tokenize and split.

    At most `MAX_DOCUMENTS` are read: the first of a file or folder; of a `datasets` id the first of a stream that is
    shuffled by the seed. They are shuffled by the seed and packed in that order: first the calibrate split, then
    select, then report, so that only a document on a border is cut between two splits, and no token is used twice.

    Raises:
        CorpusError: Unreadable, empty, too short, repeated documents, splits that share text, or sequences that leave
            nothing to score.
    """
    if source.sequence_length < MIN_SEQUENCE_LENGTH:
        raise CorpusError(
            f"a sequence must have at least {MIN_SEQUENCE_LENGTH} tokens, a prompt and predictions to score, but would"
            f" have {source.sequence_length}; give a larger --sequence-length or --context-length"
        )
    documents = _without_repeats(list(islice(_documents(source), MAX_DOCUMENTS)), source)
    if not documents:
        raise CorpusError(
            f'{source.data} holds no text; a line is {{"{source.text_field}": ...}} or {{"messages": ...}}'
        )
    random.Random(source.seed).shuffle(documents)
    wanted = sum(source.num_sequences)
    sequences = list(islice(_pack(documents, source, tokenizer), wanted))
    if len(sequences) < wanted:
        raise CorpusError(
            f"{source.data} is too short: {wanted} sequences of {source.sequence_length} tokens are needed,"
            f" {len(sequences)} were found; give more text, or fewer --sequences, or a smaller --sequence-length"
        )
    parts = torch.tensor(sequences, dtype=torch.int64).split(list(source.num_sequences))
    corpus = Corpus(dict(zip(SPLITS, parts, strict=True)))
    _refuse_overlap(corpus, source)
    return corpus


def _documents(source: CorpusSource) -> Iterator[Document]:
    path = DEMO_CORPUS if source.data == DEMO else Path(source.data)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise CorpusError(f"cannot read {source.data[:60]}: {error.strerror or error}") from error
    if is_folder:
        files = [file for file in sorted(path.rglob("*")) if file.suffix in (".txt", ".md", ".jsonl", ".json")]
        if not files:
            raise CorpusError(f"{path} holds no .txt, .md, .jsonl or .json file")
        for file in files:
            yield from _file_documents(file, source.text_field)
    elif is_file:
        yield from _file_documents(path, source.text_field)
    elif path.suffix in (".txt", ".md", ".jsonl", ".json") or source.data.startswith((".", "/", "~")):
        raise CorpusError(f"{source.data} does not exist")
    else:
        yield from _dataset_documents(source)


def _file_documents(path: Path, text_field: str) -> Iterator[Document]:
    try:
        if path.suffix not in (".jsonl", ".json"):
            if (text := path.read_text(encoding=_ENCODING)).strip():
                yield text
            return
        for number, row in _rows(path):
            yield from _row_document(row, text_field, f"{path}, line {number}")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror or error}") from error


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a JSON list or of JSON lines, numbered from 1."""
    if path.suffix == ".json":
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


def _row_document(row: Any, text_field: str, where: str) -> Iterator[Document]:
    if not isinstance(row, Mapping):
        raise CorpusError(f"{where}: an object with {text_field!r} or 'messages' is expected, not {type(row).__name__}")
    if row.get("messages") is not None:
        messages = row["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise CorpusError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
        try:
            _refuse_surrogates(_plain_text(messages), where)
        except RecursionError as error:
            raise CorpusError(f"{where}: 'messages' are nested too deeply") from error
        yield tuple(messages)
        return
    text = row.get(text_field)
    if not isinstance(text, str):
        raise CorpusError(
            f"{where}: no text in field {text_field!r} (fields: {sorted(row)}); choose one with --text-field"
        )
    _refuse_surrogates(text, where)
    if text.strip():
        yield text


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
        for number, row in enumerate(rows, 1):
            yield from _row_document(row, source.text_field, f"{source.data}, row {number}")
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CorpusError(f"cannot load data {source.data!r}: no such file, and as a datasets id: {reason}") from error


def _without_repeats(documents: list[Document], source: CorpusSource) -> list[Document]:
    unique: dict[str, Document] = {}
    for document in documents:
        text = document if isinstance(document, str) else _plain_text(document)
        unique.setdefault(" ".join(text.split()), document)
    repeats = len(documents) - len(unique)
    if repeats and not source.deduplicate:
        raise CorpusError(
            f"{source.data} holds {repeats} repeated documents, which would stand in more than one split;"
            " drop them with --deduplicate"
        )
    return list(unique.values())


def _pack(
    documents: Iterable[Document], source: CorpusSource, tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[int]]:
    length = source.sequence_length
    start = start_tokens(tokenizer)
    pending: list[int] = []
    for document in documents:
        pending.extend(_tokens(document, tokenizer, source))
        while len(pending) >= length:
            yield pending[:length]
            pending = pending[length:]
            # The rest of a cut document begins like a text, as what a model is trained and served with.
            if pending and pending[: len(start)] != start:
                pending = start + pending


def _tokens(document: Document, tokenizer: PreTrainedTokenizerBase, source: CorpusSource) -> list[int]:
    if isinstance(document, str):
        ids = tokenizer(document, truncation=False, verbose=False)["input_ids"]
    else:
        if getattr(tokenizer, "chat_template", None) is None:
            raise CorpusError(
                f"{source.data} holds 'messages', but the model's tokenizer has no chat template; give 'text'"
            )
        try:
            text = tokenizer.apply_chat_template([dict(message) for message in document], tokenize=False)
        except Exception as error:
            raise CorpusError(f"{source.data}: the chat template refuses a conversation: {error}") from error
        ids = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    return list(ids)


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that a tokenizer puts before a text: one or none."""
    ids = list(tokenizer("a")["input_ids"])  # many tokenizers have a token for it that they do not put there
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and ids and ids[0] == bos else []


def _refuse_overlap(corpus: Corpus, source: CorpusSource) -> None:
    seen: dict[SplitName, np.ndarray[Any, np.dtype[np.uint64]]] = {
        name: np.unique(_window_hashes(ids.numpy().reshape(-1))) for name, ids in corpus.splits.items()
    }
    for first, second in combinations(SPLITS, 2):
        shared = np.intersect1d(seen[first], seen[second], assume_unique=True).size
        share = shared / max(1, min(seen[first].size, seen[second].size))
        if share > MAX_OVERLAP:
            raise CorpusError(
                f"{source.data}: {share:.0%} of the {OVERLAP_WINDOW}-token windows of the {second} split also stand"
                f" in the {first} split; give data with fewer near-duplicates"
            )


def _window_hashes(ids: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A hash of every window of a split's token stream, which sequences cut but do not break."""
    # A sum of products with odd weights, modulo 2**64: windows that collide would only make splits look more alike.
    tokens = ids.astype(np.uint64)
    hashes = np.zeros(max(0, tokens.size - OVERLAP_WINDOW + 1), dtype=np.uint64)
    weights = np.random.default_rng(0).integers(1, 2**63, size=OVERLAP_WINDOW, dtype=np.uint64) | np.uint64(1)
    for offset, weight in enumerate(weights):
        hashes += tokens[offset : offset + hashes.size] * weight
    return hashes
