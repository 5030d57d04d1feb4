"""The bytes of a checkpoint's tensors, from safetensors headers and their index alone. Knows nothing of models."""

import json
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO

from kvtuner.exported_configs.identity.checkpoint_hash import (
    MAX_HEADER_BYTES,
    ONE_FILE,
    WEIGHTS_INDEX,
    checkpoint_files,
)


def checkpoint_bytes(folder: Path) -> int | None:
    """The bytes of all tensors in a folder's safetensors files; None where there are none, or some cannot be read.

    The total of an index counts, so that its files need not be there yet; where it has none, those of its files do.
    """
    try:
        index = folder / WEIGHTS_INDEX
        if not (folder / ONE_FILE).is_file() and index.is_file():
            with index.open("rb") as file:
                total = index_total(file.read(MAX_HEADER_BYTES))
            if total is not None:
                return total
        return sum(map(_tensor_bytes, checkpoint_files(folder))) or None
    except (OSError, ValueError, RecursionError):
        return None


def float32_bytes(folder: Path) -> int | None:
    """The bytes of tensors of 32 bits in a folder's safetensors files; None where not all files are there."""
    try:
        files = checkpoint_files(folder)
        return sum(map(_float32_bytes, files)) if files else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None  # damage that the loader of weights will name


def index_total(text: bytes) -> int | None:
    """The bytes of all tensors that an index states, None where it states none; a `ValueError` is no JSON."""
    index: Any = json.loads(text)
    metadata = index.get("metadata") if isinstance(index, dict) else None
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer():  # as some writers leave it
        total = int(total)
    return total if type(total) is int and total > 0 else None


def _tensor_bytes(path: Path) -> int:
    with path.open("rb") as file:
        header = _header_bytes(file)
        size = file.seek(0, SEEK_END) - 8 - header
    if size < 0:
        raise ValueError("no safetensors file")
    return size


def _float32_bytes(path: Path) -> int:
    with path.open("rb") as file:
        tensors = json.loads(file.read(_header_bytes(file)))
    total = 0
    for name, tensor in tensors.items():
        if name != "__metadata__" and tensor["dtype"] == "F32":
            start, end = tensor["data_offsets"]
            total += end - start
    return total


def _header_bytes(file: BinaryIO) -> int:
    header = int.from_bytes(file.read(8), "little")
    if not 0 < header <= MAX_HEADER_BYTES:
        raise ValueError("no safetensors file")
    return header
