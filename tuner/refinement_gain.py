"""What the best trial of a refinement gains over the exact solution, and whether it is kept. Knows no models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class RefinementGain:
    """The KL by which the best trial lies below the exact solution on the select split, nats per token.

    Attributes:
        mean: The mean of the paired differences over sequences; zero or less where no trial is better.
        standard_error: Its standard error; None for one sequence, which has no spread.
    """

    mean: float
    standard_error: float | None

    @classmethod
    def of(cls, exact: Sequence[float], best: Sequence[float]) -> RefinementGain:
        """The gain by the KL of each sequence; both have the same sequences."""
        differences = [kl - lower for kl, lower in zip(exact, best, strict=True)]
        error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
        return cls(fmean(differences), error)

    @property
    def is_clear(self) -> bool:
        """Whether it is above its standard error: the best of many trials is lower by chance alone."""
        return self.standard_error is not None and self.mean > self.standard_error
