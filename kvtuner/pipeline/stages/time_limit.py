"""The time that a search may take: a refinement gets what the rest leaves. Knows no models."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MEASURED: Final = "uniform table"
"""The phase that runs quantized configurations as those after it do."""


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The time that a search may take.

    Attributes:
        seconds: The limit.
        ahead: The phases of the search in their order, with their forward passes.
        began: The time of `clock` when the search began.
    """

    seconds: float
    ahead: Sequence[tuple[str, float]]
    began: float = field(default_factory=time.monotonic)
    clock: Callable[[], float] = time.monotonic

    def refinement(self, name: str, passes: Mapping[str, float], seconds: Mapping[str, float]) -> RefinementTime:
        """The time that the refinement of that phase has.

        What comes after it takes as long for a forward pass as the uniform table did, whose forward `passes` and
        `seconds` are given by phase, or where that was measured before, as all that ran. Refinements that come share
        what is left.
        """
        names = [phase for phase, _ in self.ahead]
        coming = self.ahead[names.index(name) :]
        is_refinement = [phase.startswith("refinement ") for phase, _ in coming]
        rest = sum(n for (_, n), is_trials in zip(coming, is_refinement, strict=True) if not is_trials)
        measured = [MEASURED] if passes.get(MEASURED) else list(passes)
        num_passes = sum(passes[phase] for phase in measured)
        per_pass = sum(seconds[phase] for phase in measured) / num_passes if num_passes else 0.0
        left = self.seconds - (self.clock() - self.began)
        share = (left - rest * per_pass) / sum(is_refinement)
        return RefinementTime(max(0.0, share), rest * per_pass, self.clock() + share, self.clock)


@dataclass(frozen=True, slots=True)
class RefinementTime:
    """The time that a refinement has.

    Attributes:
        seconds: The time from its start.
        rest: The seconds that are kept for what comes after it, other refinements left out.
        end: The time of `clock` at which it is over.
    """

    seconds: float
    rest: float
    end: float
    clock: Callable[[], float] = time.monotonic

    def is_over(self) -> bool:
        """Whether the time has passed."""
        return self.clock() >= self.end
