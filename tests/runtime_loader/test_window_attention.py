"""Chunks of several tokens beside an exact window: each reads its own, against a float64 forward without a cache."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteSWAConfig, GraniteSWAForCausalLM, PreTrainedModel
from uncached_forward import logits_in_chunks, uncached_logits

from kvtuner.errors import UnsupportedModelError
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.precision import SIDES, ExactWindow
from kvtuner.read_plan_names import READ_PLANS
from kvtuner.runtime_loader.packed_layer import MAX_DRAFT_TOKENS
from kvtuner.runtime_loader.transformers_cache import KVTunerCache
from kvtuner.runtime_loader.window_attention import IndexedMask

ModelOf = Callable[[str, torch.dtype], PreTrainedModel]
ProfileOf = Callable[..., Profile]

TOKENS = 41
WINDOWS = (ExactWindow(1), ExactWindow(4), ExactWindow(5, 2), ExactWindow(9, 12), ExactWindow(64, 3))
CUTS = ([0, 11, 13, 14, 23, 32, 34, TOKENS], [0, 1, 3, 17, 18, 19, TOKENS], [0, 2, TOKENS])
LAYERS = [LayerQuantization(2, 4), LayerQuantization(4, 16)]
TOLERANCE = 1e-9  # both sides run the same float32 quantizer on float64 activations


def prompt(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def exact_reads(read_plan: str, window: ExactWindow, cuts: list[int]) -> Tensor:
    """Mark the (query, key) pairs that are exact, [tokens, tokens], in the words of the format."""
    tokens = cuts[-1]
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    exact = (query - key < window.residual_length) | (key < window.sinks)
    of_chunk = torch.bucketize(torch.arange(tokens), torch.tensor(cuts[1:]), right=True)
    same = of_chunk[:, None] == of_chunk[None, :]
    if read_plan == "hit":
        exact = exact | same
    return exact | (same & (of_chunk == 0)[:, None]) if read_plan == "decode" else exact


def specs_of(profile: Profile) -> list[dict[str, Any]]:
    return [{side: profile.quant_spec(layer, side) for side in SIDES} for layer in range(len(profile.pairs))]


def owned(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose attention may be changed."""
    return copy.deepcopy(model)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("read_plan", READ_PLANS)
def test_each_token_of_a_chunk_reads_the_window_of_its_own_position(
    read_plan: Any, window: ExactWindow, cuts: list[int], model_name: str, model_of: ModelOf, profile_of: ProfileOf
) -> None:
    model, tokens = owned(model_of(model_name, torch.float64)), prompt(2, TOKENS)
    profile = profile_of(model.config, LAYERS, window=window)
    cache = KVTunerCache.from_profile(profile, model.config, read_plan)
    with cache.attending(model):
        found = logits_in_chunks(model, cache, tokens, cuts)
    expected = uncached_logits(model, tokens, specs_of(profile), exact_reads(read_plan, window, cuts))
    assert (found - expected).abs().max() <= TOLERANCE
    off_by_one = exact_reads(read_plan, ExactWindow(window.residual_length + 1, window.sinks), cuts)
    if not torch.equal(off_by_one.tril(), exact_reads(read_plan, window, cuts).tril()):
        other = uncached_logits(model, tokens, specs_of(profile), off_by_one)
        assert (found - other).abs().max() > 1e-3, "the test would not see a window that is off by one"


@pytest.mark.parametrize("read_plan", READ_PLANS)
def test_candidates_that_are_removed_again_leave_no_trace(
    read_plan: Any, model_of: ModelOf, profile_of: ProfileOf
) -> None:
    model, tokens = owned(model_of("llama-gqa-64", torch.float64)), prompt(2, TOKENS)
    window = ExactWindow(4, 2)
    profile = profile_of(model.config, LAYERS, window=window)
    cache = KVTunerCache.from_profile(profile, model.config, read_plan)
    parts, done, cuts = [], 0, [0]
    with cache.attending(model):
        for kept, wrong in ((9, 0), (1, 8), (3, 2), (1, 1), (2, 12), (7, 0), (1, 9), (5, 3), (12, 1)):
            chunk = torch.cat((tokens[:, done : done + kept], prompt(2, wrong, seed=5)), dim=1)
            parts.append(model(chunk, past_key_values=cache).logits[:, :kept])
            cache.crop(-wrong)
            done += kept
            cuts.append(done)
    expected = uncached_logits(model, tokens, specs_of(profile), exact_reads(read_plan, window, cuts))
    assert done == TOKENS
    assert (torch.cat(parts, dim=1) - expected).abs().max() <= TOLERANCE


