"""An engine says what transformers says, whatever it runs at once, however it cuts, shares and takes pages back."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM, Gemma2Config, Gemma2ForCausalLM

from kvtuner.errors import ProfileError, RequestError, ServingError, UnsupportedModelError
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow
from kvtuner.runtime_loader.engine.generation import SamplingParameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import MakeTokenizer, ProfileOf

    from kvtuner.runtime_loader.engine.local_engine import LocalEngine

    EngineOf = Callable[..., LocalEngine]

LENGTHS = (1, 2, 15, 16, 17, 33, 100)
TOKENS = 12
ASKED = SamplingParameters(max_tokens=TOKENS, ignore_eos=True)


def test_every_architecture_says_what_transformers_says(
    family: str, models: Callable[..., Any], greedy: Any, prompt: Any, engine_of: EngineOf
) -> None:
    model, prompts = models(family), [prompt(length) for length in LENGTHS]
    wanted = [greedy(model, tokens, TOKENS) for tokens in prompts]
    engine = engine_of(model, chunk_tokens=40)
    assert engine.attention in ("cpu", "torch")
    answers = engine.generate(prompts, ASKED)
    assert all(each.allows(answer) for each, answer in zip(wanted, answers, strict=True))
    assert [answer.finish_reason for answer in answers] == ["length"] * len(LENGTHS)


def test_capped_scores_and_a_scale_of_its_own(greedy: Any, prompt: Any, engine_of: EngineOf) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, attn_logit_softcapping=2.0, query_pre_attn_scalar=7, sliding_window=4096,
        max_position_embeddings=512, initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    model.set_attn_implementation("eager")  # the one of transformers that caps
    wanted = [greedy(model, prompt(length), TOKENS) for length in LENGTHS]
    for attention in ("cpu", "torch"):
        answers = engine_of(model, attention=attention).generate([prompt(length) for length in LENGTHS], ASKED)
        assert all(each.allows(answer) for each, answer in zip(wanted, answers, strict=True)), attention


@pytest.mark.parametrize("chunk_tokens", [1, 7, 512])
@pytest.mark.parametrize("page_size", [1, 16, 64, 512])
@pytest.mark.parametrize("attention", ["cpu", "torch"])
def test_pages_and_chunks_of_every_size(
    attention: str, page_size: int, chunk_tokens: int, models: Any, greedy: Any, prompt: Any, engine_of: EngineOf
) -> None:
    model, prompts = models(), [prompt(length) for length in (1, 16, 63, 65)]
    wanted = [greedy(model, tokens, TOKENS) for tokens in prompts]
    engine = engine_of(model, attention=attention, page_size=page_size, chunk_tokens=chunk_tokens, max_requests=3)
    for _ in range(2):  # at the second time of the prefix cache
        answers = engine.generate(prompts, ASKED)
        assert all(each.allows(answer) for each, answer in zip(wanted, answers, strict=True))
    assert [answer.num_cached_tokens for answer in answers] == [
        (len(tokens) - 1) // page_size * page_size for tokens in prompts
    ]


def test_pages_of_512_tokens_are_shared_and_taken_back(
    models: Any, greedy: Any, prompt: Any, engine_of: EngineOf
) -> None:
    model, tokens = models(), prompt(1100)
    prompts = [tokens, tokens[:600], prompt(520, 1), tokens[:1030]]
    wanted = [greedy(model, asked, TOKENS) for asked in prompts]
    # Room for three pages: one request of three, or two that share their first.
    engine = engine_of(model, page_size=512, kv_memory=3 * 512 * engine_bytes(model))
    for asked, each in zip(prompts, wanted, strict=True):
        assert each.allows(engine.generate([asked], ASKED)[0])
    assert engine.generate([tokens[:600]], ASKED)[0].num_cached_tokens == 512
    state = engine.state
    assert state.num_free_pages + state.num_idle_pages == state.num_pages == 3


def test_one_that_hits_idle_pages_waits_for_the_others_it_needs(
    models: Any, greedy: Any, prompt: Any, engine_of: EngineOf
) -> None:
    model, beginning = models(), prompt(12)
    wanted = greedy(model, beginning + prompt(6, 2), 1)
    # Of six pages the beginning's three are idle, and two are of a request that runs. One is free, and those that the
    # next one hits are none that could be evicted for it.
    engine = engine_of(model, page_size=4, kv_memory=6 * 4 * engine_bytes(model))
    engine.generate([beginning], SamplingParameters(max_tokens=1, ignore_eos=True))
    first = engine.generation(engine.submit(prompt(5, 1), SamplingParameters(max_tokens=3, ignore_eos=True)))
    engine.step()
    assert (engine.state.num_free_pages, engine.state.num_idle_pages) == (1, 3)
    second = engine.generation(engine.submit(beginning + prompt(6, 2), SamplingParameters(max_tokens=1)))
    engine.step()
    assert engine.state.num_waiting == 1
    while engine.has_requests:
        engine.step()
    assert (first.finish_reason, second.num_cached) == ("length", 12)
    assert wanted.allows(second.answer)


def test_a_model_that_takes_no_other_attention_is_refused_by_name(engine_of: EngineOf) -> None:
    config = FalconConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=False)
    model = FalconForCausalLM(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=r"FalconForCausalLM (refuses another|does not go through)"):
        engine_of(model, context_length=64)
    assert model.config._attn_implementation == before


@pytest.mark.slow
def test_triton_under_its_interpreter(models: Any, greedy: Any, prompt: Any, engine_of: EngineOf) -> None:
    model = models("qwen3-qk-norm")
    wanted = [greedy(model, prompt(length), 4) for length in (1, 5, 18)]
    engine = engine_of(model, attention="triton", chunk_tokens=11)
    answers = engine.generate([prompt(length) for length in (1, 5, 18)], SamplingParameters(max_tokens=4))
    assert engine.attention == "triton"
    assert all(each.allows(answer) for each, answer in zip(wanted, answers, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("length", [1000, 4000])
def test_long_prompts_beside_short_ones(
    length: int, models: Any, greedy: Any, prompt: Any, engine_of: EngineOf
) -> None:
    model, prompts = models(), [prompt(length), prompt(9), prompt(length // 2)]
    wanted = [greedy(model, tokens, TOKENS) for tokens in prompts]
    answers = engine_of(model).generate(prompts, ASKED)
    assert all(each.allows(answer) for each, answer in zip(wanted, answers, strict=True))


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_full_pool_retracts_and_loses_no_token(
    page_size: int, models: Any, greedy: Any, prompt: Any, engine_of: EngineOf
) -> None:
    model, prompts = models(), [prompt(20, seed) for seed in range(6)]
    wanted = [greedy(model, tokens, 40) for tokens in prompts]
    engine = engine_of(model, page_size=page_size, kv_memory=160 * engine_bytes(model), prefix_cache_tokens=32)
    answers = engine.generate(prompts, SamplingParameters(max_tokens=40, ignore_eos=True))
    assert engine.state.num_retracted > 0
    assert all(each.allows(answer) for each, answer in zip(wanted, answers, strict=True))
    assert engine.state.num_free_pages + engine.state.num_idle_pages == engine.state.num_pages


def engine_bytes(model: Any) -> int:
    """The bytes of a token of an unquantized float32 model."""
    config = model.config
    return 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * (
        config.hidden_size // config.num_attention_heads
    )  # fmt: skip


def test_the_pool_takes_the_memory_that_it_is_given(models: Any, profile_of: ProfileOf, engine_of: EngineOf) -> None:
    model = models()
    layers = [LayerQuantization(4, 2), LayerQuantization(16, 16), LayerQuantization(8, 3)]
    for window in (ExactWindow(), ExactWindow(8, 2)):
        engine = engine_of(model, None, profile_of(model.config, layers, window=window), kv_memory=2**20)
        token = engine.pool.shape.bytes_per_token
        assert token == engine.profile.bytes_per_token() + 2 * 2 * 16 * (4 - 2)  # 16 bits are float32 here
        assert 2**20 - 16 * token < engine.pool.num_bytes <= 2**20
        assert engine.pool.num_bytes == engine.pool.shape.num_bytes(engine.pool.num_pages)
    in_16_bits = copy.deepcopy(model).to(torch.bfloat16)
    engine = engine_of(in_16_bits, None, profile_of(model.config, layers))
    assert engine.pool.shape.bytes_per_token == engine.profile.bytes_per_token()
    with pytest.raises(ServingError, match="give more, or fewer requests"):
        engine_of(model, kv_memory=1000)


def test_a_batch_says_what_each_says_alone(models: Any, prompt: Any, engine_of: EngineOf) -> None:
    model = models()
    sampling = [
        SamplingParameters(max_tokens=TOKENS, temperature=0.7 + seed / 10, seed=seed, logprobs=2, ignore_eos=True)
        for seed in range(8)
    ]
    prompts = [prompt(5 + 9 * index) for index in range(8)]
    engine = engine_of(model, prefix_cache_tokens=0)
    together = engine.generate(prompts, sampling)
    for tokens, own, answer in zip(prompts, sampling, together, strict=True):
        (alone,) = engine.generate([tokens], own)
        assert alone.token_ids == answer.token_ids
        for one, other in zip(alone.logprobs, answer.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_log_probabilities_are_the_models_own(models: Any, prompt: Any, engine_of: EngineOf) -> None:
    model, tokens = models(), prompt(40)
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    engine = engine_of(model, chunk_tokens=7)
    asked = SamplingParameters(max_tokens=2, prompt_logprobs=3, logprobs=3, temperature=0.1)
    for _ in range(2):  # the prefix cache has the prompt at the second time
        (answer,) = engine.generate([tokens], asked)
        assert [each.token for each in answer.prompt_logprobs] == tokens[1:]
        found = torch.tensor([each.logprob for each in answer.prompt_logprobs])
        assert torch.allclose(found, wanted[range(39), tokens[1:]], atol=1e-4)
        first = answer.logprobs[0]
        assert first.token == answer.token_ids[0]
        assert [token for token, _ in first.top] == wanted[-1].topk(3).indices.tolist()
        assert first.logprob == pytest.approx(float(wanted[-1, first.token]), abs=1e-4)


def test_prefixes_are_shared_while_they_are_computed_too(models: Any, prompt: Any, engine_of: EngineOf) -> None:
    model, shared = models(), prompt(64)
    engine = engine_of(model, page_size=16, chunk_tokens=64)
    answers = engine.generate([[*shared, 5 + index] for index in range(4)], ASKED)
    assert [answer.num_cached_tokens for answer in answers] == [0, 64, 64, 64]
    assert engine.state.num_cached_tokens == 3 * 64
    assert engine.state.num_prompt_tokens == 64 + 4


def test_a_pinned_beginning_outlives_what_evicts_all_else(models: Any, prompt: Any, engine_of: EngineOf) -> None:
    model = models()
    engine = engine_of(model, page_size=4, kv_memory=80 * engine_bytes(model))
    assert engine.pin(prompt(18)) == 16
    for seed in range(1, 8):
        engine.generate([prompt(40, seed)], SamplingParameters(max_tokens=4))
    (answer,) = engine.generate([prompt(18)], SamplingParameters(max_tokens=1))
    assert answer.num_cached_tokens == 16
    with pytest.raises(RequestError, match="beside what is pinned"):
        engine.generate([prompt(62)], SamplingParameters(max_tokens=4))
    engine.unpin_all()
    engine.generate([prompt(62)], SamplingParameters(max_tokens=4))


def test_text_ends_before_its_stop_and_at_the_models_end(
    models: Any, make_tokenizer: MakeTokenizer, engine_of: EngineOf
) -> None:
    model, tokenizer = models(), make_tokenizer()
    engine = engine_of(model, tokenizer)
    (whole,) = engine.generate("the fox counts", SamplingParameters(max_tokens=30, ignore_eos=True))
    assert whole.text == tokenizer.decode(whole.token_ids, skip_special_tokens=True)
    stop = whole.text[5:8]
    (stopped,) = engine.generate("the fox counts", SamplingParameters(max_tokens=30, ignore_eos=True, stop=(stop,)))
    assert (stopped.text, stopped.finish_reason, stopped.stop_text) == (
        whole.text[: whole.text.index(stop)], "stop", stop
    )  # fmt: skip
    end = whole.token_ids[6]
    (ended,) = engine.generate("the fox counts", SamplingParameters(max_tokens=30, stop_token_ids=(end,)))
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
    assert ended.text == tokenizer.decode(ended.token_ids[:-1], skip_special_tokens=True)
    parts = list(engine.stream("the fox counts", SamplingParameters(max_tokens=30, ignore_eos=True)))
    assert "".join(part.text for part in parts) == whole.text
    assert [part.finish_reason for part in parts] == [None] * 29 + ["length"]


def test_a_stream_that_is_left_frees_its_pages(models: Any, prompt: Any, engine_of: EngineOf) -> None:
    engine = engine_of(models())
    stream = engine.stream(prompt(30), ASKED)
    next(stream)
    assert engine.state.num_running == 1
    stream.close()
    assert not engine.has_requests
    assert engine.state.num_free_pages + engine.state.num_idle_pages == engine.state.num_pages


def test_numbers_that_are_none_end_their_request_alone(models: Any, prompt: Any, engine_of: EngineOf) -> None:
    model = models(seed=1)
    engine = engine_of(model)
    weight = model.get_input_embeddings().weight
    kept = weight[7].clone()
    with torch.no_grad():
        weight[7] = torch.nan
        bad, good = engine.generate([[7, 8], [9, 10]], ASKED)
        weight[7] = kept
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert bad.error is not None and "wider dtype" in bad.error


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (([], ASKED), "at least one token"),
        (([400], ASKED), "outside of the vocabulary of 320"),
        (("text", ASKED), "needs a tokenizer"),
        (([2] * 4600, ASKED), "more than the context of 4608"),
        (([2], SamplingParameters(stop=("x",))), "needs a tokenizer"),
    ],
)
def test_a_request_that_cannot_be_answered_is_named(
    asked: tuple[Any, Any], message: str, models: Any, engine_of: EngineOf
) -> None:
    engine = engine_of(models())
    with pytest.raises(RequestError, match=message):
        engine.submit(*asked)
    assert not engine.has_requests


def test_the_model_is_given_back(models: Any, prompt: Any, greedy: Any, engine_of: EngineOf) -> None:
    model = models()
    before = greedy(model, prompt(5), 3)
    engine = engine_of(model)
    with pytest.raises(UnsupportedModelError, match="close that before"):
        greedy(model, prompt(5), 3)
    engine.close()
    assert greedy(model, prompt(5), 3) == before


def test_a_context_beyond_the_calibrated_positions_is_told(
    models: Any, profile_of: ProfileOf, engine_of: EngineOf
) -> None:
    model = models()
    profile = profile_of(model.config, [LayerQuantization(4, 4)] * 3, last_position=255)
    with pytest.warns(UserWarning, match="calibrated over 256 positions, but the context here is 4608"):
        engine_of(model, None, profile)
    engine_of(model, None, profile, context_length=256)


def test_a_profile_of_another_model_is_refused(models: Any, profile_of: ProfileOf, engine_of: EngineOf) -> None:
    profile = profile_of(models("qwen2-bias").config, [LayerQuantization(4, 4)] * 2)
    with pytest.raises(ProfileError):
        engine_of(models(), None, profile)
