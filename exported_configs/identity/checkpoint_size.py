"""The bytes of a checkpoint's tensors, from safetensors headers and their index alone. Knows nothing of models."""

import json
from pathlib import Path
from typing import Any

from kvtuner.exported_configs.identity.checkpoint_hash import ONE_FILE, WEIGHTS_INDEX, checkpoint_files
from kvtuner.exported_configs.identity.safetensors_header import MAX_HEADER_BYTES, read_header


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
        return sum(read_header(file).num_bytes for file in checkpoint_files(folder)) or None
    except (OSError, ValueError, RecursionError):
        return None


def float32_bytes(folder: Path) -> int | None:
    """The bytes of tensors of 32 bits in a folder's safetensors files; None where not all files are there."""
    try:
        files = checkpoint_files(folder)
        return sum(map(_float32_bytes, files)) if files else None
    except (OSError, ValueError, RecursionError):
        return None  # damage that the loader of weights will name


def index_total(text: bytes) -> int | None:
    """The bytes of all tensors that an index states, None where it states none; a `ValueError` is no JSON."""
    index: Any = json.loads(text)
    metadata = index.get("metadata") if isinstance(index, dict) else None
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer():  # as some writers leave it
        total = int(total)
    return total if type(total) is int and total > 0 else None


def _float32_bytes(path: Path) -> int:
    offsets = [tensor.data_offsets for tensor in read_header(path).tensors.values() if tensor.dtype == "F32"]
    return sum(end - start for start, end in offsets)
