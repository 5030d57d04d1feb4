"""Memory between the launches of one layer: allocated once, at one address, and used by every layer in turn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT: Final = 256


class Scratch:
    """A buffer that is handed out piece by piece, from the start again for every call.

    What does not fit is allocated for the call: inside a CUDA graph that memory is the graph's own.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._used = 0

    def restart(self) -> Scratch:
        """Give the same memory out again; whatever was taken before is lost."""
        self._used = 0
        return self

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor."""
        start, size = self._used, math.prod(shape) * dtype.itemsize
        if start + size > len(self._buffer):
            return torch.empty(shape, dtype=dtype, device=self._buffer.device)
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return self._buffer[start : start + size].view(dtype).view(shape)
