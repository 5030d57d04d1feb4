"""The hash of a checkpoint's weights by a sample of each tensor. Knows nothing of models.

It is cheap for any size, and the same however tensors are split into files. A fine-tune changes nearly every tensor, so
a few kilobytes of each tell it from its base; this is no checksum against damage.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from pydantic import TypeAdapter

from kvtuner.exported_configs.identity.safetensors_header import MAX_HEADER_BYTES, read_header
from kvtuner.run_folder import canonical_json

SAMPLE_BYTES: Final = 4096
ONE_FILE: Final = "model.safetensors"
WEIGHTS_INDEX: Final = "model.safetensors.index.json"
_OBJECT: Final = TypeAdapter(dict[str, Any])


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
    header = read_header(path)
    with path.open("rb") as file:
        for name, tensor in header.tensors.items():
            start, end = tensor.data_offsets
            yield name, [tensor.dtype, tensor.shape, _sample(file, header.start + start, end - start)]


def _sample(file: BinaryIO, start: int, size: int) -> int:
    """The checksum of a tensor's first and last bytes."""
    checksum = 0
    for place in sorted({start, start + max(0, size - SAMPLE_BYTES)}):
        file.seek(place)
        checksum = zlib.crc32(file.read(min(size, SAMPLE_BYTES)), checksum)
    return checksum
