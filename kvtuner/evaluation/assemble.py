"""From measurements to what a report shows: bookkeeping. Knows nothing of how anything was measured or is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvtuner.calibration.sensitivity import SIDES, Candidate, Scores, SensitivityTable
from kvtuner.evaluation.report_data import (
    FrontPoint,
    LayerRow,
    OffsetQuality,
    QualityRow,
    RankCorrelation,
    ScoreSet,
    SensitivityRow,
)
from kvtuner.evaluation.statistics import spearman
from kvtuner.evaluation.validation import FP8, Contestant, SequenceSums, kl_difference
from kvtuner.precision import PACKED_BITS, PrecisionPair, RowShape, bytes_per_token, effective_bits, mean_bits
from kvtuner.search_spaces.space import Choice, predicted_score

if TYPE_CHECKING:
    from kvtuner.tuner.exact import Front

MAX_FRONT_POINTS = 400
Fits = Callable[[Sequence[PrecisionPair]], bool]


def layer_rows(configuration: Sequence[Choice]) -> tuple[LayerRow, ...]:
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


def _order(scores: Scores) -> tuple[float, float]:
    return (math.inf if scores.kl is None else scores.kl, scores.fisher)


def _set(scores: Scores) -> ScoreSet:
    return ScoreSet(scores.kl, scores.fisher, scores.e_o)


def rank_correlations(table: SensitivityTable) -> tuple[RankCorrelation, ...]:
    """Spearman's rho of each cheap score with isolated KL, over all candidates that have both."""
    cheap: Mapping[str, Callable[[Scores], float]] = {
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
            known: list[tuple[Candidate, Scores]] = [
                (c, s) for c, s in table.scores.items() if c.side == side and s.kl is not None
            ]
            x = np.asarray([get(scores) for _, scores in known], dtype=np.float64)
            y = np.asarray([scores.kl for _, scores in known], dtype=np.float64)
            rows.append(RankCorrelation(name, side, spearman(x, y) if len(known) > 1 else None))
    return tuple(rows)


def front_points(fronts: Sequence[Front], shape: RowShape) -> tuple[FrontPoint, ...]:
    """The exact front of a model on one pipeline stage; none where stages were solved apart."""
    if len(fronts) != 1:
        return ()
    (front,) = fronts
    step = max(1, len(front) // MAX_FRONT_POINTS)
    points = []
    for index in range(0, len(front), step):
        configuration = front.configuration(index)
        pairs = [choice.pair for choice in configuration]
        bits = float(effective_bits(pairs, shape)), float(mean_bits(pairs, shape))
        points.append(FrontPoint(*bits, predicted_score(configuration)))
    return tuple(points)


def quality_of(
    offsets: str,
    positions: str,
    winner: tuple[Contestant, SequenceSums],
    baselines: Sequence[tuple[Contestant, SequenceSums]],
    reference: SequenceSums,
    *,
    shape: RowShape,
    fits: Fits,
    seed: int,
) -> OffsetQuality:
    """The winner beside its baselines at one kind of offsets."""
    winner_sums = winner[1]
    return OffsetQuality(
        offsets=offsets,
        positions=positions,
        reference_perplexity=reference.perplexity,
        winner=_quality_row(*winner, None, shape=shape, fits=fits, seed=seed),
        baselines=tuple(
            _quality_row(contestant, sums, winner_sums, shape=shape, fits=fits, seed=seed)
            for contestant, sums in baselines
        ),
    )


def _quality_row(
    contestant: Contestant,
    sums: SequenceSums,
    winner: SequenceSums | None,
    *,
    shape: RowShape,
    fits: Fits,
    seed: int,
) -> QualityRow:
    pairs = contestant.pairs
    is_fp8 = contestant.name == FP8
    elements = len(pairs) * shape.num_kv_heads * (shape.head_dim + shape.v_head_dim)
    return QualityRow(
        name=contestant.name,
        transforms=contestant.transforms,
        mean_bits=float(mean_bits(pairs, shape)),
        effective_bits=8.0 if is_fp8 else float(effective_bits(pairs, shape)),
        bytes_per_token=elements if is_fp8 else bytes_per_token(pairs, shape),
        kl=sums.kl_interval(seed),
        kl_p99=sums.kl_p99,
        top1=sums.top1_agreement,
        perplexity=sums.perplexity,
        fits_budget=fits(pairs),
        difference=None if winner is None else kl_difference(sums, winner, seed),
    )
