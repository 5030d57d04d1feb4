from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtuner.calibration.sensitivity import Scores
from kvtuner.evaluation.assemble import keeps_budget, pair_additivity, rank_bytes
from kvtuner.evaluation.ranks import Ranks
from kvtuner.evaluation.validation import Contestant, fp8_contestant
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair
from kvtuner.search_spaces.budget import Budget

GEOMETRY = ModelGeometry(num_layers=5, num_attention_heads=8, num_kv_heads=4, head_dim=32, v_head_dim=32)


def contestant(*pairs: str) -> Contestant:
    return Contestant("c", False, tuple(map(PrecisionPair.parse, pairs)), {}, "c")


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 5])
def test_bytes_on_a_rank_are_those_that_the_budget_counts(tp_size: int, pp_size: int) -> None:
    ranks = Ranks.of(GEOMETRY, tp_size=tp_size, pp_size=pp_size)
    pairs = [PrecisionPair.parse(text) for text in ("16", "K8V4", "K4V2", "2", "K2V8")]
    constraint = Budget.parse("100KiB/token").constraint(GEOMETRY, tp_size=tp_size, pp_size=pp_size)
    assert ranks.bytes_per_token(pairs) == max(constraint.stage_costs(pairs))
    assert ranks == Ranks(constraint.shape, constraint.stages)


def test_fp8_is_judged_by_bytes_of_its_own() -> None:
    fp8, k8v8 = fp8_contestant(5), contestant(*["K8V8"] * 5)
    own = 5 * 4 * 64
    assert rank_bytes(fp8, Ranks.of(GEOMETRY)) == own < rank_bytes(k8v8, Ranks.of(GEOMETRY))
    for text, fits in (
        (f"{own}B/token", True),
        (f"{own - 1}B/token", False),
        ("8bpe", True),
        ("7.9bpe", False),
        ("50%", True),
        ("49%", False),
        ("8bit", True),
        ("7bit", False),
    ):
        assert keeps_budget(Budget.parse(text).constraint(GEOMETRY), fp8) == fits, text
    assert not keeps_budget(Budget.parse("8bpe").constraint(GEOMETRY), k8v8)


def test_fp8_keeps_the_budget_in_every_stage() -> None:
    stage = 3 * 2 * 64  # the larger of two stages, half of the heads
    assert rank_bytes(fp8_contestant(5), Ranks.of(GEOMETRY, tp_size=2, pp_size=2)) == stage
    for size, fits in ((stage, True), (stage - 1, False)):
        constraint = Budget.parse(f"{size}B/token").constraint(GEOMETRY, tp_size=2, pp_size=2)
        assert keeps_budget(constraint, fp8_contestant(5)) == fits


def test_pairs_are_compared_with_the_sum_of_their_sides() -> None:
    def table(**pairs: float) -> Any:
        e_o = {"k": 0.3, "v": 0.1}
        return SimpleNamespace(
            pairs={(0, PrecisionPair.parse(name)): value for name, value in pairs.items()},
            of=lambda layer, side, bits: {"none": Scores(0.0, 0.0, e_o[side], 0.0)},
        )

    found = pair_additivity(table(K2V2=0.4, K4V4=0.2, K8V8=0.36))
    assert found is not None
    assert found.num_pairs == 3
    assert (found.median, found.maximum) == (pytest.approx(0.1), pytest.approx(0.5))
    assert pair_additivity(table()) is None
