"""An engine with a profile says what `KVTunerCache` says: the same reads of the same rows, by every attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import NO_WINDOW, ExactWindow
from kvtuner.runtime_loader.engine.generation import SamplingParameters
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import ProfileOf

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.read_plan_names import ReadPlanName
    from kvtuner.runtime_loader.engine.local_engine import LocalEngine

    EngineOf = Callable[..., LocalEngine]

LAYERS = [LayerQuantization(4, 3), LayerQuantization(16, 8), LayerQuantization(8, 4)]
BY_TOKEN: list[dict[str, Any]] = [{"window": window} for window in (NO_WINDOW, ExactWindow(6), ExactWindow(5, 3))]
BY_CHANNEL: list[dict[str, Any]] = [
    {"window": window, "token_group": 16} for window in (ExactWindow(16), ExactWindow(19, 2))
]
LENGTHS = (1, 3, 17, 40)
NEW = 10
# Rounding of 1e-7 may flip a code, and by that a log-probability by some hundredths; reads that differ flip many.
MEAN_KL = 2e-4


def read_by_the_cache(model: Any, profile: Profile, tokens: list[int], num_prompt: int, plan: ReadPlanName) -> Any:
    """The log-probabilities of every next token behind the prompt, [tokens, vocab_size], one token at a time."""
    cache = KVTunerCache.from_profile(profile, model.config, plan)
    with torch.no_grad(), cache.attending(model, in_place=False):
        logits = [model(torch.tensor([tokens[:num_prompt]]), past_key_values=cache).logits[0, -1:]]
        for token in tokens[num_prompt:]:
            logits.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1:])
    return torch.cat(logits).log_softmax(-1)


def mean_kl(answer: Any, wanted: Any) -> float:
    """The KL of an answer's log-probabilities of the likeliest 100 tokens, in nats per token."""
    sums = []
    for row, each in enumerate(answer.logprobs):
        ids = torch.tensor([token for token, _ in each.top])
        found = torch.tensor([logprob for _, logprob in each.top])
        sums.append(float((wanted[row, ids].exp() * (wanted[row, ids] - found)).sum()))
    return sum(sums) / len(sums)


@pytest.mark.parametrize("attention", ["cpu", "torch"])
@pytest.mark.parametrize("stored", BY_TOKEN + BY_CHANNEL, ids=str)
@pytest.mark.parametrize(("attend", "plan"), [("fresh", "decode"), ("cache", "cache")])
def test_answers_are_those_of_the_transformers_cache(
    attend: str, plan: ReadPlanName, stored: dict[str, Any], attention: str, models: Any, prompt: Any,
    profile_of: ProfileOf, engine_of: EngineOf,
) -> None:  # fmt: skip
    model = models()
    profile = profile_of(model.config, LAYERS, **stored)
    engine = engine_of(model, None, profile, attend=attend, attention=attention)
    asked = SamplingParameters(max_tokens=NEW, logprobs=100, ignore_eos=True)
    prompts = [prompt(length) for length in LENGTHS]
    answers = engine.generate(prompts, asked)
    engine.close()
    for tokens, answer in zip(prompts, answers, strict=True):
        wanted = read_by_the_cache(model, profile, [*tokens, *answer.token_ids[:-1]], len(tokens), plan)
        assert abs(mean_kl(answer, wanted)) < MEAN_KL


def test_another_reading_would_be_noticed(models: Any, prompt: Any, profile_of: ProfileOf, engine_of: EngineOf) -> None:
    model = models()
    profile = profile_of(model.config, LAYERS)
    asked = SamplingParameters(max_tokens=NEW, logprobs=100, ignore_eos=True)
    engine = engine_of(model, None, profile, attend="fresh")
    (answer,) = engine.generate([prompt(40)], asked)
    engine.close()
    wanted = read_by_the_cache(model, profile, [*prompt(40), *answer.token_ids[:-1]], 40, "cache")
    assert abs(mean_kl(answer, wanted)) > 2 * MEAN_KL


CUTS: list[dict[str, Any]] = [
    {"chunk_tokens": 1},
    {"chunk_tokens": 7, "page_size": 4},
    {"page_size": 64},
    {"max_requests": 2},
    {"attention": "torch", "chunk_tokens": 19},
    {"kv_memory": 150 * 320},
]


@pytest.mark.parametrize("options", CUTS, ids=str)
def test_cache_reading_depends_on_no_history(
    options: dict[str, Any], models: Any, prompt: Any, profile_of: ProfileOf, engine_of: EngineOf
) -> None:
    model = models()
    profile = profile_of(model.config, LAYERS)
    asked = SamplingParameters(max_tokens=24, logprobs=100, ignore_eos=True)
    prompts = [prompt(length) for length in (30, 31, 5, 40)]
    engine = engine_of(model, None, profile, attend="cache", prefix_cache_tokens=0)
    wanted = [engine.generate([tokens], asked)[0] for tokens in prompts]
    engine = engine_of(model, None, profile, attend="cache", **options)
    for _ in range(2):  # the second time with hits
        for expected, found in zip(wanted, engine.generate(prompts, asked), strict=True):
            assert near(expected, found)
    assert "kv_memory" not in options or engine.state.num_retracted > 0


def near(expected: Any, found: Any) -> bool:
    """Whether two answers are the same to rounding, up to a tie."""
    for one, other in zip(expected.logprobs, found.logprobs, strict=True):
        if abs(one.logprob - dict(other.top).get(one.token, -99.0)) > 0.05:
            return False
        if one.token != other.token:
            return one.top[0][1] - one.top[1][1] < 0.1
    return True


def test_copies_of_a_former_request_in_a_slot_are_not_read(
    models: Any, prompt: Any, profile_of: ProfileOf, engine_of: EngineOf
) -> None:
    model = models()
    profile = profile_of(model.config, LAYERS, window=ExactWindow(8))
    asked = SamplingParameters(max_tokens=NEW, logprobs=100, ignore_eos=True)
    alone = engine_of(model, None, profile, max_requests=1, prefix_cache_tokens=0)
    (wanted,) = alone.generate([prompt(12)], asked)
    alone.generate([prompt(60)], asked)
    (found,) = alone.generate([prompt(12)], asked)
    assert found.logprobs == wanted.logprobs
