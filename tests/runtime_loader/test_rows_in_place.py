"""Rows that are read in place give what rows that are read back give, by every plan, window, cut and batch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel
from uncached_forward import logits_in_chunks

from kvtuner.errors import CacheError, ServingError
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.precision import NO_WINDOW, ExactWindow
from kvtuner.read_plan_names import READ_PLANS
from kvtuner.runtime_loader.cpu.library import compiler
from kvtuner.runtime_loader.cpu.native_attention import NativeAttention
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

ModelOf = Callable[[str, torch.dtype], PreTrainedModel]
ProfileOf = Callable[..., Profile]

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

TOKENS = 90
BY_CHANNEL: list[dict[str, Any]] = [
    {"window": window, "token_group": 16} for window in (ExactWindow(16), ExactWindow(19, 2))
]
STORED: list[dict[str, Any]] = [
    *(
        {"window": window}
        for window in (NO_WINDOW, ExactWindow(1), ExactWindow(5, 2), ExactWindow(70), ExactWindow(0, 3))
    ),
    *BY_CHANNEL,
]
CUTS = ([0, 11, 13, 14, 23, 32, 34, TOKENS], [0, 1, 3, 17, 18, 19, TOKENS], [0, 2, 80, 81, TOKENS])
LAYERS = [LayerQuantization(4, 3), LayerQuantization(16, 16)]
"""A packed layer, whose inputs are the same bits either way, so that no code differs, and one that adds no codes."""
ONE_SIDE = [LayerQuantization(4, 16), LayerQuantization(16, 16)]
TOLERANCE = 1e-4  # of logits of some units; float32 on both sides. A window that is off by one gives 1e-3 and more.


def prompt(batch: int, length: int) -> Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def model(model_of: ModelOf) -> PreTrainedModel:
    """A model of grouped queries whose attention may be changed."""
    return copy.deepcopy(model_of("llama-gqa-64", torch.float32))


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of the library, by name."""
    calls: list[str] = []
    for name in ("decode", "extend"):
        method = getattr(NativeAttention, name)

        def counted(self: Any, *args: Any, _name: str = name, _method: Any = method, **kwargs: Any) -> Tensor:
            calls.append(_name)
            found: Tensor = _method(self, *args, **kwargs)
            return found

        monkeypatch.setattr(NativeAttention, name, counted)
    return calls


def both_ways(model: PreTrainedModel, profile: Profile, read_plan: Any, run: Callable[[KVTunerCache], Tensor]) -> float:
    """The largest difference between rows read in place and rows read back."""
    found = []
    for in_place in (True, False):
        cache = KVTunerCache.from_profile(profile, model.config, read_plan)
        with cache.attending(model, in_place=in_place):
            found.append(run(cache))
    return float((found[0] - found[1]).abs().max())


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("read_plan", READ_PLANS)
@pytest.mark.parametrize("layers", [LAYERS, ONE_SIDE], ids=["both sides", "one side"])
def test_chunks_of_every_plan_and_window(
    layers: list[LayerQuantization], read_plan: Any, stored: dict[str, Any], cuts: list[int], model: PreTrainedModel,
    attended: list[str], profile_of: ProfileOf,
) -> None:  # fmt: skip
    profile, tokens = profile_of(model.config, layers, **stored), prompt(2, TOKENS)
    assert both_ways(model, profile, read_plan, lambda cache: logits_in_chunks(model, cache, tokens, cuts)) < TOLERANCE
    firsts = {"hit": cuts[:-1], "decode": [0], "cache": []}[read_plan]  # of chunks that read themselves as they came
    chunks = sum(last - first > 1 or first in firsts for first, last in itertools.pairwise(cuts))
    assert attended.count("extend") == chunks * len(LAYERS)
    assert attended.count("decode") == (len(cuts) - 1 - chunks) * len(LAYERS)


@pytest.mark.parametrize("stored", [{"window": NO_WINDOW}, {"window": ExactWindow(6)}, BY_CHANNEL[0]], ids=str)
def test_sequences_padded_on_the_left(stored: dict[str, Any], model: PreTrainedModel, profile_of: ProfileOf) -> None:
    profile, tokens = profile_of(model.config, LAYERS, **stored), prompt(3, 30)
    is_token = torch.arange(30) >= torch.tensor([[0], [7], [29]])

    def run(cache: KVTunerCache) -> Tensor:
        parts = []
        for first, last in ((0, 20), (20, 24), (24, 25), (25, 30)):
            output = model(
                tokens[:, first:last],
                attention_mask=is_token[:, :last].long(),
                position_ids=(is_token.cumsum(1) - 1).clamp(min=0)[:, first:last],
                past_key_values=cache,
            )
            parts.append(output.logits)
        return torch.cat(parts, dim=1)[is_token]

    assert both_ways(model, profile, "decode", run) < TOLERANCE


