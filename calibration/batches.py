"""Batches of one split, each with its position ids. Knows nothing of layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtuner.calibration.forward.read_plan import ReadPlan
    from kvtuner.calibration.images.sequence_images import SequenceImages

Offsets = Literal["random", "small", "large"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that run together.

    Attributes:
        index: The place of the batch in its split.
        input_ids: The tokens, int64 [batch, tokens].
        position_ids: Consecutive positions of the same shape; a model gives images its own positions from the first on.
        images: The images in a sequence that runs alone; None of text.
    """

    index: int
    input_ids: Tensor
    position_ids: Tensor
    images: SequenceImages | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences."""
        return self.input_ids.numel()

    def own_plan(self, plan: ReadPlan) -> ReadPlan:
        """The plan for these sequences: its split does not cut an image, which is part of the prompt then."""
        return plan if self.images is None else replace(plan, split=self.images.end_of_cut(plan.split))

    def scored_places(self, plan: ReadPlan) -> Tensor:
        """The tokens whose predictions are scored, ascending, int64 on the CPU.

        They read quantized keys and values, and what follows them is text and not part of an image.
        """
        places = torch.arange(self.own_plan(plan).split, self.input_ids.shape[1])
        return places if self.images is None else places[~self.images.precedes_image(places)]

    def scored(self, values: Tensor, plan: ReadPlan) -> Tensor:
        """What is scored of values [batch, last tokens, ...], which begin at any token up to the plan's split."""
        first = self.input_ids.shape[1] - values.shape[1]
        if self.images is None:
            return values[:, plan.split - first :]
        return values[:, self.scored_places(plan).to(values.device) - first]


def batches(
    ids: Tensor,
    context_length: int,
    *,
    offsets: Offsets,
    seed: int,
    batch_size: int = 1,
    device: torch.device | str = "cpu",
    images: Sequence[SequenceImages] = (),
) -> Iterator[Batch]:
    """Cut a split, ids [num_sequences, tokens], into batches of `batch_size` sequences on `device`.

    Sequences with images run one by one, each as long as it is.

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
        own = images[first] if images else None
        length = tokens if own is None else own.num_tokens
        yield Batch(index, ids[rows, :length].to(device), positions[rows, :length].to(device), own)
