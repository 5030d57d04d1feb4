"""The hash of a checkpoint's weights by a sample of each tensor. Knows nothing of models.

It is cheap for any size, and the same however tensors are split into files. A fine-tune changes nearly every tensor, so
a few kilobytes of each tell it from its base; this is no checksum against damage.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator
from os import SEEK_END
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

from pydantic import BaseModel, FailFast, Field, NonNegativeInt, TypeAdapter

from kvtuner.run_folder import canonical_json

SAMPLE_BYTES: Final = 4096
MAX_HEADER_BYTES: Final = 100 * 2**20
ONE_FILE: Final = "model.safetensors"
WEIGHTS_INDEX: Final = "model.safetensors.index.json"
_OBJECT: Final = TypeAdapter(dict[str, Any])
# pydantic would collect an error for each of millions of items.
_Counts = Annotated[list[NonNegativeInt], FailFast()]


class _Tensor(BaseModel, strict=True):
    dtype: str
    shape: _Counts
    data_offsets: Annotated[_Counts, Field(min_length=2, max_length=2)]


def checkpoint_sha256(folder: Path) -> str | None:
    """``sha256:`` and a hash of the names, shapes, dtypes and sampled bytes of all tensors in safetensors files.

    It is None where some file of the model is missing, cannot be read or is no safetensors file. Files with other
    names do not count, since nothing says which of them are the model.
    """
    try:
        files = checkpoint_files(folder)
        tensors = dict(sorted(tensor for file in files for tensor in _tensors(file)))
        text = canonical_json(tensors).encode()
    except (OSError, ValueError, RecursionError):
        return None  # another format, or damage that the loader of weights will name
    return "sha256:" + hashlib.sha256(text).hexdigest() if tensors else None


def checkpoint_files(folder: Path) -> list[Path]:
    """The one file of a model, or those of its index; adapters and other copies beside them do not count.

    The list is empty where there is neither; a `ValueError` is an index that names no files beside it.
    """
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        return []
    with index.open("rb") as file:
        text = file.read(MAX_HEADER_BYTES)  # a larger one is cut, and so no JSON
    names = _OBJECT.validate_python(_OBJECT.validate_python(json.loads(text)).get("weight_map")).values()
    if not all(isinstance(name, str) and name.endswith(".safetensors") and not {*"/\\"} & {*name} for name in names):
        raise ValueError("an index names files beside it")
    return [folder / name for name in sorted(set(names))]


def _tensors(path: Path) -> Iterator[tuple[str, list[Any]]]:
    if not path.is_file():
        raise ValueError("no file, or a pipe that would be waited for")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= MAX_HEADER_BYTES:
            raise ValueError("no safetensors file")
        header = _OBJECT.validate_python(json.loads(file.read(size)))
        num_bytes = file.seek(0, SEEK_END) - 8 - size
        header.pop("__metadata__", None)
        for name, fields in header.items():
            tensor = _Tensor.model_validate(fields)
            start, end = tensor.data_offsets
            if not start <= end <= num_bytes:
                raise ValueError("a tensor reversed, or beyond the end of its file")
            yield name, [tensor.dtype, tensor.shape, _sample(file, 8 + size + start, end - start)]


def _sample(file: BinaryIO, start: int, size: int) -> int:
    """The checksum of a tensor's first and last bytes."""
    checksum = 0
    for place in sorted({start, start + max(0, size - SAMPLE_BYTES)}):
        file.seek(place)
        checksum = zlib.crc32(file.read(min(size, SAMPLE_BYTES)), checksum)
    return checksum
