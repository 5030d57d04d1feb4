from __future__ import annotations

import sys
from itertools import pairwise, product
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from kvtuner.bench.loads import NUM_PREFIX_TOKENS, Capacity, Load, LoadOptions, check_prompts, cut_prompts, plan_loads
from kvtuner.bench.runner import BenchWork
from kvtuner.calibration.model_loading import DEMO_MODEL
from kvtuner.cli import main
from kvtuner.errors import CorpusError
from kvtuner.exported_configs.profile.build import LayerQuantization, dump_profile
from kvtuner.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fixture_types import ProfileOf

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


def beginnings_of(prompts: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(prompt[:NUM_PREFIX_TOKENS]) for prompt in prompts}


@pytest.mark.parametrize("length", [7, 10, 300, 2500])
def test_no_two_prompts_begin_alike_and_all_are_as_long_as_asked(length: int) -> None:
    prompts = cut_prompts(range(100, 1100), "1", length, 20)
    assert [len(prompt) for prompt in prompts] == [length] * 20
    assert len(beginnings_of(prompts)) == 20
    assert all((b - a) % 1000 == 1 for a, b in pairwise(prompts[0][NUM_PREFIX_TOKENS:])), (
        "the text goes on, and begins again"
    )
    assert cut_prompts(range(100, 1100), "1", length, 3) == prompts[:3]
    assert cut_prompts(range(100, 1100), "2", length, 1)[0] != prompts[0]


@pytest.mark.parametrize(("stream", "length", "count"), [([1, 2, 3] * 50, 20, 60), ([1] * 10**6 + [2], 9, 16)])
def test_few_and_rare_tokens_still_give_different_beginnings(stream: list[int], length: int, count: int) -> None:
    assert len(beginnings_of(cut_prompts(stream, "s", length, count))) == count


@settings(max_examples=60, deadline=None, derandomize=True)
@given(stream=st.lists(st.integers(0, 3), min_size=1, max_size=9), length=st.integers(1, 6))
def test_all_beginnings_that_there_are_come_once_and_then_no_more(stream: list[int], length: int) -> None:
    beginnings = set(product(set(stream), repeat=min(NUM_PREFIX_TOKENS, length)))
    check_prompts(stream, length, len(beginnings))
    prompts = cut_prompts(stream, "s", length, len(beginnings))
    assert beginnings_of(prompts) == beginnings
    assert all(len(prompt) == length for prompt in prompts)
    one_more = len(beginnings) + 1
    with pytest.raises(CorpusError, match=rf"{one_more:,} of length {length} are asked for"):
        check_prompts(stream, length, one_more)
    with pytest.raises(CorpusError, match="no two prompts may begin alike"):
        cut_prompts(stream, "s", length, one_more)


def work(stream: Sequence[int], options: LoadOptions, folder: Path) -> BenchWork:
    run = RunFolder(folder)
    run.create()
    return BenchWork(run, options, stream, "0")


@pytest.mark.parametrize(
    ("options", "tokens", "needed"),
    [
        (LoadOptions(prompt_tokens=1), 1279, 1280),
        (LoadOptions(prompt_tokens=1, concurrency=(40,)), 199, 200),
        (LoadOptions(lengths=(1, 10), repeats=7), 6, 7),
        (LoadOptions(prompt_tokens=1, concurrency=(1,), batches=(33,), repeats=2), 32, 33),
    ],
)
def test_loads_for_which_the_text_has_too_few_beginnings_are_refused_before_any_is_sent(
    options: LoadOptions, tokens: int, needed: int, tmp_path: Path
) -> None:
    work(range(tokens + 1), options, tmp_path).check()
    with pytest.raises(CorpusError) as refused:
        work(range(tokens), options, tmp_path).check()
    assert f"{needed:,} of length 1 are asked for, of which the text's {tokens:,} different tokens begin" in str(
        refused.value
    )
    for flag in ("--prompt-tokens", "--lengths", "--concurrency", "--batches", "--repeats", "--data"):
        assert flag in str(refused.value)


def test_the_command_refuses_them_before_a_server_is_started(
    profile_of: ProfileOf, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.from_pretrained(DEMO_MODEL)
    profile = tmp_path / "profile.json"
    profile.write_bytes(dump_profile(profile_of(config, [LayerQuantization(4, 4)] * config.num_hidden_layers)))
    monkeypatch.setattr("kvtuner.pipeline.benchmark.serving_client", lambda: None)  # it need not be installed to refuse
    monkeypatch.setattr("kvtuner.pipeline.bench_session.run_server", lambda *_: pytest.fail("a server is started"))
    flags = ["--model", "demo", "--out", str(tmp_path / "run"), "--lengths", "1", "--repeats", "100000"]
    assert main(["bench", str(profile), *flags]) == 2
    assert "no two prompts may begin alike, and 100,000 of length 1 are asked for" in capsys.readouterr().err


def test_every_load_that_passed_the_check_has_its_prompts(tmp_path: Path) -> None:
    mine = work([*range(5)] * 9, LoadOptions(lengths=(1, 2), prompt_tokens=4, concurrency=(64,)), tmp_path)
    mine.check()
    loads, _ = plan_loads(mine.options, Capacity(sys.maxsize, None, None))
    for load in loads:
        prompts = mine.prompts(load)
        assert len({tuple(prompt[:NUM_PREFIX_TOKENS]) for prompt in prompts}) == len(prompts) == load.requests
