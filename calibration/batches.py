"""Batches of one split, each with its position ids. Knows nothing of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

Offsets = Literal["random", "small", "large"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that run together: `index` in their split, ids and consecutive positions [batch, tokens] int64."""

    index: int
    input_ids: Tensor
    position_ids: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences."""
        return self.input_ids.numel()


def batches(
    ids: Tensor,
    context_length: int,
    *,
    offsets: Offsets,
    seed: int,
    batch_size: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[Batch]:
    """Cut a split, ids [num_sequences, tokens], into batches of `batch_size` sequences on `device`.

    Positions lie below `context_length`. By `offsets` a sequence begins at one drawn from a part of the context of its
    own, at 0, or as late as it fits.
    """
    num_sequences, tokens = ids.shape
    last_start = max(0, context_length - tokens)
    generator = torch.Generator().manual_seed(seed)
    # One sequence from each of num_sequences equal parts of the context: few sequences would leave most of it unseen.
    parts = torch.randperm(num_sequences, generator=generator)
    within = torch.rand(num_sequences, generator=generator, dtype=torch.float64)
    random = ((parts + within) * (last_start + 1) / num_sequences).long().clamp(max=last_start)
    starts = {"random": random, "small": torch.zeros_like(random), "large": torch.full_like(random, last_start)}[
        offsets
    ]
    positions = starts.unsqueeze(1) + torch.arange(tokens)  # [num_sequences, tokens]
    for index, first in enumerate(range(0, num_sequences, batch_size)):
        rows = slice(first, first + batch_size)
        yield Batch(index, ids[rows].to(device), positions[rows].to(device))
