"""Requests that begin alike share their beginning, answer as they do alone, and leave nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import RequestError
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow
from kvtuner.runtime_loader.engine.generation import SamplingParameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import ProfileOf

    from kvtuner.runtime_loader.engine.generation import Completion
    from kvtuner.runtime_loader.engine.local_engine import LocalEngine

    EngineOf = Callable[..., LocalEngine]

ASKED = SamplingParameters(max_tokens=6, ignore_eos=True)


def finish(engine: LocalEngine, ids: list[str]) -> list[Completion]:
    """The answers to some requests, once all have ended."""
    generations = [engine.generation(each) for each in ids]
    while engine.has_requests:
        engine.step()
    return [generation.completion() for generation in generations]


def is_empty(engine: LocalEngine) -> bool:
    state = engine.state
    return state.num_free_pages + state.num_idle_pages == state.num_pages and not engine.has_requests


@pytest.mark.parametrize(
    ("stored", "page_size"),
    [
        *((stored, size) for stored in (None, {"window": ExactWindow(6, 2)}) for size in (1, 4, 512)),
        *(({"window": ExactWindow(19, 2), "token_group": 16}, size) for size in (16, 512)),
    ],
    ids=str,
)
def test_branches_answer_as_they_do_alone(
    page_size: int, stored: dict[str, Any] | None, models: Any, prompt: Any, engine_of: EngineOf, profile_of: ProfileOf
) -> None:
    model = models()
    profile = None if stored is None else profile_of(model.config, [LayerQuantization(4, 2)] * 3, **stored)
    options: dict[str, Any] = {"page_size": page_size, "attend": "decode", "prefix_cache_tokens": 0}
    beginning, branches = prompt(37), [prompt(length, 1) for length in (5, 1, 9, 30)]
    with engine_of(model, None, profile, **options) as engine:
        together = finish(engine, engine.submit_branches(beginning, branches, ASKED))
        assert engine.state.num_prompt_tokens == 37 + 5 + 1 + 9 + 30, "the beginning is computed once"
        alone = [finish(engine, engine.submit_branches(beginning, [branch], ASKED))[0] for branch in branches]
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
        if profile is None:
            whole = engine.generate([beginning + branch for branch in branches], ASKED)
            assert [answer.token_ids for answer in together] == [answer.token_ids for answer in whole]
        assert is_empty(engine)


def test_a_beginning_is_one_chunk_however_long(models: Any, prompt: Any, engine_of: EngineOf) -> None:
    engine = engine_of(models(), chunk_tokens=8)
    (request_id,) = engine.submit_branches(prompt(40), [prompt(20, 1)], ASKED)
    engine.step()
    assert engine.generation(request_id).num_stored == 40
    engine.step()
    assert engine.generation(request_id).num_stored == 60


def test_a_position_moves_what_is_computed_and_not_what_an_unquantized_model_says(
    models: Any, prompt: Any, engine_of: EngineOf
) -> None:
    engine = engine_of(models())
    near, far = (
        finish(engine, engine.submit_branches(prompt(30), [prompt(4, 1)], ASKED, first_position=first))[0]
        for first in (0, 3000)
    )
    assert near.token_ids == far.token_ids
    with pytest.raises(RequestError, match="more than the context of 4608"):
        engine.submit_branches(prompt(30), [prompt(4, 1)], ASKED, first_position=4580)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("ended", [0, 1])
def test_one_that_is_aborted_leaves_the_others_whole(
    ended: int, steps: int, models: Any, prompt: Any, engine_of: EngineOf
) -> None:
    engine = engine_of(models(), page_size=4, prefix_cache_tokens=0)
    branches = [prompt(length, 1) for length in (5, 3, 9)]
    wanted = finish(engine, engine.submit_branches(prompt(21), branches, ASKED))
    ids = engine.submit_branches(prompt(21), branches, ASKED)
    kept = [number for number in range(3) if number != ended]
    for _ in range(steps):
        engine.step()
    generations = [engine.generation(ids[number]) for number in kept]
    engine.abort(ids[ended])
    while engine.has_requests:
        engine.step()
    assert [each.completion().token_ids for each in generations] == [wanted[number].token_ids for number in kept]
    assert is_empty(engine)


def test_branches_wait_for_room_and_survive_retraction(models: Any, prompt: Any, engine_of: EngineOf) -> None:
    model, beginning, branches = models(), prompt(40), [prompt(length, 1) for length in (5, 1, 9)]
    long = SamplingParameters(max_tokens=40, ignore_eos=True)
    with engine_of(model, page_size=4, prefix_cache_tokens=0) as roomy:
        wanted = finish(roomy, roomy.submit_branches(beginning, branches, long))
        other = roomy.generate([prompt(30, 2)], long)[0]
    # Of 60 pages the group needs 52 at its end, and another request 18 beside it.
    bytes_per_page = 4 * engine_of(model).pool.shape.bytes_per_token
    with engine_of(model, page_size=4, prefix_cache_tokens=0, kv_memory=60 * bytes_per_page) as engine:
        ids = [*engine.submit_branches(beginning, branches, long), engine.submit(prompt(30, 2), long)]
        answers = finish(engine, ids)
        assert engine.state.num_retracted
        assert [each.token_ids for each in answers] == [*(each.token_ids for each in wanted), other.token_ids]
        assert is_empty(engine)


def test_what_branches_cannot_have_is_refused(models: Any, prompt: Any, engine_of: EngineOf) -> None:
    engine = engine_of(models(), max_requests=2)
    with pytest.raises(RequestError, match="3 branches do not run at once; give the engine max_requests"):
        engine.submit_branches(prompt(9), [prompt(3), prompt(4), prompt(5)], ASKED)
    with pytest.raises(RequestError, match="are told of one branch"):
        engine.submit_branches(prompt(9), [prompt(3), prompt(4)], SamplingParameters(prompt_logprobs=0))
    assert is_empty(engine)


def test_a_prompt_may_be_read_alone(models: Any, prompt: Any, engine_of: EngineOf) -> None:
    engine = engine_of(models())
    (answer,) = engine.generate([prompt(20)], SamplingParameters(max_tokens=0, prompt_logprobs=1))
    assert (answer.token_ids, answer.finish_reason, len(answer.prompt_logprobs)) == ((), "length", 19)
    (whole,) = engine.generate([prompt(20)], SamplingParameters(max_tokens=1, prompt_logprobs=1))
    assert whole.prompt_logprobs == answer.prompt_logprobs
