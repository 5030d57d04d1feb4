"""Which weights a checkpoint holds, told by a sample of each tensor. Knows nothing of models.

Cheap for any size, and the same however tensors are split into files. A fine-tune changes nearly every tensor, so a few
kilobytes of each tell it from its base; this is no checksum against damage.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import TYPE_CHECKING, Any, Final

from kvtuner.run_folder import canonical_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

SAMPLE_BYTES: Final = 4096
MAX_HEADER_BYTES: Final = 100 * 2**20


def checkpoint_sha256(folder: Path) -> str | None:
    """``sha256:`` and a hash of the names, shapes, dtypes and sampled bytes of all tensors in safetensors files.

    Args:
        folder: of a checkpoint, where all of its files are, or none.

    Returns:
        None where there are no such files, or not all of them, or one that cannot be read.
    """
    try:
        files = _files(folder)
        tensors = dict(sorted(tensor for file in files for tensor in _tensors(file)))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # of another format, or damaged: whoever loads the weights says so
    if not tensors:
        return None
    return "sha256:" + hashlib.sha256(canonical_json(tensors).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    """Those that an index names, or all."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    return sorted(folder.glob("*.safetensors"))


def _tensors(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """Name, dtype, shape and checksum of a sample of every tensor of a file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= MAX_HEADER_BYTES:
            raise ValueError("no safetensors file")
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            yield name, [entry["dtype"], entry["shape"], _sample(file, 8 + size + start, end - start)]


def _sample(file: BinaryIO, start: int, size: int) -> int:
    """Checksum of the first and the last bytes."""
    checksum = 0
    for place in sorted({start, start + max(0, size - SAMPLE_BYTES)}):
        file.seek(place)
        checksum = zlib.crc32(file.read(min(size, SAMPLE_BYTES)), checksum)
    return checksum
