"""Documents that hold images, as data files and data sets have them. Knows nothing of models and their processors."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import struct
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
_BEGINNINGS: Final = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")
"""What files of images begin with: names can be base64 too, but not of these."""
_DAMAGE: Final = (OSError, ValueError, SyntaxError, EOFError, struct.error)
"""What Pillow's decoders raise of files that are damaged, beside its own errors."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as data name it: a file, its bytes, or what a data set has decoded.

    Attributes:
        value: A path, a data URL, base64, an image of PIL, or a mapping with ``bytes``, ``base64``, ``path``, ``url``.
        folder: The folder that paths begin in; None where data come from elsewhere and must not name files here.
        where: The place in the data, which begins messages of errors.
    """

    value: Any
    folder: Path | None
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
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                value = self.value
                image = value if isinstance(value, Image.Image) else Image.open(io.BytesIO(self._bytes()))
                return image.convert("RGB")
        except (*_DAMAGE, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise CorpusError(f"{self.where}: cannot read an image: {' '.join(str(error).split())[:200]}") from error

    @property
    def is_at_hand(self) -> bool:
        """Whether a text that names the image names a file, a data URL or base64."""
        text = self.value
        return text.startswith("data:image/") or self._file(text) is not None or _from_base64(text) is not None

    @property
    def identity(self) -> str:
        """What tells the image from others, without reading its file."""
        value = self._named
        if isinstance(value, bytes):
            return hashlib.sha256(value).hexdigest()
        if isinstance(value, str):
            return repr(str(self._file(value) or value))
        if hasattr(value, "tobytes"):  # of PIL
            return f"{value.mode} {value.size} {hashlib.sha256(value.tobytes()).hexdigest()}"
        return type(value).__name__

    @property
    def _named(self) -> Any:
        """The value, or that of the first field of a mapping that has one."""
        if not isinstance(self.value, dict):
            return self.value
        return next((self.value[name] for name in ("bytes", "base64", "path", "url") if self.value.get(name)), None)

    def _bytes(self) -> bytes:
        value = self._named
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str):
            raise CorpusError(f"{self.where}: an image is a path, a data URL or its bytes, not {type(value).__name__}")
        if value.startswith(("http://", "https://")):
            raise CorpusError(f"{self.where}: images are not fetched; download {value[:80]} and give its path")
        is_encoded = value.startswith("data:") or (isinstance(self.value, dict) and self.value.get("base64") == value)
        file = None if is_encoded else self._file(value)
        if file is not None:
            return file.read_bytes()
        decoded = _from_base64(value, is_image=is_encoded)
        if decoded is not None:
            return decoded
        if is_encoded:
            raise CorpusError(f"{self.where}: an image is no base64: {value[:80]}")
        if self.folder is None:
            raise CorpusError(f"{self.where}: an image of a data set must be there with its bytes, not as {value[:80]}")
        raise CorpusError(f"{self.where}: image {value[:80]} does not exist; paths begin in {self.folder}")

    def _file(self, text: str) -> Path | None:
        """The file that a text names; None without one, also where no path can be so long."""
        if self.folder is None:
            return None
        path = self.folder / text.removeprefix("file://")
        return path if os.path.isfile(path) else None  # Path.is_file raises for a name that is too long


def _from_base64(text: str, *, is_image: bool = False) -> bytes | None:
    """The bytes of base64 or a data URL; None of anything else, and unless said to be so of what begins as no image."""
    encoded = text.partition(",")[2] if text.startswith("data:") else text
    try:
        decoded = base64.b64decode(encoded, validate=True)
    except ValueError:  # binascii's error too
        return None
    return decoded if is_image or decoded.startswith(_BEGINNINGS) else None


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
        parts = (repr(self.content), *(image.identity for image in self.images))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def image_document(row: Mapping[str, Any], text_field: str, folder: Path | None, where: str) -> ImageDocument | None:
    """The document of a row of data that holds images; None of one that holds none.

    A row has ``messages`` whose parts are images, or ``images`` (``image``) beside ``messages`` or a text. Beside a
    text that marks no image, one string there need not be an image: it is none unless it names a file or holds bytes.

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
        images = tuple(ImageSource(value, folder, where) for value in beside)
        if isinstance(column, str) and IMAGE_MARK not in text and not images[0].is_at_hand:
            return None
        return ImageDocument(text, images)
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
        named = next((name for name in _REFERENCES if part.get(name) is not None), None)
        if named is None and not beside:
            raise CorpusError(f"{where}: a message has an image that neither it nor 'images' names")
        value = beside.pop(0) if named is None else part[named]
        found.append({named: value} if named == "base64" else value)
        parts.append({"type": "image"})
    return {**message, "content": parts}


def _parts_of(text: str) -> Iterator[Mapping[str, Any]]:
    """The parts of a text between its marks of images, and the images."""
    for number, piece in enumerate(text.split(IMAGE_MARK)):
        if number:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}
