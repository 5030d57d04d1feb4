"""The memory between the launches of one layer's kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SCRATCH_ALIGNMENT: Final = 256


def stream_of(device: torch.device) -> int:
    """The number of the stream that launches on a device go to."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class Scratch:
    """A buffer that is handed out piece by piece, from the start again for every call, on one stream: the first.

    What does not fit, and everything on another stream, is allocated for the call: torch keeps the memory of streams
    apart, and inside a CUDA graph that memory is the graph's own. So no two streams ever share a piece.
    """

    def __init__(
        self, num_bytes: int, device: torch.device, current_stream: Callable[[torch.device], int] = stream_of
    ) -> None:
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._current_stream = current_stream
        self._stream: int | None = None
        self._used = 0

    def restart(self) -> Scratch:
        """Give the same memory out again; whatever was taken before on this stream is lost."""
        stream = self._current_stream(self._buffer.device)
        if self._stream is None:
            self._stream = stream
        self._used = 0 if stream == self._stream else len(self._buffer)
        return self

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor."""
        start, size = self._used, math.prod(shape) * dtype.itemsize
        if start + size > len(self._buffer):
            return torch.empty(shape, dtype=dtype, device=self._buffer.device)
        self._used += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        return self._buffer[start : start + size].view(dtype).view(shape)
