from __future__ import annotations

from itertools import pairwise

import pytest

from kvtuner.bench.loads import Capacity, Load, LoadOptions, plan_loads
from kvtuner.bench.prompts import DRAWN, Prompts

WIDE = Capacity(context=40_000, tokens=1_000_000, requests=300)


def lanes(capacity: Capacity, **options: object) -> list[int]:
    loads, _ = plan_loads(LoadOptions(**options), capacity)  # type: ignore[arg-type]
    return [load.concurrency for load in loads if load.kind == "concurrency"]


def test_every_part_of_the_grid_is_sent_where_it_fits() -> None:
    loads, left_out = plan_loads(LoadOptions(), WIDE)
    kinds = {kind: [load for load in loads if load.kind == kind] for kind in {load.kind for load in loads}}
    assert not left_out
    assert [load.prompt_tokens for load in kinds["prompt"]][-1] == 32_000
    assert [load.output_tokens for load in kinds["output"]] == [16, 64, 256]
    assert {load.requests for load in kinds["batch"]} == {1, 2, 4, 8, 16}
    assert [load.round for load in kinds["stability"]] == list(range(20))


@pytest.mark.parametrize(
    ("tokens", "requests", "most"), [(None, None, 256), (288 * 100, None, 64), (288, 8, 1), (10**9, 24, 16)]
)
def test_requests_in_flight_are_doubled_up_to_what_fits(tokens: int | None, requests: int | None, most: int) -> None:
    found = lanes(Capacity(8192, tokens, requests))
    assert found[-1] == most
    assert found == [2**power for power in range(len(found))]


def test_what_does_not_fit_is_left_out_by_name() -> None:
    small = Capacity(context=1024, tokens=2048, requests=4)
    loads, left_out = plan_loads(LoadOptions(concurrency=(1, 4, 64)), small)
    assert all(small.fits(load) for load in loads)
    assert {load.prompt_tokens for load in left_out if load.kind == "prompt"} == {2_000, 4_000, 8_000, 16_000, 32_000}
    assert [load.concurrency for load in left_out if load.kind == "concurrency"] == [64]
    assert {load.requests for load in left_out if load.kind == "batch"} == {8, 16}


def test_a_load_fits_up_to_the_last_token() -> None:
    load = Load("batch", 100, 28, 4, 4)
    assert Capacity(128, 512, 4).fits(load)
    assert not Capacity(127, 512, 4).fits(load)
    assert not Capacity(128, 511, 4).fits(load)
    assert not Capacity(128, 512, 3).fits(load)
    assert Capacity(128, 4 * 192, 4, page=64).fits(Load("batch", 100, 29, 4, 4)) is False
    assert Capacity(129, 4 * 192, 4, page=64).fits(Load("batch", 100, 29, 4, 4))
    assert not Capacity(129, 4 * 191, 4, page=64).fits(Load("batch", 100, 29, 4, 4))


def test_no_two_prompts_begin_alike_and_all_are_as_long_as_asked() -> None:
    prompts = Prompts(range(100, 1100), "1")
    taken = [prompts.take(length) for length in (10, 2500, 300, 7) for _ in range(20)]
    assert [len(prompt) for prompt in taken] == [10] * 20 + [2500] * 20 + [300] * 20 + [7] * 20
    beginnings = [tuple(prompt[:DRAWN]) for prompt in taken]
    assert len(set(beginnings)) == len(beginnings)
    text = taken[20][DRAWN:]
    assert all((b - a) % 1000 == 1 for a, b in pairwise(text)), "the text goes on, and begins again"
    again = Prompts(range(100, 1100), "1")
    assert [again.take(10) for _ in range(3)] == taken[:3]
    assert Prompts(range(100, 1100), "2").take(10) != taken[0]


def test_few_tokens_still_give_different_beginnings() -> None:
    prompts = Prompts([1, 2, 3] * 50, "0")
    assert len({tuple(prompts.take(20)[:DRAWN]) for _ in range(60)}) == 60
