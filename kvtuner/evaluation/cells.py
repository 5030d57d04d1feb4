"""Teacher-forced results of several ways to store the cache as cells of an evaluation. Knows nothing of models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvtuner.evaluation.paired import sign_flip
from kvtuner.evaluation.statistics import Interval, bootstrap_mean, paired_difference
from kvtuner.exported_configs.profile.evaluation_record import PROFILE, Cell, Measure, PairedDifference, Result

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from kvtuner.evaluation.validation import SequenceSums
    from kvtuner.exported_configs.profile.evaluation_record import Flag

    Sums = tuple[NDArray[np.float64], NDArray[np.int64]]


def likelihood_cells(
    measured: Mapping[str, SequenceSums], reference: str, *, num_tokens: int, position: int, seed: int
) -> list[Cell]:
    """KL, top-1 agreement and negative log-likelihood at one kind of positions, the profile's beside all others'.

    Args:
        measured: by the name of the way; the unquantized one and the profile among them.
        reference: its name. KL and agreement are from it, so that it has neither of its own.
        num_tokens: of a sequence.
        position: of its first token.
        seed: of the intervals.
    """
    measures: tuple[Measure, ...] = ("kl_nats_per_token", "top1_agreement", "nll_nats_per_token")
    place = Place(num_tokens, position, seed)
    cells = []
    for measure in measures:
        ways = {
            name: _sums(sums, measure)
            for name, sums in measured.items()
            if name != reference or measure == "nll_nats_per_token"
        }
        cells.append(mean_cell(measure, ways, place))
    return cells


@dataclass(frozen=True, slots=True)
class Place:
    """Where likelihoods were measured, and how their intervals are drawn.

    Attributes:
        num_tokens: of a sequence.
        position: of its first token.
        seed: of the intervals.
        flag: why ways cannot be told apart there.
        failures: by the name of the way, tokens whose scores never came.
    """

    num_tokens: int
    position: int
    seed: int
    flag: Flag | None = None
    failures: Mapping[str, int] = field(default_factory=dict)


def mean_cell(measure: Measure, ways: Mapping[str, Sums], place: Place) -> Cell:
    """Means over tokens, whole sequences resampled, the profile's beside all others'.

    Args:
        measure: which.
        ways: by name, sums and numbers of tokens of every sequence; numbers alike for all ways.
        place: where.
    """
    mine, counts = ways[PROFILE]
    return Cell(
        level="likelihood",
        measure=measure,
        task=None,
        num_tokens=place.num_tokens,
        position=place.position,
        units=len(mine),
        count=int(counts.sum()),
        flag=place.flag,
        results=tuple(
            Result(subject=name, **bounds(bootstrap_mean(*sums, seed=place.seed)), failures=place.failures.get(name, 0))
            for name, sums in ways.items()
        ),
        differences=tuple(
            PairedDifference(
                other=other,
                **bounds(paired_difference(mine, theirs, counts, seed=place.seed)),
                p_value=sign_flip(mine - theirs, place.seed),
                mcnemar=None,
            )
            for other, (theirs, _) in ways.items()
            if other != PROFILE
        ),
    )


def bounds(interval: Interval) -> dict[str, float]:
    """Fields of a result or a difference."""
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _sums(sums: SequenceSums, measure: Measure) -> Sums:
    values = {"kl_nats_per_token": sums.kl, "top1_agreement": sums.agree, "nll_nats_per_token": sums.nll}[measure]
    counts = sums.nll_count if measure == "nll_nats_per_token" else sums.count
    return np.asarray(values, dtype=np.float64), np.asarray(counts, dtype=np.int64)
