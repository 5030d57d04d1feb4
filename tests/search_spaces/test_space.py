"""Menus against dominance spelt out pair by pair, and configurations against the table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from kvtuner.calibration.sensitivity import Candidate, CandidateScores, SensitivityTable
from kvtuner.errors import RunFolderError, SearchSpaceError
from kvtuner.precision import ALL_BITS, PACKED_BITS, SEARCHED_BITS, PrecisionPair, RowShape
from kvtuner.search_spaces.space import (
    LayerChoice,
    LayerMenu,
    SearchSpace,
    all_pairs,
    build_space,
    configuration_from_pairs,
    pairs_of,
    predicted_score,
    uniform,
)

Table = Callable[..., SensitivityTable]
WIDTHS = (*SEARCHED_BITS, 16)
PAIRS = [PrecisionPair(k, v) for k, v in product(WIDTHS, WIDTHS)]
NATIVE = PrecisionPair(16, 16)


def best_of(table: SensitivityTable, layer: int, side: str, bits: int) -> tuple[float, str]:
    """The least KL of a side and the transform that has it, by going through the whole table."""
    if bits == 16:
        return 0.0, "none"
    return min(
        (scores.kl if scores.kl is not None else math.inf, c.transform)
        for c, scores in table.scores.items()
        if (c.layer, c.side, c.bits) == (layer, side, bits)
    )


def every_choice(table: SensitivityTable, layer: int, shape: RowShape) -> list[LayerChoice]:
    choices = []
    for pair in PAIRS:
        (k_score, k_name), (v_score, v_name) = (
            best_of(table, layer, side, bits) for side, bits in (("k", pair.k_bits), ("v", pair.v_bits))
        )
        choices.append(LayerChoice(pair, k_name, v_name, shape.pair_bytes(pair), k_score + v_score))
    return choices


def payload(pair: PrecisionPair, shape: RowShape) -> int:
    return pair.k_bits * shape.head_dim + pair.v_bits * shape.v_head_dim


@pytest.mark.parametrize("geometry", [{}, {"num_kv_heads": 1, "head_dim": 32, "v_head_dim": 16}, {"v_head_dim": 96}])
@pytest.mark.parametrize("seed", range(5))
def test_menus_are_exactly_the_choices_that_none_dominates(
    random_table: Table, seed: int, geometry: dict[str, int]
) -> None:
    table = random_table(4, seed, **geometry)
    shape = table.geometry.row_shape()
    for menu in build_space(table, "kl", shape).menus:
        points = [(c, payload(c.pair, shape)) for c in every_choice(table, menu.layer, shape)]
        expected = {
            c
            for c, bits in points
            if not any(
                d is not c and d.cost_bytes <= c.cost_bytes and other <= bits and d.score <= c.score
                for d, other in points
            )
        }
        assert set(menu.choices) == expected
        assert list(menu.choices) == sorted(menu.choices, key=lambda c: c.cost_bytes)


def test_without_padding_scores_descend_strictly_as_bytes_grow(random_table: Table) -> None:
    table = random_table(6, 3)
    for menu in build_space(table, "kl", table.geometry.row_shape()).menus:
        for cheap, dear in zip(menu.choices, menu.choices[1:], strict=False):
            assert cheap.cost_bytes < dear.cost_bytes
            assert cheap.score > dear.score
        assert menu.pairs[0] == PrecisionPair(2, 2)
        assert menu.choices[-1].score == 0.0


def test_padding_alone_does_not_prune_a_pair_of_less_payload(make_table: Table) -> None:
    # One head of 32: K8V2 and K4V4 both take 64 bytes, so a choice by bytes alone would hide K4V4 from bit budgets.
    kl = {("k", 2): 9.0, ("k", 4): 3.0, ("k", 8): 1.0, ("v", 2): 1.0, ("v", 4): 0.9, ("v", 8): 0.8}
    table = make_table(
        1, lambda c: CandidateScores(0, 0, 0, 0, kl[c.side, c.bits]), num_kv_heads=1, head_dim=32, v_head_dim=32
    )
    shape = table.geometry.row_shape()
    choices = {c.pair: c for c in build_space(table, "kl", shape).menus[0].choices}
    assert choices[PrecisionPair(8, 2)].cost_bytes == choices[PrecisionPair(4, 4)].cost_bytes
    assert choices[PrecisionPair(8, 2)].score < choices[PrecisionPair(4, 4)].score


def test_a_dearer_pair_of_the_same_score_is_pruned_and_stood_for_by_one_of_no_more_payload(make_table: Table) -> None:
    # Of one head of 32 channels K8V2 takes the bytes of K4V4, scores better, and has more payload.
    kl = {("k", 2): 9.0, ("k", 4): 3.0, ("k", 8): 1.0, ("v", 2): 1.0, ("v", 4): 1.0, ("v", 8): 1.0}
    table = make_table(
        1, lambda c: CandidateScores(0, 0, 0, 0, kl[c.side, c.bits]), num_kv_heads=1, head_dim=32, v_head_dim=32
    )
    shape = table.geometry.row_shape()
    space = build_space(table, "kl", shape)
    assert PrecisionPair(4, 4) not in space.menus[0].pairs, "four bits of values gain nothing"
    found = space.configuration(space.project(uniform(table, PrecisionPair(4, 4), "kl", shape, transforms=True)))
    assert pairs_of(found) == [PrecisionPair(4, 2)]


def test_tensor_parallelism_changes_the_bytes_of_the_menu(random_table: Table) -> None:
    table = random_table(2, 0)
    shapes = [table.geometry.row_shape(tp_size=tp_size) for tp_size in (1, 2)]
    menus = [build_space(table, "kl", shape).menus[0] for shape in shapes]
    whole, rank = ({choice.pair: choice.cost_bytes for choice in menu.choices} for menu in menus)
    pair = PrecisionPair(2, 2)
    # Two heads: 2 * (16 + 4) = 40 -> 48 bytes a side; one head: 20 -> 32.
    assert (whole[pair], rank[pair]) == (96, 64)
    assert 2 * rank[pair] > whole[pair]


def test_each_score_has_its_own_menu(random_table: Table) -> None:
    table = random_table(3, 1)
    menus = [build_space(table, score, table.geometry.row_shape()).menus for score in ("kl", "fisher", "e_o")]
    assert len(set(menus)) == 3


def test_forced_layers_have_one_choice_with_its_best_transforms(random_table: Table) -> None:
    table = random_table(3, 2)
    shape = table.geometry.row_shape()
    space = build_space(table, "kl", shape, keep={1: PrecisionPair(8, 2)})
    (choice,) = space.menus[1].choices
    assert choice == next(c for c in every_choice(table, 1, shape) if c.pair == PrecisionPair(8, 2))
    assert len(space.menus[0].choices) > 1


def test_forcing_a_layer_that_the_model_lacks_is_refused(random_table: Table) -> None:
    table = random_table(3, 2)
    with pytest.raises(SearchSpaceError, match=r"layers 0-2, so layer 3"):
        build_space(table, "kl", table.geometry.row_shape(), keep={3: NATIVE})


def test_a_score_that_is_not_finite_names_its_layer(make_table: Table) -> None:
    def score(candidate: Candidate) -> CandidateScores:
        is_bad = (candidate.layer, candidate.side, candidate.bits) == (1, "v", 4)
        return CandidateScores(0.1, 0.1, 0.1, 0.1, math.inf if is_bad else 0.1)

    table = make_table(2, score)
    with pytest.raises(SearchSpaceError, match="layer 1 v4 is inf"):
        build_space(table, "kl", table.geometry.row_shape())


def test_a_score_that_was_not_measured_is_an_error(make_table: Table) -> None:
    table = make_table(2, lambda _: CandidateScores(0.1, 0.1, 0.1, 0.1))
    with pytest.raises(RunFolderError, match="'kl'"):
        build_space(table, "kl", table.geometry.row_shape())


def test_groups_tie_layers_of_close_e_o_within_their_stage(make_table: Table) -> None:
    def score(candidate: Candidate) -> CandidateScores:
        # Layers 0, 1, 3 and 4 are alike, layer 2 is not; KL differs wildly everywhere.
        e_o = (0.3 if candidate.layer == 2 else 0.1 + 0.001 * candidate.layer) / candidate.bits
        return CandidateScores(0, 0, e_o, 0, 10.0**candidate.layer / candidate.bits)

    table = make_table(5, score)
    shape = table.geometry.row_shape()
    assert build_space(table, "kl", shape, groups=True).groups == ((0, 1, 3, 4), (2,))
    staged = build_space(table, "kl", shape, groups=True, stages=[range(3), range(3, 5)])
    assert staged.groups == ((0, 1), (2,), (3, 4))
    kept = build_space(table, "kl", shape, groups=True, keep={0: NATIVE, 1: NATIVE})
    assert kept.groups == ((0,), (1,), (2,), (3, 4))


def test_configuration_of_indices_and_back(random_table: Table) -> None:
    table = random_table(4, 5)
    space = build_space(table, "kl", table.geometry.row_shape())
    indices = tuple(size - 1 - (i % 2) for i, size in enumerate(space.sizes))
    configuration = space.configuration(indices)
    assert [c.pair for c in configuration] == [m.choices[i].pair for m, i in zip(space.menus, indices, strict=True)]
    assert space.project(configuration) == indices


def test_projection_replaces_pruned_pairs_by_better_ones_that_cost_no_more(random_table: Table) -> None:
    num_replaced = 0
    for seed in range(10):
        table = random_table(4, seed)
        shape = table.geometry.row_shape()
        space = build_space(table, "kl", shape)
        for pair in PAIRS:
            uniform_configuration = uniform(table, pair, "kl", shape, transforms=True)
            projected = space.configuration(space.project(uniform_configuration))
            for before, after, menu in zip(uniform_configuration, projected, space.menus, strict=True):
                assert after in menu.choices
                assert after.cost_bytes <= before.cost_bytes
                assert payload(after.pair, shape) <= payload(before.pair, shape)
                assert after.score <= before.score
                assert (after == before) == (before.pair in menu.pairs)
                num_replaced += after != before
    assert num_replaced


def test_projection_keeps_forced_layers_and_ties(random_table: Table) -> None:
    table = random_table(3, 0)
    shape = table.geometry.row_shape()
    forced = tuple(choice for choice in every_choice(table, 0, shape) if choice.pair == NATIVE)
    free = [tuple(every_choice(table, layer, shape)) for layer in (1, 2)]
    tied = SearchSpace(tuple(LayerMenu(i, choices) for i, choices in enumerate([forced, *free])), ((0,), (1, 2)), shape)
    pairs = [PrecisionPair(2, 2), PrecisionPair(4, 4), PrecisionPair(8, 2)]
    given = tied.configuration(tied.project(configuration_from_pairs(table, pairs, "kl", shape)))
    assert given[0].pair == NATIVE
    assert given[1].pair == given[2].pair
    assert given[1].cost_bytes <= shape.pair_bytes(PrecisionPair(4, 4))


def test_between_keeps_what_lies_between_two_configurations(random_table: Table) -> None:
    table = random_table(3, 1)
    shape = table.geometry.row_shape()
    menus = tuple(LayerMenu(layer, tuple(every_choice(table, layer, shape))) for layer in range(3))
    space = SearchSpace(menus, ((0,), (1,), (2,)), shape)
    low = configuration_from_pairs(table, [PrecisionPair(2, 4)] * 3, "kl", shape)
    high = configuration_from_pairs(table, [PrecisionPair(8, 8)] * 3, "kl", shape)
    for menu in space.between(low, high).menus:
        assert set(menu.pairs) == {PrecisionPair(k, v) for k in (2, 4, 8) for v in (4, 8)}
    assert space.between() == space
    with pytest.raises(SearchSpaceError, match="layer 0 has no choice from K8V8 to K2V4"):
        space.between(high, low)


def test_uniforms_have_one_pair_with_transforms_or_without(random_table: Table) -> None:
    table = random_table(3, 4)
    shape, pair = table.geometry.row_shape(), PrecisionPair(4, 16)
    best = uniform(table, pair, "kl", shape, transforms=True)
    plain = uniform(table, pair, "kl", shape, transforms=False)
    assert pairs_of(best) == pairs_of(plain) == [pair] * 3
    assert {(c.k_transform, c.v_transform) for c in plain} == {("none", "none")}
    assert predicted_score(best) == pytest.approx(sum(best_of(table, layer, "k", 4)[0] for layer in range(3)))
    expected = sum(table.scores[Candidate(layer, "k", 4, "none")].kl or 0 for layer in range(3))
    assert predicted_score(plain) == pytest.approx(expected)
    assert predicted_score(best) < predicted_score(plain)


def test_a_baseline_whose_score_was_not_measured_says_so(make_table: Table) -> None:
    table = make_table(2, lambda c: CandidateScores(0, 0, 0, 0, None if c.transform == "none" else 0.5))
    plain = uniform(table, PrecisionPair(4, 4), "kl", table.geometry.row_shape(), transforms=False)
    assert math.isnan(predicted_score(plain))


def test_pairs_for_another_number_of_layers_are_refused(random_table: Table) -> None:
    table = random_table(3, 0)
    with pytest.raises(SearchSpaceError, match="3 layers, but 2 pairs"):
        configuration_from_pairs(table, [NATIVE] * 2, "kl", table.geometry.row_shape())


def test_digest_names_the_space_and_not_its_scores(random_table: Table, make_table: Table) -> None:
    def space(factor: float, **options: Any) -> SearchSpace:
        table = make_table(2, lambda c: CandidateScores(0, 0, 0, 0, factor / c.bits))
        return build_space(table, "kl", table.geometry.row_shape(), **options)

    assert space(1.0).digest() == space(2.0).digest()
    assert space(1.0).digest() != space(1.0, keep={1: NATIVE}).digest()
    assert space(1.0).digest() != SearchSpace(space(1.0).menus, ((0, 1),), space(1.0).shape).digest()


def test_menus_hold_the_widths_that_were_measured(random_table: Table) -> None:
    table = random_table(2, 3)
    assert table.widths == SEARCHED_BITS
    three = {replace(candidate, bits=3): score for candidate, score in table.scores.items() if candidate.bits == 2}
    table = replace(table, scores={**table.scores, **three})
    assert table.widths == PACKED_BITS
    assert all_pairs(table) == [PrecisionPair(k, v) for k in ALL_BITS for v in ALL_BITS]
