"""The header of a safetensors file of any kind: its tensors, within the bounds of the file. Reads no tensor.

A side file of a profile has one form only, which `constants_file` reads.
"""

import json
from dataclasses import dataclass
from os import SEEK_END
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, FailFast, Field, NonNegativeInt, TypeAdapter

MAX_HEADER_BYTES: Final = 100 * 2**20
_OBJECT: Final = TypeAdapter(dict[str, Any])
# pydantic would collect an error for each of millions of items.
_Counts = Annotated[list[NonNegativeInt], FailFast()]


class TensorEntry(BaseModel, strict=True):
    """One tensor's entry in a header; its offsets count from the first byte after the header."""

    dtype: str
    shape: _Counts
    data_offsets: Annotated[_Counts, Field(min_length=2, max_length=2)]


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The tensors of a file by name, the place of the first byte after its header, and the bytes from there on."""

    tensors: dict[str, TensorEntry]
    start: int
    num_bytes: int


def read_header(path: Path) -> SafetensorsHeader:
    """Read a file's header.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no safetensors file, or a pipe, whose reader waits without an end.
        RecursionError: Its header nests deep.
    """
    if not path.is_file():
        raise ValueError("no file, or a pipe that would be waited for")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= MAX_HEADER_BYTES:
            raise ValueError("no safetensors file")
        header = _OBJECT.validate_python(json.loads(file.read(size)))
        num_bytes = file.seek(0, SEEK_END) - 8 - size
    header.pop("__metadata__", None)
    tensors = {name: TensorEntry.model_validate(fields) for name, fields in header.items()}
    for tensor in tensors.values():
        start, end = tensor.data_offsets
        if not start <= end <= num_bytes:
            raise ValueError("a tensor reversed, or beyond the end of its file")
    return SafetensorsHeader(tensors, 8 + size, num_bytes)
