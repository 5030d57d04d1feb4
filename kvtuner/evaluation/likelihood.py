"""Teacher-forced results of several ways to store the cache as cells of an evaluation. Knows nothing of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtuner.evaluation.statistics import Interval, bootstrap_mean, paired_difference
from kvtuner.exported_configs.evaluation import Cell, Difference, Measure, Result

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from kvtuner.evaluation.validation import SequenceSums

    Sums = tuple[NDArray[np.float64], NDArray[np.int64]]


def likelihood_cells(
    measured: Mapping[str, SequenceSums], reference: str, *, num_tokens: int, position: int, seed: int
) -> list[Cell]:
    """KL, top-1 agreement and negative log-likelihood at one kind of positions, each beside every other way.

    Args:
        measured: by the name of the way; the unquantized one among them.
        reference: its name. KL and agreement are from it, so that it has neither of its own.
        num_tokens: of a sequence.
        position: of its first token.
        seed: of the intervals.
    """
    cells = []
    measures: tuple[Measure, ...] = ("kl_nats_per_token", "top1_agreement", "nll_nats_per_token")
    for measure in measures:
        ways = {
            name: _sums(sums, measure)
            for name, sums in measured.items()
            if name != reference or measure == "nll_nats_per_token"
        }
        results = tuple(
            Result(
                subject=name,
                **_bounds(bootstrap_mean(*sums, seed=seed)),
                differences=tuple(
                    Difference(
                        other=other,
                        **_bounds(paired_difference(sums[0], theirs[0], sums[1], seed=seed)),
                        p_value=None,
                    )
                    for other, theirs in ways.items()
                    if other != name
                ),
            )
            for name, sums in ways.items()
        )
        place = {"num_tokens": num_tokens, "position": position, "count": int(next(iter(ways.values()))[1].sum())}
        cells.append(Cell(level="likelihood", measure=measure, task=None, flag=None, results=results, **place))
    return cells


def _sums(sums: SequenceSums, measure: Measure) -> Sums:
    values = {"kl_nats_per_token": sums.kl, "top1_agreement": sums.agree, "nll_nats_per_token": sums.nll}[measure]
    counts = sums.nll_count if measure == "nll_nats_per_token" else sums.count
    return np.asarray(values, dtype=np.float64), np.asarray(counts, dtype=np.int64)


def _bounds(interval: Interval) -> dict[str, float]:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}
