"""Cells of an evaluation: one metric of one task at one place, for all schemes. Knows nothing of models."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from kvtuner.evaluation.scheme import REFERENCE
from kvtuner.exported_configs.profile.evaluation_record import PROFILE, Cell, PairedDifference, Result

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtuner.evaluation.paired import PairedScores
    from kvtuner.exported_configs.profile.evaluation_record import Flag, Level, Measure


@dataclass(frozen=True, slots=True)
class Place:
    """The place where a metric is measured.

    Attributes:
        num_tokens: The tokens of a context, or of a sequence; None where they have a length of their own.
        task: The task's name and metric, for level ``task``.
        flag: Why schemes cannot be told apart there, if it is known before anything is scored.
        failures: The answers, or tokens, that never came, by the name of the scheme.
    """

    level: Level
    num_tokens: int | None = None
    position: int = 0
    task: str | None = None
    flag: Flag | None = None
    failures: Mapping[str, int] = field(default_factory=dict)


def make_cell(measure: Measure, place: Place, scores: Mapping[str, PairedScores], seed: int) -> Cell:
    """The cell of one metric: every scheme's result by name, and the profile's difference from each other scheme."""
    profile = scores[PROFILE]
    others = {name: other for name, other in scores.items() if name != PROFILE}
    return Cell(
        level=place.level,
        measure=measure,
        task=place.task,
        num_tokens=place.num_tokens,
        position=place.position,
        units=len(profile.counts),
        count=int(profile.counts.sum()),
        flag=place.flag or (scores[REFERENCE].flag if REFERENCE in scores else None),
        results=tuple(
            Result(subject=name, **asdict(each.interval(seed)), failures=place.failures.get(name, 0))
            for name, each in scores.items()
        ),
        differences=tuple(
            PairedDifference(
                other=name,
                **asdict(profile.minus(other, seed)),
                p_value=profile.p_value(other, seed),
                mcnemar=profile.mcnemar(other),
            )
            for name, other in others.items()
        ),
    )
