from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from kvtuner.calibration.sensitivity import Candidate, CandidateScores, LayerConstants, SensitivityTable
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PACKED_BITS, PrecisionPair
from kvtuner.report.search_rows import (
    MAX_FRONT_POINTS,
    front_points,
    pair_additivity,
    rank_correlations,
    sensitivity_rows,
)
from kvtuner.search_spaces.space import LayerChoice, LayerMenu, SearchSpace
from kvtuner.tuner.exact_solver import Front

GEOMETRY = ModelGeometry(num_layers=5, num_attention_heads=8, num_kv_heads=4, head_dim=32, v_head_dim=32)


def test_pairs_are_compared_with_the_sum_of_their_sides() -> None:
    def table(**pairs: float) -> Any:
        e_o = {"k": 0.3, "v": 0.1}
        return SimpleNamespace(
            pairs={(0, PrecisionPair.parse(name)): value for name, value in pairs.items()},
            of=lambda layer, side, bits: {"none": CandidateScores(0.0, 0.0, e_o[side], 0.0)},
        )

    found = pair_additivity(table(K2V2=0.4, K4V4=0.2, K8V8=0.36))
    assert found is not None
    assert found.num_pairs == 3
    assert (found.median, found.maximum) == (pytest.approx(0.1), pytest.approx(0.5))
    assert pair_additivity(table()) is None


@pytest.mark.parametrize("num_points", [1, 2, 399, 400, 401, 799, 800, 801, 1197, 1198, 5000])
def test_a_long_front_is_drawn_from_end_to_end_by_few_points(num_points: int) -> None:
    pair, rows = PrecisionPair.parse("K4V2"), replace(GEOMETRY, num_layers=1).row_shape()
    menu = LayerMenu(0, tuple(LayerChoice(pair, "none", "none", 1, -float(score)) for score in range(num_points)))
    numbers = np.arange(num_points)
    front = Front(numbers, -numbers.astype(float), numbers[:, None], SearchSpace((menu,), ((0,),), rows), (0,))
    drawn = [-point.predicted_kl for point in front_points([front], rows)]
    assert len(drawn) == num_points if num_points <= MAX_FRONT_POINTS else len(drawn) <= MAX_FRONT_POINTS
    assert len(drawn) > min(num_points, MAX_FRONT_POINTS) // 2
    assert (drawn[0], drawn[-1]) == (0, num_points - 1)
    assert drawn == sorted(set(drawn))
    assert front_points([front, front], rows) == ()


def table_of(scores: dict[Candidate, CandidateScores]) -> SensitivityTable:
    ones = torch.ones(GEOMETRY.num_kv_heads, GEOMETRY.head_dim, dtype=torch.float16)
    return SensitivityTable({}, replace(GEOMETRY, num_layers=1), (LayerConstants(ones, ones, ones),), scores)


def test_rank_correlations_are_of_candidates_that_have_an_isolated_kl() -> None:
    kls = {2: 3.0, 4: 2.0, 8: 1.0}
    scores = {
        Candidate(0, side, bits, "none"): CandidateScores(kl, -kl, kl**3, kl, kl)
        for side in "kv"
        for bits, kl in kls.items()
    }
    # Of these two the first has no KL; the second breaks the order of one score.
    scores[Candidate(0, "k", 2, "hadamard")] = CandidateScores(99.0, 99.0, 99.0, -99.0, None)
    scores[Candidate(0, "v", 2, "hadamard")] = CandidateScores(4.0, 0.0, 4.0, 0.5, 4.0)
    rho = {(row.score, row.side): row.rho for row in rank_correlations(table_of(scores))}
    assert rho["e_a", "k"] == pytest.approx(-1.0)
    assert rho["e_k / e_v", "v"] == pytest.approx(1.0)
    x, y = [27.0, 8.0, 1.0, 4.0], [3.0, 2.0, 1.0, 4.0]
    assert rho["e_o", "v"] == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
    assert ("e_a", "v") not in rho
    assert "fisher" not in {name for name, _ in rho}, "isolated KL is made of it"


def test_sensitivity_rows_show_the_best_transform_beside_none() -> None:
    scores = {}
    for side in "kv":
        for bits in PACKED_BITS:
            scores[Candidate(0, side, bits, "none")] = CandidateScores(0, 0, 0, 2.0 * bits, None if bits == 8 else 2.0)
            scores[Candidate(0, side, bits, "hadamard")] = CandidateScores(
                0, 0, 0, 3.0 * bits, None if bits == 8 else 1.0
            )
    rows = {(row.side, row.bits): row for row in sensitivity_rows(table_of(scores))}
    assert rows.keys() == {(side, bits) for side in "kv" for bits in PACKED_BITS}
    assert [rows["k", bits].transform for bits in PACKED_BITS] == ["hadamard", "hadamard", "hadamard", "none"]
    assert (rows["v", 2].best.kl, rows["v", 2].plain.kl) == (1.0, 2.0)
