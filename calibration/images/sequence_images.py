"""The images of one sequence as a model takes them, and where they stand in it. Knows nothing of processors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class SequenceImages:
    """The images of a sequence of `num_tokens` tokens; none where `spans` is empty.

    Attributes:
        inputs: The arguments that the model takes beside token ids: pixels, their layout, and the type of each token.
        spans: The tokens in the place of each image, from the first to behind the last, ascending.
    """

    num_tokens: int
    inputs: Mapping[str, Tensor]
    spans: tuple[tuple[int, int], ...]

    def blank(self) -> SequenceImages:
        """The same without anything to see."""
        seen = {name: value for name, value in self.inputs.items() if value.is_floating_point()}
        return replace(self, inputs={**self.inputs, **{name: torch.zeros_like(x) for name, x in seen.items()}})

    def end_of_cut(self, place: int) -> int:
        """The first place from `place` on at which a sequence can be cut without cutting an image."""
        return next((end for start, end in self.spans if start < place < end), place)

    def precedes_image(self, places: Tensor) -> Tensor:
        """Whether the token after each of `places` is in the place of an image; bool of their shape."""
        precedes = torch.zeros_like(places, dtype=torch.bool)
        for start, end in self.spans:
            precedes |= (places >= start - 1) & (places < end - 1)
        return precedes
