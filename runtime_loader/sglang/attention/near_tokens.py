"""The tokens that others read in layers that do not read all: those of their chunk, or an image within a window.

Chunks, as Llama 4's, are as long as one another and begin at multiples of that; a token reads those of its own chunk
that are not after it. Knows tensors alone, and nothing of SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvtuner.runtime_loader.packed_attention import ChunkMask


def tokens_of_last_chunk(lengths: Tensor, size: int) -> Tensor:
    """The tokens that the last one of each request reads, itself included, of `lengths` tokens; none of none."""
    return torch.minimum((lengths - 1) % size + 1, lengths)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPieces:
    """New tokens of a batch, cut where chunks begin: each piece attends as if it was a request of its own.

    Attributes:
        bounds: The bounds of pieces among the new tokens, int32 [pieces + 1].
        earlier: The bounds of the tokens before them that they read too, int32 [pieces + 1]: those of a request's last
            chunk so far, for its first piece.
        lengths: The new tokens of each piece.
    """

    bounds: Tensor
    earlier: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, prefixes: Sequence[int], lengths: Sequence[int], size: int, device: torch.device | str) -> ChunkPieces:
        """Cut `lengths` new tokens of each request behind `prefixes` tokens, by chunks of `size`."""
        pieces, earlier = [], []
        for prefix, length in zip(prefixes, lengths, strict=True):
            begun = prefix % size
            first = min(length, size - begun)
            rest = range(first, length, size)
            pieces += [first, *(min(size, length - start) for start in rest)]
            earlier += [begun, *(0 for _ in rest)]
        return cls(_bounds(pieces, device), _bounds(earlier, device), pieces)


def _bounds(lengths: list[int], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def cut_before_windows(mask: ChunkMask, prefixes: Sequence[int], lengths: Sequence[int], window: int) -> None:
    """Let none of `lengths` new tokens of each request, behind `prefixes` tokens, read before its window: in place."""
    end = 0
    for prefix, length in zip(prefixes, lengths, strict=True):
        start, end = end, end + length * (prefix + length)
        mask.mask[start:end].view(length, prefix + length).triu_(prefix - window + 1)
