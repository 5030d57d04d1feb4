"""Documents that hold images, as data files and data sets have them. Knows nothing of models and their processors."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import CorpusError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from PIL.Image import Image

IMAGE_MARK: Final = "<image>"
"""What marks the place of an image in a text, where the model's own token does not."""
_IMAGE_TYPES: Final = ("image", "image_url")
_REFERENCES: Final = ("image", "path", "url", "image_url", "base64")
"""The fields of a part of a message that may name its image."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as data name it: a file, its bytes, or what a data set has decoded.

    Attributes:
        value: A path, a data URL, base64, a mapping with ``bytes`` or ``path``, or an image of PIL.
        folder: The folder that paths begin in.
        where: The place in the data, which begins messages of errors.
    """

    value: Any
    folder: Path
    where: str

    def read(self) -> Image:
        """The image in red, green and blue.

        Raises:
            CorpusError: No image, or one that is not at hand.
        """
        try:
            from PIL import Image
        except ImportError as error:
            raise CorpusError("images are read by Pillow; pip install pillow") from error
        if isinstance(self.value, Image.Image):
            return self.value.convert("RGB")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                return Image.open(io.BytesIO(self._bytes())).convert("RGB")
        except (OSError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise CorpusError(f"{self.where}: cannot read an image: {' '.join(str(error).split())[:200]}") from error

    def _bytes(self) -> bytes:
        value = self.value
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path") or value.get("url")
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str):
            raise CorpusError(f"{self.where}: an image is a path, a data URL or its bytes, not {type(value).__name__}")
        if value.startswith(("http://", "https://")):
            raise CorpusError(f"{self.where}: images are not fetched; download {value[:80]} and give its path")
        if value.startswith("data:"):
            return _decoded(value.partition(",")[2], self.where)
        path = self.folder / value.removeprefix("file://")
        if len(value) < 1024 and path.is_file():
            return path.read_bytes()
        if len(value) >= 1024:
            return _decoded(value, self.where)
        raise CorpusError(f"{self.where}: image {value[:80]} does not exist; paths begin in {self.folder}")


def _decoded(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise CorpusError(f"{where}: an image is no base64: {error}") from error


@dataclass(frozen=True, slots=True)
class ImageDocument:
    """A text or a conversation with its images in order.

    Attributes:
        content: A text in which `IMAGE_MARK` or the model's own token stands for each image, or before which they
            stand; or messages, in which a part ``{"type": "image"}`` stands for each.
    """

    content: str | tuple[Mapping[str, Any], ...]
    images: tuple[ImageSource, ...]

    @property
    def key(self) -> str:
        """What tells this document from others."""
        parts = (repr(self.content), *(_identity(image.value) for image in self.images))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _identity(value: Any) -> str:
    if hasattr(value, "tobytes"):
        return hashlib.sha256(value.tobytes()).hexdigest()
    return repr(value)


def image_document(row: Mapping[str, Any], text_field: str, folder: Path, where: str) -> ImageDocument | None:
    """The document of a row of data that holds images; None of one that holds none.

    A row has ``messages`` whose parts are images, or ``images`` (``image``) beside ``messages`` or a text.

    Raises:
        CorpusError: Images and their places do not match.
    """
    column = row.get("images") if row.get("images") is not None else row.get("image")
    beside = [] if column is None else list(column) if isinstance(column, list | tuple) else [column]
    messages = row.get("messages")
    if messages is None:
        text = row.get(text_field)
        if not beside or not isinstance(text, str):
            return None
        return ImageDocument(text, tuple(ImageSource(value, folder, where) for value in beside))
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    found: list[Any] = []
    content = tuple(_with_images(message, beside, found, where) for message in messages)
    if not found and not beside:
        return None
    if beside:
        raise CorpusError(
            f'{where}: {len(beside)} images have no place; mark each by a part {{"type": "image"}} or by {IMAGE_MARK}'
        )
    return ImageDocument(content, tuple(ImageSource(value, folder, where) for value in found))


def _with_images(message: Mapping[str, Any], beside: list[Any], found: list[Any], where: str) -> Mapping[str, Any]:
    """A message with plain parts; its images are added to `found`, those that it does not name from `beside`."""
    content = message.get("content")
    if isinstance(content, str) and beside and IMAGE_MARK in content:
        content = list(_parts_of(content))
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in _IMAGE_TYPES:
            parts.append(part)
            continue
        named = [part[name] for name in _REFERENCES if part.get(name) is not None]
        if not named and not beside:
            raise CorpusError(f"{where}: a message has an image that neither it nor 'images' names")
        found.append(named[0] if named else beside.pop(0))
        parts.append({"type": "image"})
    return {**message, "content": parts}


def _parts_of(text: str) -> Iterator[Mapping[str, Any]]:
    """The parts of a text between its marks of images, and the images."""
    for number, piece in enumerate(text.split(IMAGE_MARK)):
        if number:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}
