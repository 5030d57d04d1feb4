"""One hash of all weights, the same on every machine. Knows nothing of what the weights are for."""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING

import torch

from kvtuner.calibration.placement.sharded_weights import whole
from kvtuner.progress.bar import ProgressBar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

BLOCK_BYTES = 1 << 26


def fingerprint(tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None) -> str:
    """sha256 of every tensor's name, shape, dtype and the checksum of all its bytes; `read` gives those on meta.

    A checksum, and no sum of elements: rounding would follow the device and the number of threads, and a run folder may
    be resumed on another machine. Of a tensor that accelerate offloaded to the meta device, only name and shape count
    without `read`.
    """
    digest = hashlib.sha256()
    num_bytes = sum(tensor.nbytes for tensor in tensors.values() if read is not None or not tensor.is_meta)
    with ProgressBar(desc="hashing weights", total=num_bytes, unit="B", unit_scale=True) as bar:
        for name, tensor in tensors.items():
            digest.update(f"{name}{list(tensor.shape)}".encode())
            if tensor.is_meta and read is not None:
                tensor = read(name)
            if not tensor.is_meta:
                tensor = whole(tensor)
                digest.update(f"{tensor.dtype}{_checksum(tensor, bar)}".encode())
    return "sha256:" + digest.hexdigest()


def _checksum(tensor: Tensor, bar: ProgressBar) -> int:
    crc = 0
    for block in tensor.detach().contiguous().reshape(-1).view(torch.uint8).split(BLOCK_BYTES):
        crc = zlib.crc32(block.cpu().numpy(), crc)
        bar.update(len(block))
    return crc
