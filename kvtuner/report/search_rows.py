"""Makes the data of a search's report of its measurements. Knows nothing of how anything is measured or drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtuner.evaluation.scheme import CacheScheme
from kvtuner.evaluation.statistics import spearman
from kvtuner.evaluation.validation import SequenceSums, kl_difference
from kvtuner.precision import PACKED_BITS, SIDES, RowShape, effective_bits, mean_bits
from kvtuner.report.layer_strip import LayerRow
from kvtuner.report.search_data import (
    FrontPoint,
    OffsetQuality,
    PairAdditivity,
    QualityRow,
    RankCorrelation,
    ScoreSet,
    SensitivityRow,
)
from kvtuner.search_spaces.space import LayerChoice, predicted_score

if TYPE_CHECKING:
    from kvtuner.calibration.sensitivity import Candidate, CandidateScores, SensitivityTable
    from kvtuner.evaluation.rank_bytes import ServingRanks
    from kvtuner.tuner.exact import Front

MAX_FRONT_POINTS = 400
Fits = Callable[[CacheScheme], bool]


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms that all configurations of a table are judged by.

    Attributes:
        ranks: The ranks that will serve, whose bytes are counted.
        fits: Whether a configuration keeps the budget.
        seed: The seed of the bootstrap.
    """

    ranks: ServingRanks
    fits: Fits
    seed: int


def layer_rows(configuration: Sequence[LayerChoice]) -> tuple[LayerRow, ...]:
    """The winner, layer by layer."""
    return tuple(
        LayerRow(layer, choice.pair.k_bits, choice.pair.v_bits, choice.k_transform, choice.v_transform)
        for layer, choice in enumerate(configuration)
    )


def sensitivity_rows(table: SensitivityTable) -> tuple[SensitivityRow, ...]:
    """Each layer, side and width under the transform with the least isolated KL (else Fisher score), and under none."""
    rows = []
    for layer in range(table.geometry.num_layers):
        for side in SIDES:
            for bits in PACKED_BITS:
                scores = table.of(layer, side, bits)
                name = min(scores, key=lambda n: _order(scores[n]))
                rows.append(SensitivityRow(layer, side, bits, name, _set(scores[name]), _set(scores["none"])))
    return tuple(rows)


def _order(scores: CandidateScores) -> tuple[float, float]:
    return (math.inf if scores.kl is None else scores.kl, scores.fisher)


def _set(scores: CandidateScores) -> ScoreSet:
    return ScoreSet(scores.kl, scores.fisher, scores.e_o)


def rank_correlations(table: SensitivityTable) -> tuple[RankCorrelation, ...]:
    """Spearman's rho of each cheap score with isolated KL, over all candidates that have both."""
    cheap: Mapping[str, Callable[[CandidateScores], float]] = {
        "fisher": lambda s: s.fisher,
        "e_o": lambda s: s.e_o,
        "e_k / e_v": lambda s: s.e_self,
        "e_a": lambda s: s.e_a,
    }
    rows = []
    for name, get in cheap.items():
        for side in SIDES:
            if name == "e_a" and side == "v":
                continue
            known: list[tuple[Candidate, CandidateScores]] = [
                (c, s) for c, s in table.scores.items() if c.side == side and s.kl is not None
            ]
            x = np.asarray([get(scores) for _, scores in known], dtype=np.float64)
            y = np.asarray([scores.kl for _, scores in known], dtype=np.float64)
            rows.append(RankCorrelation(name, side, spearman(x, y) if len(known) > 1 else None))
    return tuple(rows)


def pair_additivity(table: SensitivityTable) -> PairAdditivity | None:
    """How far the measured e_o of K/V pairs is from the sum of its sides'; None where no pairs were measured."""
    deviations = []
    for (layer, pair), measured in table.pairs.items():
        added = table.of(layer, "k", pair.k_bits)["none"].e_o + table.of(layer, "v", pair.v_bits)["none"].e_o
        if added > 0:
            deviations.append(abs(measured - added) / added)
    if not deviations:
        return None
    return PairAdditivity(len(deviations), float(np.median(deviations)), max(deviations))


def front_points(fronts: Sequence[Front], shape: RowShape) -> tuple[FrontPoint, ...]:
    """The exact front of a model on one pipeline stage; none where stages were solved apart."""
    if len(fronts) != 1:
        return ()
    (front,) = fronts
    last = len(front) - 1
    step = max(1, -(-last // (MAX_FRONT_POINTS - 1)))
    points = []
    for index in (*range(0, last, step), last):
        configuration = front.configuration(index)
        pairs = [choice.pair for choice in configuration]
        bits = float(effective_bits(pairs, shape)), float(mean_bits(pairs, shape))
        points.append(FrontPoint(*bits, predicted_score(configuration)))
    return tuple(points)


def quality_of(
    offsets: str,
    positions: str,
    winner: tuple[CacheScheme, SequenceSums],
    baselines: Sequence[tuple[CacheScheme, SequenceSums]],
    reference: SequenceSums,
    *,
    terms: Terms,
) -> OffsetQuality:
    """The winner beside its baselines at one kind of offsets."""
    winner_sums = winner[1]
    return OffsetQuality(
        offsets=offsets,
        positions=positions,
        reference_perplexity=reference.perplexity,
        winner=_quality_row(*winner, None, terms),
        baselines=tuple(_quality_row(scheme, sums, winner_sums, terms) for scheme, sums in baselines),
    )


def _quality_row(scheme: CacheScheme, sums: SequenceSums, winner: SequenceSums | None, terms: Terms) -> QualityRow:
    effective = scheme.effective_bits
    assert effective is not None
    return QualityRow(
        name=scheme.name,
        transforms=scheme.has_transforms,
        mean_bits=scheme.mean_bits,
        effective_bits=effective,
        bytes_per_token=scheme.bytes_on(terms.ranks),
        kl=sums.kl_interval(terms.seed),
        kl_p99=sums.kl_p99,
        top1=sums.top1_agreement,
        perplexity=sums.perplexity,
        fits_budget=terms.fits(scheme),
        difference=None if winner is None else kl_difference(sums, winner, terms.seed),
    )
