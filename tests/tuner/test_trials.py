"""Choices as the parameters of a trial, and what finished trials tell of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from optuna.trial import TrialState, create_trial

from kvtuner.tuner.samplers import FIXED_PARAMS
from kvtuner.tuner.trials import OUTCOME, TrialReader, layer_texts

if TYPE_CHECKING:
    from collections.abc import Callable

    from optuna.trial import FrozenTrial

    from kvtuner.search_spaces.space import SearchSpace

FINISHED = {"is_feasible": True, "is_measured": True}


def reader_of(make_space: Callable[..., SearchSpace]) -> TrialReader:
    """A reader of a group of two layers beside a layer of its own."""
    return TrialReader(make_space(3, lambda layer, pair: 0.0, groups=((0, 2), (1,))))


def finished(reader: TrialReader, indices: tuple[int, ...], value: float, **outcome: Any) -> FrozenTrial:
    return create_trial(
        params=reader.params(indices),
        distributions=dict(reader.distributions),
        value=value,
        user_attrs={OUTCOME: {**FINISHED, **outcome}},
    )


def test_choices_come_back_from_their_parameters(make_space: Callable[..., SearchSpace]) -> None:
    reader = reader_of(make_space)
    assert reader.params((3, 5)) == {"group_000": 3, "layer_001": 5}
    assert reader.indices({"group_000": 3, "layer_001": 5}) == (3, 5)


def test_parameters_are_called_by_the_ids_of_layers_where_others_lie_between(
    make_space: Callable[..., SearchSpace],
) -> None:
    space = make_space(4, lambda layer, pair: 0.0, groups=((0,), (1, 3), (2,)))
    menus = tuple(replace(menu, layer=layer) for menu, layer in zip(space.menus, (3, 7, 11, 15), strict=True))
    reader = TrialReader(replace(space, menus=menus))
    assert list(reader.distributions) == list(reader.menus()) == ["layer_003", "group_007", "layer_011"]
    assert reader.params((1, 2, 3)) == {"layer_003": 1, "group_007": 2, "layer_011": 3}
    assert reader.indices(reader.params((1, 2, 3))) == (1, 2, 3)


def test_every_parameter_has_its_menu_in_words(make_space: Callable[..., SearchSpace]) -> None:
    reader = reader_of(make_space)
    menus = reader.menus()
    assert {name: len(texts) for name, texts in menus.items()} == {
        name: distribution.high + 1 for name, distribution in reader.distributions.items()
    }
    assert menus["layer_001"][0] == "K2V2"


def test_a_group_whose_layers_have_other_transforms_is_named_by_its_pair(
    make_space: Callable[..., SearchSpace],
) -> None:
    space = make_space(2, lambda layer, pair: 0.0, groups=((0, 1),))
    rotated = tuple(replace(choice, v_transform="hadamard") for choice in space.menus[1].choices)
    mixed = TrialReader(replace(space, menus=(space.menus[0], replace(space.menus[1], choices=rotated))))
    assert mixed.menus()["group_000"][0] == "K2V2"
    assert layer_texts((space.menus[0].choices[0], rotated[0]), (0, 5)) == {
        "layer 0": "K2V2",
        "layer 5": "K2V2, values hadamard",
    }


def test_a_group_with_one_choice_is_no_parameter(make_space: Callable[..., SearchSpace]) -> None:
    space = make_space(2, lambda layer, pair: 0.0)
    reader = TrialReader(space.between(space.configuration([4, 0]), space.configuration([4, 15])))
    assert list(reader.distributions) == ["layer_001"]
    assert reader.indices({"layer_001": 2}) == (0, 2)


def test_an_unfinished_repetition_hides_no_value(make_space: Callable[..., SearchSpace]) -> None:
    reader = reader_of(make_space)
    waiting = create_trial(state=TrialState.WAITING, system_attrs={FIXED_PARAMS: reader.params((1, 2))})
    failed = create_trial(state=TrialState.FAIL, system_attrs={FIXED_PARAMS: reader.params((2, 2))})
    assert reader.values_of([finished(reader, (1, 2), 0.25), waiting, failed]) == {(1, 2): 0.25}
    assert reader.values_of([waiting]) == {(1, 2): None}


def test_what_broke_the_budget_or_is_not_finite_has_no_kl(make_space: Callable[..., SearchSpace]) -> None:
    reader = reader_of(make_space)
    outside = finished(reader, (0, 0), 1.0, is_feasible=False)
    broken = finished(reader, (1, 1), 1.0, failure="layer 0: NaN")
    assert reader.values_of([outside, broken]) == {(0, 0): None, (1, 1): math.inf}
    assert reader.record(broken).value is None
    assert reader.record(broken).is_feasible
    assert not reader.record(outside).is_feasible
