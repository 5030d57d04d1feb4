"""Documents with images as sequences of tokens, which end before an image that they would cut. Knows no models."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kvtuner.calibration.documents.image_document import IMAGE_MARK, ImageDocument
from kvtuner.calibration.images.sequence_images import SequenceImages
from kvtuner.errors import CorpusError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from PIL.Image import Image
    from transformers import ProcessorMixin

    TextDocument = str | tuple[Mapping[str, Any], ...]

_TYPES: Final = ("mm_token_type_ids", "token_type_ids")
"""What processors call the type of each token, by which models find images."""
_NOT_FOR_MODELS: Final = ("input_ids", "attention_mask", *_TYPES)
_TEXT_BEFORE, _TEXT_AFTER = "kvtuner-before", "kvtuner-after"
"""Texts around an image, by which its mark is found in what a chat template makes of them."""


@dataclass(frozen=True, slots=True)
class ImageMark:
    """What stands for an image in a text: the processor's own token, and what the chat template puts around it."""

    own: str
    before: str = ""
    after: str = ""

    @property
    def whole(self) -> str:
        """All of it, as a model is trained to read it."""
        return self.before + self.own + self.after


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image, and the tokens of its mark in its place, from the first to behind the last."""

    start: int
    end: int
    image: Image

    def moved(self, tokens: int) -> PlacedImage:
        """The image that many tokens later."""
        return PlacedImage(self.start + tokens, self.end + tokens, self.image)


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens with their types by name, a number each, and the images in their places."""

    ids: list[int]
    types: Mapping[str, list[int]]
    images: tuple[PlacedImage, ...] = ()

    def __add__(self, other: TokenRun) -> TokenRun:
        """These tokens with others behind them; types that either lacks are 0."""

        def types_of(run: TokenRun, name: str) -> list[int]:
            return run.types.get(name, [0] * len(run.ids))

        types = {name: types_of(self, name) + types_of(other, name) for name in {**self.types, **other.types}}
        images = self.images + tuple(image.moved(len(self.ids)) for image in other.images)
        return TokenRun(self.ids + other.ids, types, images)

    @property
    def content(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The tokens, with numbers that tell an image from others in its places, int64 [tokens]."""
        content = np.array(self.ids, dtype=np.int64)
        for placed in self.images:
            content[placed.start : placed.end] = image_hash(placed.image) + np.arange(placed.end - placed.start)
        return content

    def filled(self, length: int, filling: int) -> list[int]:
        """The tokens with a filling behind them up to a length."""
        return self.ids + [filling] * (length - len(self.ids))

    def cut(self, place: int) -> tuple[TokenRun, TokenRun]:
        """The tokens before a place that cuts no image, and those from it on."""
        before, after = (
            {name: values[part] for name, values in self.types.items()} for part in (slice(place), slice(place, None))
        )
        first = tuple(image for image in self.images if image.end <= place)
        rest = tuple(image.moved(-place) for image in self.images[len(first) :])
        return TokenRun(self.ids[:place], before, first), TokenRun(self.ids[place:], after, rest)


@dataclass(frozen=True)  # without slots, which cached_property cannot have
class ImageTokenizer:
    """A model's processor, by which documents become tokens and their images what the model takes.

    Attributes:
        name: What the user calls the data, for messages.
    """

    processor: ProcessorMixin
    name: str

    def tokens(self, document: TextDocument | ImageDocument) -> TokenRun:
        """The tokens of a document with its images in their places.

        Raises:
            CorpusError: The processor refuses the document, or does not tell the tokens of its images, or a token of
                images stands in it without one.
        """
        pictures = document.images if isinstance(document, ImageDocument) else ()
        content = document.content if isinstance(document, ImageDocument) else document
        images = [picture.read() for picture in pictures]
        is_text = isinstance(content, str)
        text = self._marked(content, len(images)) if isinstance(content, str) else self._conversation(content)
        encoded = self._call(
            text=[text],
            images=images or None,
            add_special_tokens=is_text,
            return_offsets_mapping=True,
            return_text_replacement_offsets=True,
            return_tensors="pt",
        )
        ids = encoded["input_ids"][0].tolist()
        types = {name: encoded[name][0].tolist() for name in _TYPES if name in encoded}
        run = TokenRun(ids, types, tuple(self._places(encoded, images)))
        self._refuse_tokens_without_image(run)
        return run

    def _marked(self, text: str, num_images: int) -> str:
        """A text with the whole mark of each image."""
        if not num_images:
            return text
        mark = self._mark()
        if text.count(mark.own) == num_images and IMAGE_MARK not in text:
            return text.replace(mark.whole, mark.own).replace(mark.own, mark.whole)
        marks = text.count(IMAGE_MARK)
        if marks not in (0, num_images):
            raise CorpusError(
                f"{self.name}: a text with {num_images} images has {marks} marks {IMAGE_MARK}; give one for each, or"
                " none for images before the text"
            )
        return (text if marks else IMAGE_MARK * num_images + text).replace(IMAGE_MARK, mark.whole)

    def _mark(self) -> ImageMark:
        """The mark that the chat template gives an image; the processor's own token where no template takes images."""
        own = self._own_mark()
        parts = [
            {"type": "text", "text": _TEXT_BEFORE},
            {"type": "image"},
            {"type": "text", "text": _TEXT_AFTER},
        ]
        try:
            text = self._conversation([{"role": "user", "content": parts}])
        except CorpusError:  # processors of base models have no template, and older templates read texts alone
            return ImageMark(own)
        mark = text.partition(_TEXT_BEFORE)[2].rpartition(_TEXT_AFTER)[0].strip()
        if mark.count(own) != 1:
            return ImageMark(own)
        before, _, after = mark.partition(own)
        return ImageMark(own, before, after)

    def _own_mark(self) -> str:
        own = getattr(self.processor, "image_token", None)
        if not isinstance(own, str):
            raise CorpusError(f"{type(self.processor).__name__} names no token of an image; give 'messages'")
        return own

    def _refuse_tokens_without_image(self, run: TokenRun) -> None:
        """Refuse a text that spells a token of images: a model would look for an image there."""
        ids = np.array(run.ids)
        is_of_image = np.isin(ids, self._ids_of_images)
        for types in run.types.values():
            is_of_image |= np.array(types) != 0
        for placed in run.images:
            is_of_image[placed.start : placed.end] = False
        if is_of_image.any():
            processor: Any = self.processor
            token = processor.tokenizer.convert_ids_to_tokens(int(ids[is_of_image][0]))
            raise CorpusError(f"{self.name}: a text holds {token}, a token of images, but no image there; remove it")

    @cached_property
    def _ids_of_images(self) -> list[int]:
        """The ids of the special tokens that stand for an image, of which a model takes one: not always its mark."""
        image = np.zeros((224, 224, 3), np.uint8)
        encoded = self._call(text=[self._own_mark()], images=[image], add_special_tokens=False, return_tensors="pt")
        processor: Any = self.processor
        added = processor.tokenizer.added_tokens_decoder
        laid_out = set(encoded["input_ids"][0].tolist())
        return [number for number in laid_out if number in added and added[number].special]

    def _conversation(self, messages: Sequence[Mapping[str, Any]]) -> str:
        processor: Any = self.processor
        own = getattr(processor, "chat_template", None)
        holder = processor if own is not None else processor.tokenizer
        if getattr(holder, "chat_template", None) is None:
            raise CorpusError(
                f"{self.name} holds 'messages', but the model's processor has no chat template; give 'text'"
            )
        try:
            text: str = holder.apply_chat_template([dict(message) for message in messages], tokenize=False)
        except Exception as error:  # a template raises what it likes
            raise CorpusError(f"{self.name}: the chat template refuses a conversation: {_reason(error)}") from error
        return text

    def _call(self, **arguments: Any) -> Any:
        try:
            return self.processor(**arguments)
        except Exception as error:  # processors raise anything where they meet what they do not expect
            raise CorpusError(
                f"{self.name}: {type(self.processor).__name__} refuses a document: {_reason(error)}"
            ) from error

    def _places(self, encoded: Any, images: Sequence[Image]) -> Iterator[PlacedImage]:
        if not images:
            return
        replaced = encoded.get("text_replacement_offsets")
        if replaced is None or len(replaced[0]) != len(images):
            raise CorpusError(
                f"{type(self.processor).__name__} does not tell which tokens stand for an image: a release of"
                " transformers whose processors have return_text_replacement_offsets is needed"
            )
        ids = encoded["input_ids"][0].tolist()
        mark = self._mark()
        before, after = (self._ids(text) for text in (mark.before, mark.after))
        starts, ends = encoded["offset_mapping"][0].unbind(-1)
        for image, offsets in zip(images, replaced[0], strict=True):
            first, last = offsets["new_span"]
            tokens = ((ends > first) & (starts < last)).nonzero().flatten().tolist()
            start, end = tokens[0], tokens[-1] + 1
            first_of_mark, end_of_mark = start - len(before), end + len(after)
            if ids[max(0, first_of_mark) : start] == before and ids[end:end_of_mark] == after:
                start, end = first_of_mark, end_of_mark
            yield PlacedImage(start, end, image)

    def _ids(self, text: str) -> list[int]:
        processor: Any = self.processor
        return list(processor.tokenizer(text, add_special_tokens=False)["input_ids"])

    def model_inputs(self, run: TokenRun) -> SequenceImages:
        """What the model takes beside the ids of a sequence."""
        inputs = {name: torch.tensor([values]) for name, values in run.types.items()}
        if run.images:
            images = [placed.image for placed in run.images]
            marks = " ".join([self._own_mark()] * len(images))
            encoded = self._call(text=[marks], images=images, return_tensors="pt")
            inputs |= {name: value for name, value in encoded.items() if name not in _NOT_FOR_MODELS}
        return SequenceImages(len(run.ids), inputs, tuple((placed.start, placed.end) for placed in run.images))


@dataclass(slots=True)
class SequenceCutter:
    """Cuts a stream of documents into sequences of at most `length` tokens.

    Attributes:
        start: The tokens that a text begins with, which the rest of a document that was cut gets too.
    """

    tokenizer: ImageTokenizer
    length: int
    start: list[int]
    pending: TokenRun = field(default_factory=lambda: TokenRun([], {}))

    def cut(self, documents: Iterable[TextDocument | ImageDocument]) -> Iterator[TokenRun]:
        """The sequences, of which each has something to score behind its first half.

        Raises:
            CorpusError: An image that is longer than a sequence, or two that a model would take for one.
        """
        for document in documents:
            self.pending += self.tokenizer.tokens(document)
            while len(self.pending.ids) >= self.length:
                sequence, self.pending = self.pending.cut(self._place())
                if self.pending.ids[: len(self.start)] != self.start:
                    self.pending = TokenRun(list(self.start), {}) + self.pending
                self._refuse_touching(sequence)
                if _has_predictions(sequence, self.length):
                    yield sequence

    def _place(self) -> int:
        """The last place up to the length that cuts no image."""
        for placed in self.pending.images:
            if placed.start < self.length < placed.end:
                if placed.start <= len(self.start):
                    raise CorpusError(
                        f"{self.tokenizer.name}: an image takes {placed.end - placed.start} tokens, but a sequence has"
                        f" {self.length}; give a larger --sequence-length, or smaller images"
                    )
                return placed.start
        return self.length

    def _refuse_touching(self, sequence: TokenRun) -> None:
        """Refuse images side by side without a token that ends one: models find images by runs of a type."""
        for first, second in pairwise(sequence.images):
            last, place = first.end - 1, second.start
            is_one_run = any(types[last] == types[place] != 0 for types in sequence.types.values())
            if first.end == place and sequence.ids[last] == sequence.ids[place] and is_one_run:
                raise CorpusError(
                    f"{self.tokenizer.name}: two images stand side by side with nothing that tells a model where the"
                    " first ends; put text between them"
                )


def _has_predictions(sequence: TokenRun, length: int) -> bool:
    images = SequenceImages(len(sequence.ids), {}, tuple((image.start, image.end) for image in sequence.images))
    places = torch.arange(images.end_of_cut(length // 2), images.num_tokens)
    return bool((~images.precedes_image(places)).any())


def _reason(error: Exception) -> str:
    """An error in one short line; its class where it says nothing."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def image_hash(image: Image) -> int:
    """A number of 62 bits that tells an image from others."""
    digest = hashlib.sha256(repr(image.size).encode() + image.tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 2
