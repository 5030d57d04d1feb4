"""Schemes to store a cache, sized as they are stored."""

from __future__ import annotations

import pytest

from kvtuner.evaluation.cache_scheme import CacheScheme, Fp8Scheme, RankLayout
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair
from kvtuner.search_spaces.budget import Budget

GEOMETRY = ModelGeometry(num_layers=5, num_attention_heads=8, num_kv_heads=4, head_dim=32, v_head_dim=32)


def packed(*pairs: str) -> CacheScheme:
    return CacheScheme(name="c", pairs=tuple(map(PrecisionPair.parse, pairs)), rows=GEOMETRY.row_shape(), key="c")


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 5])
def test_bytes_on_a_rank_are_those_that_the_budget_counts(tp_size: int, pp_size: int) -> None:
    ranks = RankLayout.of(GEOMETRY, tp_size=tp_size, pp_size=pp_size)
    pairs = [PrecisionPair.parse(text) for text in ("16", "K8V4", "K4V2", "2", "K2V8")]
    constraint = Budget.parse("100KiB/token").constraint(GEOMETRY, tp_size=tp_size, pp_size=pp_size)
    assert ranks.bytes_per_token(pairs) == max(constraint.stage_costs(pairs))
    assert ranks == RankLayout(constraint.shape, constraint.stages)


def test_fp8_is_judged_by_bytes_of_its_own() -> None:
    fp8, k8v8 = Fp8Scheme.of(GEOMETRY), packed(*["K8V8"] * 5)
    own = 5 * 4 * 64
    assert fp8.bytes_on(RankLayout.of(GEOMETRY)) == own < k8v8.bytes_on(RankLayout.of(GEOMETRY))
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
        assert fp8.keeps(Budget.parse(text).constraint(GEOMETRY)) == fits, text
    assert not k8v8.keeps(Budget.parse("8bpe").constraint(GEOMETRY))


def test_fp8_keeps_the_budget_in_every_stage() -> None:
    stage = 3 * 2 * 64  # the larger of two stages, half of the heads
    assert Fp8Scheme.of(GEOMETRY).bytes_on(RankLayout.of(GEOMETRY, tp_size=2, pp_size=2)) == stage
    for size, fits in ((stage, True), (stage - 1, False)):
        constraint = Budget.parse(f"{size}B/token").constraint(GEOMETRY, tp_size=2, pp_size=2)
        assert Fp8Scheme.of(GEOMETRY).keeps(constraint) == fits
