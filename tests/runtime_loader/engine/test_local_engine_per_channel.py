"""Keys per channel in an engine: full groups are read from rows, and tokens of others from their request's copies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from uncached_forward import exact_pairs, uncached_logits

from kvtuner.errors import ServingError
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow
from kvtuner.runtime_loader.engine.generation import SamplingParameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import ProfileOf
    from torch import Tensor

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.runtime_loader.engine.generation import Completion
    from kvtuner.runtime_loader.engine.local_engine import LocalEngine

    EngineOf = Callable[..., LocalEngine]

GROUP = 16
WINDOW = ExactWindow(19, 2)
LAYERS = [LayerQuantization(2, 4), LayerQuantization(4, 2), LayerQuantization(16, 2)]
NEW = 40
ASKED = SamplingParameters(max_tokens=NEW, logprobs=100, ignore_eos=True)


@torch.no_grad()
def distance(model: Any, answer: Completion, exact: Tensor, specs: list[dict[str, Any]]) -> float:
    """Mean squared difference of an answer's log-probabilities, of likely tokens by their probabilities, from those of
    a forward without a cache that reads some pairs exactly."""
    ids = torch.tensor([[token for token, _ in each.top] for each in answer.logprobs])
    found = torch.tensor([[logprob for _, logprob in each.top] for each in answer.logprobs])
    tokens = torch.tensor([[*answer.prompt_token_ids, *answer.token_ids[:-1]]])
    logits = uncached_logits(model, tokens, specs, exact[: tokens.shape[1], : tokens.shape[1]])
    wanted = logits[0, len(answer.prompt_token_ids) - 1 :].log_softmax(-1).gather(1, ids)
    return float((wanted.exp() * (wanted - found) ** 2).sum(-1).mean())


def reads_exactly(model: Any, profile: Profile, answer: Completion, exact: Tensor) -> bool:
    """Whether an answer read these pairs exactly, and the others by groups of a channel and not by tokens."""
    per_token = [{side: profile.quant_spec(layer, "v") for side in ("k", "v")} for layer in range(len(LAYERS))]
    specs = [{**spec, "k": profile.quant_spec(layer, "k")} for layer, spec in enumerate(per_token)]
    right, wrong = (distance(model, answer, exact, each) for each in (specs, per_token))
    return right <= 0.02 * wrong and wrong > 1e-4


@pytest.fixture
def model(models: Any) -> Any:
    return models("llama-gqa")


@pytest.fixture
def profile(model: Any, profile_of: ProfileOf) -> Profile:
    return profile_of(model.config, LAYERS, window=WINDOW, token_group=GROUP)


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("chunk_tokens", [17, 64])
def test_by_cache_company_chunks_and_retraction_do_not_matter(
    page_size: int, chunk_tokens: int, model: Any, profile: Profile, prompt: Any, engine_of: EngineOf
) -> None:
    options = {"page_size": page_size, "chunk_tokens": chunk_tokens, "attend": "cache", "prefix_cache_tokens": 0}
    prompts = [prompt(length) for length in (15, 16, 47, 31, 100)]
    shape = engine_of(model, None, profile, **options).pool.shape
    full = shape.num_bytes(sum(-(-len(tokens) // page_size) for tokens in prompts) + 5)
    engine = engine_of(model, None, profile, kv_memory=full, **options)
    answers = engine.generate(prompts, replace(ASKED, max_tokens=70))
    assert engine.state.num_retracted > 0
    engine.close()
    for answer in answers:
        assert reads_exactly(model, profile, answer, exact_pairs(WINDOW, 200, []))


@pytest.mark.parametrize("attend", ["fresh", "cache"])
@pytest.mark.parametrize("page_size", [16, 32])
def test_a_prefix_is_shared_by_whole_pages(
    attend: str, page_size: int, model: Any, profile: Profile, prompt: Any, engine_of: EngineOf
) -> None:
    is_fresh = attend == "fresh"
    engine = engine_of(model, None, profile, page_size=page_size, attend=attend)
    (first,) = engine.generate([prompt(60)], ASKED)
    again = [*prompt(60), *first.token_ids[:9], *prompt(4, 1)]
    (answer,) = engine.generate([again], ASKED)
    engine.close()
    hit = answer.num_cached_tokens
    assert hit == 64
    total, prefix = len(again) + NEW, len(first.prompt_token_ids)
    exact = exact_pairs(WINDOW, total, [hit, len(again)] if is_fresh else [], hit)
    if is_fresh:
        exact[:prefix, :prefix] = True
    assert reads_exactly(model, profile, answer, exact)


def test_requests_of_mixed_lengths_fill_groups_of_their_own_beside_hits(
    model: Any, profile: Profile, prompt: Any, engine_of: EngineOf
) -> None:
    engine = engine_of(model, None, profile, chunk_tokens=33, attend="cache", kv_memory=None)
    prompts = [prompt(length) for length in (33, 3, 70, 16)]
    engine.generate(prompts, ASKED)
    answers = engine.generate([[*tokens, *prompt(5, 2)] for tokens in prompts], ASKED)
    engine.close()
    assert [answer.num_cached_tokens for answer in answers] == [32, 0, 64, 16]
    for answer in answers:
        exact = exact_pairs(WINDOW, len(answer.prompt_token_ids) + NEW, [], answer.num_cached_tokens)
        assert reads_exactly(model, profile, answer, exact)


def test_pages_are_whole_groups(model: Any, profile_of: ProfileOf, engine_of: EngineOf) -> None:
    profile = profile_of(model.config, LAYERS, window=ExactWindow(32), token_group=32)
    assert engine_of(model, None, profile).pool.shape.page_size == 32
    with pytest.raises(
        ServingError, match=r"pages of 48 tokens do not work with keys per channel of 32 .* ask for 32,"
    ):
        engine_of(model, None, profile, page_size=48)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("attend", ["fresh", "cache"])
def test_the_kernels_read_and_pack_them_too(
    attend: str, model: Any, profile: Profile, prompt: Any, engine_of: EngineOf
) -> None:
    engine = engine_of(model, None, profile, attention="triton", attend=attend, chunk_tokens=33)
    # The interpreter is slow: twelve tokens fill the third group of the one and none of the other.
    answers = engine.generate([prompt(length) for length in (40, 19)], replace(ASKED, max_tokens=12))
    engine.close()
    for answer in answers:
        length = len(answer.prompt_token_ids)
        cuts = [0, *range(33, length, 33), length] if attend == "fresh" else []
        assert reads_exactly(model, profile, answer, exact_pairs(WINDOW, length + 12, cuts))