def test_copies_are_kept_for_as_many_candidates_and_no_more(model_of: ModelOf, profile_of: ProfileOf) -> None:
    model = owned(model_of("llama-gqa-64", torch.float64))
    profile = profile_of(model.config, LAYERS, window=ExactWindow(5, 2))
    cache = KVTunerCache.from_profile(profile, model.config)
    bytes_of_token = 3 * 2 * 64 * 8  # three packed sides, two heads of 64 channels, float64
    with cache.attending(model):
        for tokens, kept in ((100, 5 + MAX_DRAFT_TOKENS), (3, 5 + 2), (1, 5)):
            model(prompt(1, tokens), past_key_values=cache)
            assert cache.window_bytes == (2 + kept) * bytes_of_token


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 7}, {"prompt_lookup_num_tokens": 6}], ids=str)
def test_generate_in_chunks_and_with_candidates_writes_what_it_writes_token_by_token(
    options: dict[str, int], model_of: ModelOf, profile_of: ProfileOf
) -> None:
    model = owned(model_of("llama-gqa-64", torch.float64))
    tokens = prompt(1, 6).repeat(1, 4)  # something to look up
    profile = profile_of(model.config, LAYERS, window=ExactWindow(6, 1))
    chunks = {"prefill_chunk_size": 1} if "prefill_chunk_size" in options else {}

    def generate(**given: int) -> Tensor:
        cache = KVTunerCache.from_profile(profile, model.config, "cache" if chunks else "decode")
        with cache.attending(model):
            return model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                past_key_values=cache,
                max_new_tokens=30,
                do_sample=False,
                **given,
            )

    assert torch.equal(generate(**options), generate(**chunks))


def capped_model() -> Gemma2ForCausalLM:
    """A model whose scores have a cap, and whose own attention is eager."""
    torch.manual_seed(3)
    config = Gemma2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=1.5,
        max_position_embeddings=128,
        sliding_window=128,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config).double().eval()


def test_padding_is_read_by_nobody(model_of: ModelOf, profile_of: ProfileOf) -> None:
    model = owned(model_of("qwen2-mqa-80", torch.float64))
    profile = profile_of(model.config, LAYERS, window=ExactWindow(5))
    tokens, padding = prompt(2, 23), 4
    padded = torch.cat((torch.zeros(2, padding, dtype=torch.long), tokens), dim=1)
    padded[0, :padding] = prompt(1, padding, seed=3)[0]  # of the other sequence alone
    mask = torch.ones_like(padded)
    mask[1, :padding] = 0
    positions = torch.stack((torch.arange(27), (torch.arange(27) - padding).clamp(min=0)))
    cache = KVTunerCache.from_profile(profile, model.config, "cache")
    parts = []
    with cache.attending(model):
        for start, stop in ((0, 3), (3, 12), (12, 14), (14, 27)):
            chunk, up_to = slice(start, stop), mask[:, :stop]
            output = model(
                padded[:, chunk], attention_mask=up_to, position_ids=positions[:, chunk], past_key_values=cache
            )
            parts.append(output.logits)
    found, window = torch.cat(parts, dim=1), profile.window
    for row, of_row in ((0, padded[:1]), (1, tokens[1:])):
        count = of_row.shape[1]
        expected = uncached_logits(model, of_row, specs_of(profile), exact_reads("cache", window, [0, count]))
        assert (found[row : row + 1, -count:] - expected).abs().max() <= TOLERANCE


