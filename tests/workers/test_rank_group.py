"""A group of ranks: the leader decides once, all learn it, and what is shared runs on all in the leader's order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import NonFiniteActivationError, RunFolderError
from kvtuner.workers.rank_group import ALONE, RankGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    OnRanks = Callable[[int, Callable[[RankGroup], Any]], list[Any]]


def test_all_ranks_get_what_the_leader_alone_decided(on_ranks: OnRanks) -> None:
    decided = list[int]()

    def decide(group: RankGroup) -> int:
        decided.append(group.number)
        return 7

    assert on_ranks(3, lambda group: [group.lead(lambda: decide(group)) for _ in range(2)]) == [[7, 7]] * 3
    assert decided == [0, 0]


def test_a_refusal_of_the_leader_is_raised_on_all_ranks(on_ranks: OnRanks) -> None:
    def refuse() -> int:
        raise RunFolderError("no space left")

    def work(group: RankGroup) -> str:
        with pytest.raises(RunFolderError, match="no space left"):
            group.lead(refuse)
        return group.lead(lambda: "goes on")

    assert on_ranks(2, work) == ["goes on"] * 2


def test_a_shared_function_runs_on_all_ranks_when_the_leader_calls_it(on_ranks: OnRanks) -> None:
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def work(group: RankGroup) -> int:
        def measure(value: int) -> int:
            seen[group.number].append(value)
            return group.lead(lambda: 10 * value)  # a decision within what all ranks do

        def propose(measure: Callable[[int], int], _: Callable[[], None]) -> int:
            group.lead(lambda: None)  # the leader's own: the others do not take part
            return measure(3) + measure(4)

        return group.lead(propose, measure, lambda: None)

    assert on_ranks(3, work) == [70] * 3
    assert seen == {0: [3, 4], 1: [3, 4], 2: [3, 4]}


def test_what_a_shared_function_raises_is_for_the_leader_to_judge(on_ranks: OnRanks) -> None:
    def work(group: RankGroup) -> str:
        def measure() -> None:
            raise NonFiniteActivationError("layer 3")

        def propose(measure: Callable[[], None]) -> str:
            with pytest.raises(NonFiniteActivationError):
                measure()
            return "another trial"

        return group.lead(propose, measure)

    assert on_ranks(2, work) == ["another trial"] * 2


def test_a_process_alone_calls_what_it_leads() -> None:
    assert ALONE.lead(lambda double: double(4), lambda value: 2 * value) == 8
    with pytest.raises(RunFolderError):
        ALONE.lead(lambda: (_ for _ in ()).throw(RunFolderError("full")))
