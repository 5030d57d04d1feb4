"""The engine's answers, many at a time, are those of the transformers cache, by every read plan and beside a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import NonFiniteActivationError
from kvtuner.evaluation.backends.engine_backend import EngineBackend
from kvtuner.evaluation.backends.local_backend import LocalBackend
from kvtuner.evaluation.cache_scheme import CacheScheme, ProfileScheme
from kvtuner.evaluation.scheme_registry import named_scheme
from kvtuner.evaluation.tasks.recall_and_needles import Problem, Question
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow
from kvtuner.read_plan_names import READ_PLANS

if TYPE_CHECKING:
    from fixture_types import LoadTiny, ProfileOf

WINDOWS = (ExactWindow(0, 0), ExactWindow(6), ExactWindow(3, 2), ExactWindow(40))
PER_CHANNEL = "per-channel"
TEXTS = ("one", "and two", "of what is asked then", "0123")


def problems() -> list[Problem]:
    """Problems of several lengths, with one to four questions each."""
    lines = "a table that says nothing of what is asked, but a model says something\n"
    return [
        Problem(lines[number:] * (1 + number % 3), tuple(Question(text, "12345") for text in TEXTS[: 1 + number % 4]))
        for number in range(7)
    ]


@pytest.fixture(params=["bf16", *WINDOWS, PER_CHANNEL], ids=str)
def scheme(request: pytest.FixtureRequest, load_tiny: LoadTiny, profile_of: ProfileOf) -> CacheScheme:
    shape = load_tiny("llama-gqa").shape
    if request.param == "bf16":
        return named_scheme("bf16", shape)
    layers = [LayerQuantization(4, 2), LayerQuantization(8, 4), LayerQuantization(2, 16)]
    if request.param == PER_CHANNEL:
        return ProfileScheme.of("own", profile_of(shape.config, layers, window=ExactWindow(32), token_group=32))
    return ProfileScheme.of("own", profile_of(shape.config, layers, window=request.param))


def begins_alike(one: str | None, other: str | None) -> bool:
    """Whether texts agree as far as both go: the engine does not stop where an answer is known."""
    assert one is not None and other is not None
    return one.startswith(other) or other.startswith(one)


@pytest.mark.parametrize("read_plan", READ_PLANS)
def test_answers_are_those_of_the_transformers_cache(read_plan: Any, scheme: CacheScheme, load_tiny: LoadTiny) -> None:
    loaded, asked = load_tiny("llama-gqa"), problems()
    oracle, engine = LocalBackend(loaded, scheme, read_plan), EngineBackend(loaded, scheme, read_plan)
    for offset in (0, 200):
        engine.prepare("answers", [(problem, offset) for problem in asked])
        pairs = [
            pair
            for problem in asked
            for pair in zip(engine.answers(problem, offset=offset), oracle.answers(problem, offset=offset), strict=True)
        ]
        assert not engine._ready
        # A sum in another order may flip a code, and a code a token.
        assert sum(begins_alike(*pair) for pair in pairs) >= 0.9 * len(pairs)


@pytest.mark.parametrize("read_plan", READ_PLANS)
def test_likelihoods_and_texts_are_those_of_the_transformers_cache(
    read_plan: Any, scheme: CacheScheme, load_tiny: LoadTiny
) -> None:
    loaded = load_tiny("llama-gqa")
    oracle, engine = LocalBackend(loaded, scheme, read_plan), EngineBackend(loaded, scheme, read_plan)
    ids = [2 + 7 * number % 300 for number in range(90)]
    pairs = [(ids[:1], ids[1:9]), (ids[:40], ids[40:52]), (ids[3:80], ids[80:])]
    engine.prepare("log_likelihood", pairs)
    for before, after in pairs:
        wanted, found = oracle.log_likelihood(before, after), engine.log_likelihood(before, after)
        assert found[0] == pytest.approx(wanted[0], rel=1e-3), "up to flipped codes"
        assert found[1] == wanted[1]
    assert engine.whole_log_likelihood(ids) == pytest.approx(oracle.whole_log_likelihood(ids), rel=2e-3)
    assert begins_alike(engine.continuation(ids, 6), oracle.continuation(ids, 6))
    stops = [oracle.generate_until(ids[:30], 8, [])[2:3]]
    assert engine.generate_until(ids[:30], 8, stops) == oracle.generate_until(ids[:30], 8, stops)


def test_a_text_as_long_as_the_context_is_scored(load_tiny: LoadTiny) -> None:
    loaded = load_tiny("llama-gqa")
    ids = [2 + 7 * number % 300 for number in range(loaded.shape.context_length)]
    scheme = named_scheme("K8V8", loaded.shape)
    oracle, engine = LocalBackend(loaded, scheme, "decode"), EngineBackend(loaded, scheme, "decode")
    assert engine.whole_log_likelihood(ids) == pytest.approx(oracle.whole_log_likelihood(ids), rel=1e-3)


def test_logits_that_are_no_numbers_are_no_answers(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    loaded = load_tiny("llama-gqa")
    backend = EngineBackend(loaded, named_scheme("K8V8", loaded.shape), "decode")
    monkeypatch.setattr(loaded.model.lm_head, "forward", lambda x: x.new_full((*x.shape[:-1], 320), torch.nan))
    with pytest.raises(NonFiniteActivationError, match="K8V8"):
        backend.answers(problems()[0])