def test_padding_under_a_logit_cap_is_read_by_nobody(profile_of: ProfileOf) -> None:
    model, tokens, padding = capped_model(), prompt(1, 23), 4
    profile = profile_of(model.config, LAYERS, window=ExactWindow(5))
    padded = torch.cat((torch.zeros(1, padding, dtype=torch.long), tokens), dim=1)
    mask = (torch.arange(27) >= padding).long().unsqueeze(0)
    positions = (torch.arange(27) - padding).clamp(min=0).unsqueeze(0)
    caches = [KVTunerCache.from_profile(profile, model.config, "cache", context_length=TOKENS) for _ in "ab"]
    with caches[0].attending(model):
        expected = logits_in_chunks(model, caches[0], tokens, [0, 8, 10, 23])
    parts = []
    with caches[1].attending(model):
        for start, stop in ((0, 3), (3, 12), (12, 14), (14, 27)):
            chunk, up_to = slice(start, stop), mask[:, :stop]
            output = model(
                padded[:, chunk], attention_mask=up_to, position_ids=positions[:, chunk], past_key_values=caches[1]
            )
            parts.append(output.logits)
    assert (torch.cat(parts, dim=1)[:, padding:] - expected).abs().max() <= TOLERANCE


def test_a_mask_with_copies_goes_where_a_layer_is() -> None:
    """Accelerate moves what a layer is called with to the layer's device by this method."""
    read, tokens = torch.ones(2, 1, 3, 9, dtype=torch.bool), torch.ones(2, 1, 3, 7, dtype=torch.bool)
    moved = IndexedMask(read, tokens).to("meta", non_blocking=True)
    assert (moved.read.device.type, moved.read.shape) == ("meta", read.shape)
    assert (moved[:, 0].device.type, moved[:, 0].shape) == ("meta", (2, 3, 7))


def test_logit_caps_are_kept(profile_of: ProfileOf) -> None:
    model, tokens = capped_model(), prompt(2, TOKENS)
    profile = profile_of(model.config, LAYERS, window=ExactWindow(5, 1))
    cache, singles = [KVTunerCache.from_profile(profile, model.config, "cache", context_length=TOKENS) for _ in "ab"]
    with cache.attending(model):
        assert model.config._attn_implementation != "eager"
        found = logits_in_chunks(model, cache, tokens, CUTS[0])
    assert model.config._attn_implementation == "eager"
    expected = logits_in_chunks(model, singles, tokens, range(TOKENS + 1))
    # Transformers' own attention takes its softmax in float32.
    assert (found - expected).abs().max() <= 1e-4
    model.config.attn_logit_softcapping = None
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    cache.reset()
    with cache.attending(model):
        assert (logits_in_chunks(model, cache, tokens, CUTS[0]) - expected).abs().max() > 1e-2


def test_attending_gives_the_model_its_attention_back_whatever_happens(
    model_of: ModelOf, profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = owned(model_of("llama-gqa-64", torch.float64))
    before = model.config._attn_implementation
    windowed = KVTunerCache.from_profile(profile_of(model.config, LAYERS, window=ExactWindow(3)), model.config)
    plain = KVTunerCache.from_profile(profile_of(model.config, LAYERS, window=ExactWindow(0, 3)), model.config)
    with plain.attending(model):
        assert model.config._attn_implementation == before
    with pytest.raises(ZeroDivisionError), windowed.attending(model), windowed.attending(model):
        assert model.config._attn_implementation != before
        _ = 1 // 0
    assert model.config._attn_implementation == before
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda _: False)
    with pytest.raises(UnsupportedModelError, match="does not go through"), windowed.attending(model):
        pass


def test_attention_sinks_take_part_in_every_chunk(profile_of: ProfileOf) -> None:
    torch.manual_seed(3)
    config = GraniteSWAConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=128,
        layer_types=["full_attention"] * 2,
    )
    model = GraniteSWAForCausalLM(config).eval()
    profile, tokens, found = profile_of(config, LAYERS, window=ExactWindow(5)), prompt(1, 16), []
    for cuts in ((0, 8, 12, 16), (0, 8, *range(9, 17))):
        cache = KVTunerCache.from_profile(profile, config, context_length=TOKENS)
        with torch.no_grad(), cache.attending(model):
            chunks = [model(tokens[:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise(cuts)]
        found.append(torch.cat(chunks, dim=1))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e9)
        without = model(tokens).logits
    assert (found[0] - without).abs().max() > 0.01
