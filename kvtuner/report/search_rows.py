"""Makes the data of a search's report of its measurements. Knows nothing of how anything is measured or drawn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtuner.evaluation.statistics import spearman
from kvtuner.precision import effective_bits, mean_bits
from kvtuner.report.layer_strip import LayerRow
from kvtuner.report.search_data import (
    FrontPoint,
    PairAdditivity,
    RankCorrelation,
    ScoreSet,
    SensitivityRow,
)
from kvtuner.search_spaces.space import pairs_of, predicted_score

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtuner.calibration.sensitivity import CandidateScores, SensitivityTable
    from kvtuner.precision import RowShape
    from kvtuner.search_spaces.space import LayerChoice
    from kvtuner.tuner.exact_solver import Front

MAX_FRONT_POINTS: Final = 400
_CHEAP_SCORES: Final[dict[str, Callable[[CandidateScores], float]]] = {
    "e_o": lambda scores: scores.e_o,
    "e_k / e_v": lambda scores: scores.e_self,
    "e_a": lambda scores: scores.e_a,
}


def layer_rows(configuration: Sequence[LayerChoice], ids: Sequence[int]) -> tuple[LayerRow, ...]:
    """The winner, layer by layer with their ids."""
    return tuple(
        LayerRow(layer, choice.pair.k_bits, choice.pair.v_bits, choice.k_transform, choice.v_transform)
        for layer, choice in zip(ids, configuration, strict=True)
    )


def sensitivity_rows(table: SensitivityTable) -> tuple[SensitivityRow, ...]:
    """Each layer, side and width under the transform with the least isolated KL (else Fisher score), and under none."""
    rows = []
    for layer in table.geometry.ids:
        for side in table.geometry.sides:
            for bits in table.widths:
                scores = table.of(layer, side, bits)
                best = min(scores, key=lambda name: (_kl_or_infinity(scores[name]), scores[name].fisher))
                rows.append(SensitivityRow(layer, side, bits, best, *map(_score_set, (scores[best], scores["none"]))))
    return tuple(rows)


def rank_correlations(table: SensitivityTable) -> tuple[RankCorrelation, ...]:
    """Spearman's rho of each error with isolated KL, over all candidates that have both; that is made of Fisher's."""
    rows = []
    for name, score in _CHEAP_SCORES.items():
        for side in table.geometry.sides[: 1 if name == "e_a" else 2]:
            scores = [s for candidate, s in table.scores.items() if candidate.side == side and s.kl is not None]
            x = np.asarray([score(s) for s in scores], dtype=np.float64)
            y = np.asarray([s.kl for s in scores], dtype=np.float64)
            rows.append(RankCorrelation(name, side, spearman(x, y) if len(scores) > 1 else None))
    return tuple(rows)


def pair_additivity(table: SensitivityTable) -> PairAdditivity | None:
    """The distance of the measured e_o of K/V pairs from the sum of their sides'; None where no pairs were measured."""
    deviations = []
    for (layer, pair), measured in table.pairs.items():
        added = table.of(layer, "k", pair.k_bits)["none"].e_o + table.of(layer, "v", pair.v_bits)["none"].e_o
        if added > 0:
            deviations.append(abs(measured - added) / added)
    return PairAdditivity(len(deviations), float(np.median(deviations)), max(deviations)) if deviations else None


def front_points(fronts: Sequence[Front], shape: RowShape) -> tuple[FrontPoint, ...]:
    """The exact front of a model on one pipeline stage; none where stages were solved apart."""
    if len(fronts) != 1:
        return ()
    (front,) = fronts
    last = len(front) - 1
    # The ceiling of the quotient; the last point, all at 16 bits, always stays.
    step = max(1, -(-last // (MAX_FRONT_POINTS - 1)))
    points = []
    for index in (*range(0, last, step), last):
        configuration = front.configuration(index)
        pairs = pairs_of(configuration)
        bits = float(effective_bits(pairs, shape)), float(mean_bits(pairs, shape))
        points.append(FrontPoint(*bits, predicted_score(configuration)))
    return tuple(points)


def _kl_or_infinity(scores: CandidateScores) -> float:
    return math.inf if scores.kl is None else scores.kl


def _score_set(scores: CandidateScores) -> ScoreSet:
    return ScoreSet(scores.kl, scores.fisher, scores.e_o)