@pytest.mark.parametrize("stored", [{"window": ExactWindow(5, 2)}, *BY_CHANNEL], ids=str)
def test_what_is_removed_again_leaves_no_trace(
    stored: dict[str, Any], model: PreTrainedModel, profile_of: ProfileOf
) -> None:
    profile, tokens = profile_of(model.config, LAYERS, **stored), prompt(2, TOKENS)

    def run(cache: KVTunerCache) -> Tensor:
        parts, done = [], 0
        for kept, wrong in ((9, 0), (1, 8), (3, 2), (1, 1), (2, 12), (7, 0), (1, 9)):
            chunk = torch.cat((tokens[:, done : done + kept], prompt(2, wrong)), dim=1)
            parts.append(model(chunk, past_key_values=cache).logits[:, :kept])
            cache.crop(-wrong)
            done += kept
        return torch.cat(parts, dim=1)

    assert both_ways(model, profile, "decode", run) < TOLERANCE


def test_capped_scores(profile_of: ProfileOf) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, sliding_window=512, max_position_embeddings=256,
        attn_logit_softcapping=3.0, query_pre_attn_scalar=2,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    profile, tokens = profile_of(config, LAYERS, window=ExactWindow(5)), prompt(1, 40)
    run = logits_in_chunks
    assert both_ways(model, profile, "decode", lambda cache: run(model, cache, tokens, [0, 9, 10, 30, 40])) < TOLERANCE


def test_generate_writes_the_same_in_16_bits(model_of: ModelOf, profile_of: ProfileOf, attended: list[str]) -> None:
    model = copy.deepcopy(model_of("llama-gqa-64", torch.bfloat16))
    profile, tokens = profile_of(model.config, [LayerQuantization(8, 8)] * 2), prompt(2, 12)

    def run(in_place: bool) -> Tensor:
        cache = KVTunerCache.from_profile(profile, model.config)
        with cache.attending(model, in_place=in_place):
            written = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, max_new_tokens=12,
                do_sample=False, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        return torch.stack(written.logits).float()

    ours, theirs = run(True), run(False)
    assert attended == ["extend"] * 2 + ["decode"] * 22
    assert (ours[:2] - theirs[:2]).abs().max() < 0.05 * theirs.abs().max()


def test_the_default_is_in_place_where_it_can_be(
    model: PreTrainedModel, model_of: ModelOf, profile_of: ProfileOf, attended: list[str]
) -> None:
    profile = profile_of(model.config, LAYERS)
    for each, is_in_place in ((model, True), (copy.deepcopy(model_of("llama-gqa-64", torch.float64)), False)):
        cache, before = KVTunerCache.from_profile(profile, model.config), each.config._attn_implementation
        with cache.attending(each):
            each(prompt(1, 5), past_key_values=cache)
        assert bool(attended) == is_in_place
        assert each.config._attn_implementation == before
        attended.clear()
    fp8 = KVTunerCache.fp8(model.config)
    with fp8.attending(model):
        model(prompt(1, 5), past_key_values=fp8)
    assert not attended


def test_what_cannot_be_read_in_place_is_refused(
    model: PreTrainedModel, model_of: ModelOf, profile_of: ProfileOf
) -> None:
    double = copy.deepcopy(model_of("llama-gqa-64", torch.float64))
    profile = profile_of(model.config, LAYERS, window=ExactWindow(4, 2))
    cache = KVTunerCache.from_profile(profile, model.config)
    with pytest.raises(ServingError, match=r"in place: there is none for torch\.float64"):
        cache.attending(double, in_place=True).__enter__()
    with pytest.raises(ServingError, match="there is none for fp8"):
        KVTunerCache.fp8(model.config).attending(model, in_place=True).__enter__()
    tokens, is_token = prompt(2, 6), torch.ones(2, 6, dtype=torch.long)
    with cache.attending(model):
        is_token[1, 0] = 0
        with pytest.raises(CacheError, match="the sinks of a padded batch count its padding"):
            model(tokens, attention_mask=is_token, past_key_values=cache)
        cache.reset()
        is_token[1, 3] = 0
        with pytest.raises(CacheError, match="pad on the left"):
            model(tokens, attention_mask=is_token, past_key_values=cache)
