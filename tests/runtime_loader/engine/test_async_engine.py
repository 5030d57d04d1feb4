"""The asyncio front answers every request or names why not, keeps its queue bounded and frees what callers leave."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import EngineBusyError, RequestError, ServingError
from kvtuner.runtime_loader.engine.async_engine import AsyncEngine
from kvtuner.runtime_loader.engine.generation import Completion, SamplingParameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.runtime_loader.engine.local_engine import LocalEngine

    EngineOf = Callable[..., LocalEngine]

ASKED = SamplingParameters(max_tokens=6, ignore_eos=True)


def test_answers_are_those_of_the_engine_itself(models: Any, prompt: Any, engine_of: EngineOf) -> None:
    engine = engine_of(models())
    prompts = [prompt(length) for length in (3, 20, 41)]
    wanted = engine.generate(prompts, ASKED)

    async def ask() -> list[Completion]:
        async with AsyncEngine(engine) as front:
            streams = [await front.submit(tokens, ASKED) for tokens in prompts]
            first = [delta.token_ids async for delta in streams[0]]
            assert [token for (token,) in first] == list(wanted[0].token_ids)
            return [await stream.completion() for stream in streams]

    assert [answer.token_ids for answer in asyncio.run(ask())] == [answer.token_ids for answer in wanted]


def test_a_full_queue_refuses_by_name_and_takes_again_later(models: Any, prompt: Any, engine_of: EngineOf) -> None:
    async def ask() -> None:
        async with AsyncEngine(engine_of(models()), most_requests=2) as front:
            long = SamplingParameters(max_tokens=4000, ignore_eos=True)
            one, two = await front.submit(prompt(3), long), await front.submit(prompt(4), long)
            with pytest.raises(EngineBusyError, match="2 requests are unfinished"):
                await front.submit(prompt(5), ASKED)
            front.abort(one.request_id)
            assert (await one.completion()).finish_reason == "abort"
            await (await front.submit(prompt(5), ASKED)).completion()
            await two.aclose()

    asyncio.run(ask())


def test_a_request_that_is_refused_leaves_room_for_others(models: Any, prompt: Any, engine_of: EngineOf) -> None:
    async def ask() -> None:
        async with AsyncEngine(engine_of(models()), most_requests=1) as front:
            for _ in range(3):
                with pytest.raises(RequestError):
                    await front.submit([], ASKED)
            assert (await (await front.submit(prompt(5), ASKED)).completion()).finish_reason == "length"
            assert front.num_unfinished == 0

    asyncio.run(ask())


def test_whoever_waits_hears_of_the_end(
    models: Any, prompt: Any, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def close_and_fail() -> None:
        endless = SamplingParameters(max_tokens=4000, ignore_eos=True)
        front = AsyncEngine(engine_of(models()))
        stream = await front.submit(prompt(5), endless)
        await asyncio.get_running_loop().run_in_executor(None, front.close)
        with pytest.raises(ServingError, match="was closed"):
            await stream.completion()
        with pytest.raises(ServingError, match="was closed"):
            await front.submit(prompt(5), ASKED)

        engine = engine_of(models())
        front = AsyncEngine(engine)

        def fail() -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(engine, "step", fail)
        stream = await front.submit(prompt(5), endless)
        with pytest.raises(ServingError, match="the engine failed: out of memory"):
            await stream.completion()
        with pytest.raises(ServingError, match="the engine failed"):
            await front.submit(prompt(5), ASKED)
        front.close()
        assert not engine.has_requests

    asyncio.run(close_and_fail())


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_mixed_load_with_aborts_is_all_answered_or_named(
    count: int, models: Any, prompt: Any, engine_of: EngineOf
) -> None:
    engine = engine_of(models(), kv_memory=400 * 384, page_size=4, max_requests=8)
    rng = random.Random(0)
    reasons: list[str] = []
    refused: list[int] = []

    async def one(front: AsyncEngine, number: int) -> None:
        sampling = SamplingParameters(
            max_tokens=rng.randint(1, 20), temperature=rng.choice([0.0, 1.0]), seed=number, ignore_eos=True
        )
        await asyncio.sleep(rng.random() * count / 500)
        asked = prompt(rng.randint(1, 60), rng.randint(0, 5))
        while True:
            try:
                stream = await front.submit(asked, sampling)
                break
            except EngineBusyError:  # however slow the machine is, who comes again is answered
                refused.append(number)
                await asyncio.sleep(0.02)
        fate = rng.random()
        if fate < 0.15:
            await asyncio.sleep(0.01)
            front.abort(stream.request_id)
        elif fate < 0.3:  # the caller goes away
            async with stream:
                await anext(stream)
            reasons.append("left")
            return
        elif fate < 0.4:  # a task is cancelled
            task = asyncio.create_task(stream.completion())
            await asyncio.sleep(0)
            task.cancel()
            await stream.aclose()
            reasons.append("left")
            return
        answer = await stream.completion()
        assert answer.finish_reason == "abort" or len(answer.token_ids) == sampling.max_tokens
        reasons.append(answer.finish_reason)

    async def ask() -> None:
        async with AsyncEngine(engine, most_requests=32) as front:
            await asyncio.gather(*(one(front, number) for number in range(count)))
            while front.num_unfinished:
                await asyncio.sleep(0.001)

    asyncio.run(ask())
    assert len(reasons) == count
    assert reasons.count("length") > count / 4
    assert {"length", "abort", "left"} == set(reasons)
    assert count < 1000 or refused  # the bound on requests was reached
    state = engine.state
    assert (state.num_running, state.num_waiting) == (0, 0)
    assert state.num_free_pages + state.num_idle_pages == state.num_pages
