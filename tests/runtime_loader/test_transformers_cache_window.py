"""Caches with an exact window: against an uncached forward that picks what each query reads exactly, in float64."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from uncached_forward import logits_in_chunks, simulate, uncached_logits

from kvtuner.calibration.batches import Batch
from kvtuner.calibration.forward.attention_hook import register_hook
from kvtuner.calibration.forward.chain import DecoderChain
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.forward.simulator import LayerSpec, Simulator
from kvtuner.errors import CacheError
from kvtuner.evaluation.cache_scheme import ProfileScheme
from kvtuner.exported_configs.profile.build import LayerQuantization, uniform_profile
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import SIDES, ExactWindow, PrecisionPair, ScaleLayout, row_bytes
from kvtuner.quant import QuantSpec
from kvtuner.read_plan_names import READ_PLANS
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

ModelOf = Callable[[str, torch.dtype], PreTrainedModel]
ProfileOf = Callable[..., Profile]

PROMPT, TOKENS = 11, 29
WINDOWS = (
    ExactWindow(1),
    ExactWindow(5),
    ExactWindow(PROMPT + 2),
    ExactWindow(0, 3),
    ExactWindow(4, 2),
    ExactWindow(64),
)
LAYERS = [LayerQuantization(2, 4), LayerQuantization(4, 16)]
TOLERANCE = 1e-9  # both sides run the same float32 quantizer on float64 activations


def prompt(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def steps(read_plan: str) -> list[int]:
    """The cuts of a prompt and single tokens after it; by `cache` the prompt is read token by token too."""
    return list(range(TOKENS + 1)) if read_plan == "cache" else [0, *range(PROMPT, TOKENS + 1)]


def exact_reads(read_plan: str, window: ExactWindow, tokens: int = TOKENS) -> Tensor:
    """Mark the (query, key) pairs that are exact, [tokens, tokens], in the words of the design."""
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    exact = (query - key < window.residual_length) | (key < window.sinks)
    if read_plan != "cache":
        exact = exact | (query < PROMPT)
    return exact | (query == key) if read_plan == "hit" else exact


def specs_of(profile: Profile) -> list[dict[str, Any]]:
    return [{side: profile.quant_spec(layer, side) for side in SIDES} for layer in range(len(profile.pairs))]


class WindowedReads(DynamicCache):
    """Keeps exact keys and values and returns what one query reads: the behaviour without its storage."""

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self.window, self.specs = profile.window, specs_of(profile)

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        past = self.get_seq_length(layer_idx)
        both = super().update(k, v, layer_idx, *args, **kwargs)
        if not past:
            return both
        mask = exact_reads("cache", self.window, past + 1)[-1][:, None]
        return tuple(
            torch.where(mask, x, simulate(self.specs[layer_idx][side], x)) for side, x in zip("kv", both, strict=True)
        )


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("read_plan", READ_PLANS)
def test_each_token_reads_the_window_of_its_position_exactly_and_the_rest_from_rows(
    read_plan: Any, window: ExactWindow, model_name: str, model_of: ModelOf, profile_of: ProfileOf
) -> None:
    model, tokens = model_of(model_name, torch.float64), prompt(2, TOKENS)
    profile = profile_of(model.config, LAYERS, window=window)
    cache = KVTunerCache.from_profile(profile, model.config, read_plan)
    found = logits_in_chunks(model, cache, tokens, steps(read_plan))
    expected = uncached_logits(model, tokens, specs_of(profile), exact_reads(read_plan, window))
    assert (found - expected).abs().max() <= TOLERANCE
    off_by_one = ExactWindow(window.residual_length + 1, window.sinks)
    if window.residual_length < TOKENS and (read_plan, window) != ("hit", ExactWindow(0, 3)):
        other = uncached_logits(model, tokens, specs_of(profile), exact_reads(read_plan, off_by_one))
        assert (found - other).abs().max() > 1e-3, "the test would not see a window that is off by one"


@pytest.mark.parametrize("window", [ExactWindow(5), ExactWindow(PROMPT + 2, 3)], ids=str)
@pytest.mark.parametrize("read_plan", ["decode", "cache"])
def test_the_cache_diverges_as_the_simulator_says(
    read_plan: Any, window: ExactWindow, model_name: str, model_of: ModelOf, profile_of: ProfileOf
) -> None:
    model, tokens = copy.deepcopy(model_of(model_name, torch.float64)), prompt(1, TOKENS)
    profile = profile_of(model.config, LAYERS, window=window)
    exact = model(tokens, use_cache=False).logits.log_softmax(-1)
    cache = KVTunerCache.from_profile(profile, model.config, read_plan)
    read = logits_in_chunks(model, cache, tokens, steps(read_plan)).log_softmax(-1)
    model.set_attn_implementation(register_hook())
    chain = DecoderChain(model, ModelGeometry.from_config(model.config))
    plan = ReadPlan(read_plan, 0 if read_plan == "cache" else PROMPT)
    specs = {
        layer: LayerSpec(profile.quant_spec(layer, "k"), profile.quant_spec(layer, "v"), profile.window)
        for layer in range(2)
    }
    batch = Batch(0, tokens, torch.arange(TOKENS).unsqueeze(0))
    scores = Simulator(chain, [batch], plan).measure(specs)
    kl = (exact.exp() * (exact - read)).sum(-1)[:, plan.split :]
    assert kl.mean() > 1e-3
    torch.testing.assert_close(scores.kl, kl, rtol=1e-3, atol=1e-6)  # the simulator compares logits in float32


def test_after_a_crop_only_copies_at_hand_are_read(model_of: ModelOf, profile_of: ProfileOf) -> None:
    model, tokens = model_of("llama-gqa-64", torch.float64), prompt(2, TOKENS)
    # Sinks are first tokens again, where a crop took some.
    for window, kept, is_lost in (
        (ExactWindow(5, 2), 17, True),
        (ExactWindow(5, 4), 3, False),
        (ExactWindow(), 17, False),
    ):
        profile = profile_of(model.config, LAYERS, window=window)
        cache = KVTunerCache.from_profile(profile, model.config, "cache")
        logits_in_chunks(model, cache, tokens, range(21))
        cache.crop(kept - 20)
        found = logits_in_chunks(model, cache, tokens[:, kept:], range(TOKENS - kept + 1))
        at_hand = exact_reads("cache", window)
        # The copies at the crop were of tokens 15 to 19 and the sinks.
        lost = torch.arange(TOKENS)[None, :].lt(15) & torch.arange(TOKENS)[None, :].ge(window.sinks)
        lost = lost & torch.arange(TOKENS)[None, :].lt(kept) & torch.arange(TOKENS)[:, None].ge(kept)
        expected = uncached_logits(model, tokens, specs_of(profile), at_hand & ~lost)
        unbroken = uncached_logits(model, tokens, specs_of(profile), at_hand)
        # Tokens before the crop read their whole window; those after it, only what was at hand.
        assert (found - expected[:, kept:]).abs().max() <= TOLERANCE
        assert bool((found - unbroken[:, kept:]).abs().max() > 1e-3) == is_lost


def test_selections_copies_and_resets_take_the_window_along(model_of: ModelOf, profile_of: ProfileOf) -> None:
    model, tokens = model_of("llama-gqa-64", torch.float64), prompt(2, TOKENS)
    profile = profile_of(model.config, LAYERS, window=ExactWindow(5, 2))
    cache = KVTunerCache.from_profile(profile, model.config)
    cuts = steps("decode")
    logits_in_chunks(model, cache, tokens[:, :20], [cut for cut in cuts if cut <= 20])
    later = tokens[:, 20:]
    expected = logits_in_chunks(model, copy.deepcopy(cache), later, range(TOKENS - 19))
    for turn, rows in (
        (lambda turned: turned.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda turned: turned.batch_select_indices(torch.tensor([1])), [1]),
        (lambda turned: turned.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    ):
        turned = copy.deepcopy(cache)
        turn(turned)
        found = logits_in_chunks(model, turned, later[rows], range(TOKENS - 19))
        assert (found - expected[rows]).abs().max() <= TOLERANCE
    heads, channels = 2, 64
    assert cache.window_bytes == 3 * 7 * 2 * heads * channels * 8  # three packed sides, 7 tokens, batch of 2, float64
    without = KVTunerCache.from_profile(profile_of(model.config, LAYERS), model.config)
    logits_in_chunks(model, without, tokens[:, :20], (0, 20))
    assert (cache.stored_bytes, without.window_bytes) == (without.stored_bytes, 0)
    cache.reset()
    assert (cache.stored_bytes, cache.window_bytes) == (0, 0)
    again = logits_in_chunks(model, cache, tokens, cuts)
    assert (again[:, 20:] - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=["greedy", "beams"])
def test_generate_reads_the_window(options: Any, model_of: ModelOf, profile_of: ProfileOf) -> None:
    model, tokens = model_of("llama-gqa-64", torch.float64), prompt(2, 13)
    profile = profile_of(model.config, LAYERS, window=ExactWindow(6, 1))

    def generate(cache: Any) -> Any:
        return model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            past_key_values=cache,
            max_new_tokens=24,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )

    found, expected = generate(KVTunerCache.from_profile(profile, model.config)), generate(WindowedReads(profile))
    assert torch.equal(found.sequences, expected.sequences)
    for left, right in zip(found.logits, expected.logits, strict=True):
        assert (left - right).abs().max() <= TOLERANCE


@pytest.fixture
def per_channel(profile_of: ProfileOf) -> Callable[..., Profile]:
    """K2V4 of a model with groups of 16 tokens of a channel."""

    def make(config: Any, window: ExactWindow) -> Profile:
        like = profile_of(config, LAYERS)
        layout = ScaleLayout(16, granularity="per_channel")
        return uniform_profile(like.to_geometry(), PrecisionPair(2, 4), like.model, k_layout=layout, window=window)

    return make


@pytest.mark.parametrize("window", [ExactWindow(16), ExactWindow(21, 3)], ids=str)
@pytest.mark.parametrize("read_plan", READ_PLANS)
def test_keys_per_channel_are_read_of_full_groups_outside_of_the_window(
    read_plan: Any, window: ExactWindow, model_name: str, model_of: ModelOf, per_channel: Callable[..., Profile]
) -> None:
    model, tokens = model_of(model_name, torch.float64), prompt(2, 70)
    profile = per_channel(model.config, window)
    cache = KVTunerCache.from_profile(profile, model.config, read_plan)
    cuts = list(range(71)) if read_plan == "cache" else [0, *range(PROMPT, 71)]
    found = logits_in_chunks(model, cache, tokens, cuts)
    exact = exact_reads(read_plan, window, 70)
    expected = uncached_logits(model, tokens, specs_of(profile), exact)
    assert (found - expected).abs().max() <= TOLERANCE
    by_token = [{**specs, "k": QuantSpec(2)} for specs in specs_of(profile)]
    assert (found - uncached_logits(model, tokens, by_token, exact)).abs().max() > 1e-3
    heads, dims = cache.layers[0].k.format.num_heads, [cache.layers[0].k.format.head_dim]
    dims.append(cache.layers[0].v.format.head_dim)
    of_token = row_bytes(heads, dims[0], 2, 16, granularity="per_channel") + row_bytes(heads, dims[1], 4)
    assert cache.stored_bytes == 2 * 70 * 2 * of_token == 2 * 70 * profile.bytes_per_token()


@pytest.mark.parametrize("cuts", [(0, 9, 40, 41, 57, 70), (0, 70), (0, 33, 65, 70)], ids=str)
@pytest.mark.parametrize("read_plan", READ_PLANS)
def test_chunks_of_keys_per_channel_read_within_attending_what_single_tokens_do(
    read_plan: Any, cuts: tuple[int, ...], model_of: ModelOf, per_channel: Callable[..., Profile]
) -> None:
    model, tokens = model_of("llama-gqa-64", torch.float64), prompt(2, 70)
    profile = per_channel(model.config, ExactWindow(16, 2))
    cache = KVTunerCache.from_profile(profile, model.config, read_plan)
    with cache.attending(model):
        found = logits_in_chunks(model, cache, tokens, cuts)
    exact = exact_reads("cache", profile.window, 70)
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        if read_plan == "hit" or (read_plan == "decode" and number == 0):
            exact[start:stop, start:stop] = True
    assert (found - uncached_logits(model, tokens, specs_of(profile), exact)).abs().max() <= TOLERANCE


def test_the_simulator_knows_keys_per_channel(model_of: ModelOf, per_channel: Callable[..., Profile]) -> None:
    model, tokens = copy.deepcopy(model_of("llama-gqa-64", torch.float64)), prompt(1, 70)
    profile = per_channel(model.config, ExactWindow(16, 2))
    exact = model(tokens, use_cache=False).logits.log_softmax(-1)
    cache = KVTunerCache.from_profile(profile, model.config)
    read = logits_in_chunks(model, cache, tokens, [0, *range(PROMPT, 71)]).log_softmax(-1)
    model.set_attn_implementation(register_hook())
    chain = DecoderChain(model, ModelGeometry.from_config(model.config))
    batch = Batch(0, tokens, torch.arange(70).unsqueeze(0))
    scores = Simulator(chain, [batch], ReadPlan("decode", PROMPT)).measure(ProfileScheme.of("own", profile).specs)
    kl = (exact.exp() * (exact - read)).sum(-1)[:, PROMPT:]
    assert kl.mean() > 1e-3
    torch.testing.assert_close(scores.kl, kl, rtol=1e-3, atol=1e-6)  # the simulator compares logits in float32


def test_generate_reads_keys_per_channel_by_beams(model_of: ModelOf, per_channel: Callable[..., Profile]) -> None:
    model, tokens = model_of("llama-gqa-64", torch.float64), prompt(2, 13)
    profile = per_channel(model.config, ExactWindow(16))
    found, expected = (
        model.generate(
            tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, max_new_tokens=50, do_sample=False,
            num_beams=3, num_return_sequences=2,
        )
        for cache in (KVTunerCache.from_profile(profile, model.config), WindowedReads(profile))
    )  # fmt: skip
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("read_plan", "first"), [("cache", 0), ("decode", 4), ("hit", 4)])
def test_a_chunk_whose_tokens_would_read_different_copies_is_refused_outside_of_attending_and_stores_nothing(
    read_plan: Any, first: int, model_of: ModelOf, profile_of: ProfileOf
) -> None:
    model, tokens = model_of("llama-gqa-64", torch.float64), prompt(1, 12)
    profile = profile_of(model.config, [LayerQuantization(16, 16), LayerQuantization(4, 4)], window=ExactWindow(5))
    cache = KVTunerCache.from_profile(profile, model.config, read_plan)
    if first:
        model(tokens[:, :first], past_key_values=cache)
    with pytest.raises(CacheError, match=f"a chunk of 3 tokens after {first} by the read plan {read_plan}; give it"):
        model(tokens[:, first : first + 3], past_key_values=cache)
    assert cache.get_seq_length() == first
    only_sinks = profile_of(model.config, LAYERS, window=ExactWindow(0, 3))
    cache = KVTunerCache.from_profile(only_sinks, model.config, read_plan)
    found = logits_in_chunks(model, cache, tokens, (0, 4, 12))
    singles = KVTunerCache.from_profile(only_sinks, model.config, read_plan)
    if read_plan == "decode":
        expected = logits_in_chunks(model, singles, tokens, (0, *range(4, 13)))
        assert (found - expected).abs().max() <= TOLERANCE
