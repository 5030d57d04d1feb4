"""Text, maybe with images, to token sequences in three disjoint splits. Knows models by their tokenizers alone."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvtuner.calibration.documents.image_document import ImageDocument
from kvtuner.calibration.documents.reading import documents_of, without_repeats
from kvtuner.calibration.images.image_sequences import ImageTokenizer, SequenceCutter, TokenRun
from kvtuner.errors import CorpusError
from kvtuner.exported_configs.identity.model_identity import DEMO, public_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from kvtuner.calibration.documents.reading import Document, Message
    from kvtuner.calibration.images.sequence_images import SequenceImages

SplitName = Literal["calibrate", "select", "report"]
SPLITS: tuple[SplitName, ...] = ("calibrate", "select", "report")
MAX_DOCUMENTS = 20_000
MIN_SEQUENCE_LENGTH = 4  # the first quarter is read exactly, and of the rest one token at least predicts another
OVERLAP_WINDOW = 48  # tokens, long enough that phrases which many texts share do not count
MAX_OVERLAP = 0.10
PackedSequence = TypeVar("PackedSequence", list[int], TokenRun)
_Stream = np.ndarray[Any, np.dtype[np.int64]]
"""The token ids of a split, or what stands for their content."""


@dataclass(frozen=True, slots=True)
class CorpusSource:
    """The source of a corpus, and how its text is cut into sequences.

    Attributes:
        data: ``demo``, a .txt, .md, .jsonl, .ndjson or .json file, a folder of them, or a `datasets` id as
            ``name[@revision]``.
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
    """Token sequences, [num_sequences, sequence_length] int64 per split; no token stands in two of them.

    Attributes:
        images: The images of each sequence of a split, where the data hold any. A sequence that ends before an image
            is filled up behind its own tokens.
    """

    splits: Mapping[SplitName, Tensor]
    images: Mapping[SplitName, tuple[SequenceImages, ...]] = field(default_factory=dict)

    def hashes(self) -> dict[str, str]:
        """sha256 of each split's token ids, and of what the model takes beside them."""
        return {name: "sha256:" + self._hash(name) for name in self.splits}

    def _hash(self, name: SplitName) -> str:
        digest = hashlib.sha256(self.splits[name].numpy().astype("<i8").tobytes())
        for sequence in self.images.get(name, ()):
            digest.update(repr((sequence.num_tokens, sequence.spans)).encode())
            for argument, value in sorted(sequence.inputs.items()):
                digest.update(f"{argument} {tuple(value.shape)} {value.dtype}".encode() + value.numpy().tobytes())
        return digest.hexdigest()

    def in_images(self, name: SplitName) -> Tensor:
        """Whether each token of a split stands for an image, bool [num_sequences, sequence_length]."""
        is_image = torch.zeros_like(self.splits[name], dtype=torch.bool)
        for row, sequence in zip(is_image, self.images.get(name, ()), strict=False):
            for start, end in sequence.spans:
                row[start:end] = True
        return is_image

    def refuse_images(self, what: str, way_out: str = "--data of text") -> None:
        """Refuse what reads text alone, named in the plural, where there are images; the message says what to give.

        Raises:
            CorpusError: There are images.
        """
        if self.images:
            raise CorpusError(f"{what} read text alone, but the data holds images; give {way_out}")


def load_corpus(
    source: CorpusSource,
    tokenizer: PreTrainedTokenizerBase,
    read_processor: Callable[[], ProcessorMixin] | None = None,
) -> Corpus:
    """Read, shuffle, tokenize and split; the model's processor is read where the data hold images.

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
    read = list(islice(documents_of(source), MAX_DOCUMENTS))
    documents = without_repeats(read, source)
    if not documents:
        raise CorpusError(
            f'{source.data} holds no text; a line is {{"{source.text_field}": ...}} or {{"messages": ...}}'
        )
    random.Random(source.seed).shuffle(documents)
    if any(isinstance(document, ImageDocument) for document in documents):
        if read_processor is None:
            raise CorpusError(f"{source.data} holds images, which a model's processor makes tokens of; give text")
        return _corpus_with_images(
            documents, len(read), source, tokenizer, ImageTokenizer(read_processor(), source.data)
        )
    parts = _first(_pack(documents, source, tokenizer), source, len(read), "a smaller --sequence-length")
    corpus = Corpus({name: torch.tensor(part, dtype=torch.int64) for name, part in parts.items()})
    _refuse_overlap({name: ids.numpy().reshape(-1) for name, ids in corpus.splits.items()}, source)
    return corpus


def _corpus_with_images(
    documents: Iterable[Document],
    num_read: int,
    source: CorpusSource,
    tokenizer: PreTrainedTokenizerBase,
    image_tokenizer: ImageTokenizer,
) -> Corpus:
    length = source.sequence_length
    cutter = SequenceCutter(image_tokenizer, length, start_tokens(tokenizer))
    parts = _first(cutter.cut(documents), source, num_read, "another --sequence-length, since images are not cut")
    _refuse_overlap({name: np.concatenate([run.content for run in part]) for name, part in parts.items()}, source)
    filling = tokenizer.eos_token_id or 0
    return Corpus(
        {name: torch.tensor([run.filled(length, filling) for run in part]) for name, part in parts.items()},
        {name: tuple(map(image_tokenizer.model_inputs, part)) for name, part in parts.items()},
    )


def _first(
    sequences: Iterator[PackedSequence], source: CorpusSource, num_read: int, way_out: str
) -> dict[SplitName, list[PackedSequence]]:
    """The first sequences, by split, as many as each is to have; a way out ends the message that there are too few."""
    wanted = sum(source.num_sequences)
    found = list(islice(sequences, wanted))
    if len(found) < wanted:
        lack, remedy = f"{source.data} is too short", "give more text"
        if num_read == MAX_DOCUMENTS:
            lack = f"{source.data} is too short in its first {MAX_DOCUMENTS:,} documents, and no more are read"
            remedy = "join short documents to longer ones"
        raise CorpusError(
            f"{lack}: {wanted} sequences of {source.sequence_length} tokens are needed, {len(found)} were found;"
            f" {remedy}, or give fewer --sequences, or {way_out}"
        )
    left = iter(found)
    return {name: list(islice(left, count)) for name, count in zip(SPLITS, source.num_sequences, strict=True)}


def _pack(documents: Iterable[Any], source: CorpusSource, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
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


def _tokens(document: str | tuple[Message, ...], tokenizer: PreTrainedTokenizerBase, source: CorpusSource) -> list[int]:
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


def _refuse_overlap(streams: Mapping[SplitName, _Stream], source: CorpusSource) -> None:
    seen = {name: np.unique(_window_hashes(ids)) for name, ids in streams.items()}
    for first, second in combinations(SPLITS, 2):
        shared = np.intersect1d(seen[first], seen[second], assume_unique=True).size
        share = shared / max(1, min(seen[first].size, seen[second].size))
        if share > MAX_OVERLAP:
            raise CorpusError(
                f"{source.data}: {share:.0%} of the {OVERLAP_WINDOW}-token windows of the {second} split also stand"
                f" in the {first} split; give data with fewer near-duplicates"
            )


def _window_hashes(ids: _Stream) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A hash of every window of a split's token stream, which sequences cut but do not break."""
    # A sum of products with odd weights, modulo 2**64: windows that collide would only make splits look more alike.
    tokens = ids.astype(np.uint64)
    hashes = np.zeros(max(0, tokens.size - OVERLAP_WINDOW + 1), dtype=np.uint64)
    weights = np.random.default_rng(0).integers(1, 2**63, size=OVERLAP_WINDOW, dtype=np.uint64) | np.uint64(1)
    for offset, weight in enumerate(weights):
        hashes += tokens[offset : offset + hashes.size] * weight
    return hashes
