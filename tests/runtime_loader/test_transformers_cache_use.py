"""What generate and its callers do to a cache between forwards, on models of all kinds, and what it refuses.

Where layers differ there are two oracles: transformers' own cache at 16 bits, and calibration's simulator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny.layered_models import LAYERED, MULTIMODAL
from tiny.shrunk_models import SHRUNK, SHRUNK_LATENTS, shrunk_model
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, MistralConfig, MistralForCausalLM, PreTrainedModel

from kvtuner.calibration.forward.attention_hook import register_hook
from kvtuner.calibration.forward.chain import DecoderChain
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.forward.simulator import LayerSpec, quantized_attention
from kvtuner.errors import CacheError, ProfileError, ServingError, UnsupportedModelError
from kvtuner.exported_configs.profile.build import AskedBudget, LayerQuantization, build_profile, of_whole_model
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.exported_configs.profile.records import ModelIdentity
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import ExactWindow
from kvtuner.quant import Transform
from kvtuner.runtime_loader.transformers_cache import KVTunerCache
from kvtuner.supported_models import read_cache_geometry

Filled = Callable[[int, Tensor], KVTunerCache]

ModelOf = Callable[[str, torch.dtype], PreTrainedModel]
ProfileOf = Callable[..., Profile]
TransformOf = Callable[[str, ModelGeometry, int], Transform]

NATIVE = [LayerQuantization(16, 16), LayerQuantization(16, 16)]
DIGEST = "sha256:" + 64 * "0"
PROMPT, TOKENS = 40, 46
CUTS = (PROMPT, *range(PROMPT + 1, TOKENS + 1))
FULL_FIRST = ("full_attention", "sliding_attention")
SHOWN = [name for name in (*LAYERED, *MULTIMODAL) if name not in ("zamba2", "minimax")]
TOLERANCE = 1e-9  # float64 error of a model that is run in other chunks


def prompt(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits_in_chunks(model: PreTrainedModel, cache: KVTunerCache, tokens: Tensor, cuts: Sequence[int]) -> Tensor:
    chunks = [model(tokens[:, a:b], past_key_values=cache).logits for a, b in pairwise(cuts)]
    return torch.cat(chunks, dim=1)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def filled(model_of: ModelOf, profile_of: ProfileOf) -> Callable[[int, Tensor], KVTunerCache]:
    """A cache that read the tokens given by the `cache` plan, cut at a length."""
    model = model_of("llama-gqa-64", torch.float64)
    profile = profile_of(model.config, [LayerQuantization(4, 16), LayerQuantization(16, 2)])

    def fill(cut: int, tokens: Tensor) -> KVTunerCache:
        cache = KVTunerCache.from_profile(profile, model.config, "cache")
        logits_in_chunks(model, cache, tokens, (0, cut, tokens.shape[1]))
        return cache

    return fill


def assert_same_rows(found: KVTunerCache, expected: KVTunerCache) -> None:
    assert found.stored_bytes == expected.stored_bytes > 0
    for left, right in zip(found.layers, expected.layers, strict=True):
        for a, b in ((left.k, right.k), (left.v, right.v)):
            assert torch.allclose(a.buffer.rows.double(), b.buffer.rows.double(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("tokens_to_remove", [-8, 12], ids=["count removed", "count kept"])
def test_a_cropped_cache_goes_on_as_if_the_tokens_had_never_come(
    tokens_to_remove: int, filled: Filled, model_of: ModelOf
) -> None:
    tokens, other = prompt(2, 20), prompt(2, 20, seed=1)
    cache = filled(13, tokens)
    cache.crop(tokens_to_remove)
    assert cache.get_seq_length() == 12
    model_of("llama-gqa-64", torch.float64)(other[:, 12:], past_key_values=cache)
    assert_same_rows(cache, filled(12, torch.cat((tokens[:, :12], other[:, 12:]), dim=1)))


def test_crop_of_nothing_keeps_all_and_of_too_much_leaves_none(filled: Filled) -> None:
    cache = filled(13, prompt(2, 20))
    cache.crop(0)
    assert cache.get_seq_length() == 20
    cache.crop(-21)
    assert (cache.get_seq_length(), cache.stored_bytes) == (0, 0)


def test_beams_repeats_and_selections_turn_all_rows_of_the_batch(filled: Filled) -> None:
    tokens = prompt(2, 20)
    for turn, rows in (
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
    ):
        cache = filled(13, tokens)
        turn(cache)
        assert_same_rows(cache, filled(13, tokens[rows]))


def test_an_empty_cache_takes_every_operation(model_of: ModelOf, profile_of: ProfileOf) -> None:
    config = model_of("llama-gqa-64", torch.float64).config
    cache = KVTunerCache.from_profile(profile_of(config, NATIVE), config)
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.reset()
    cache.early_initialization(2, 2, 64, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    assert (cache.get_seq_length(), cache.stored_bytes, cache.allocated_bytes) == (0, 0, 0)
    assert (cache.is_compileable, cache.is_sliding) == (False, [False, False])


def test_a_reset_cache_is_new_for_a_batch_of_any_size(filled: Filled, model_of: ModelOf) -> None:
    cache, tokens = filled(13, prompt(2, 20)), prompt(3, 20)
    cache.reset()
    assert (cache.get_seq_length(), cache.allocated_bytes) == (0, 0)
    logits_in_chunks(model_of("llama-gqa-64", torch.float64), cache, tokens, (0, 13, 20))
    assert_same_rows(cache, filled(13, tokens))


def test_copies_of_a_prefilled_prompt_go_separate_ways(filled: Filled, model_of: ModelOf) -> None:
    model, tokens = model_of("llama-gqa-64", torch.float64), prompt(1, 20)
    prefix = filled(6, tokens[:, :12])
    copied = copy.deepcopy(prefix)
    model(tokens[:, 12:], past_key_values=copied)
    assert prefix.get_seq_length() == 12
    assert_same_rows(prefix, filled(6, tokens[:, :12]))
    assert_same_rows(copied, filled(12, tokens))


def test_masks_are_sized_for_lengths_and_for_the_positions_of_early_releases(filled: Filled) -> None:
    layer = filled(13, prompt(1, 20)).layers[0]
    assert layer.get_mask_sizes(3) == layer.get_mask_sizes(torch.arange(20, 23)) == (23, 0)
    assert layer.get_max_cache_shape() == layer.get_max_length() == -1
    assert layer.is_croppable


def test_a_repr_shows_widths_and_read_plan_and_no_outsider_gets_rows_for_keys(filled: Filled) -> None:
    cache = filled(13, prompt(1, 20))
    expected = "KVTunerCache(layers=[KVTunerLayer(K4V16), KVTunerLayer(K16V2)], read_plan='cache')"
    assert repr(cache) == expected
    assert all(layer.keys is None and layer.values is None for layer in cache.layers)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 3}, "num_layers 2, but this model has 3"),
        ({"num_attention_heads": 8}, "num_attention_heads 4, but this model has 8"),
        ({"num_key_value_heads": 4}, "num_kv_heads 2, but this model has 4"),
        ({"head_dim": 32}, "head_dim 64, but this model has 32"),
    ],
)
def test_a_profile_of_another_geometry_is_refused(
    change: dict[str, int], named: str, model_of: ModelOf, profile_of: ProfileOf
) -> None:
    config = model_of("llama-gqa-64", torch.float64).config
    profile = profile_of(config, NATIVE)
    other = LlamaConfig(
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, **change}
    )
    with pytest.raises(ProfileError, match=named):
        KVTunerCache.from_profile(profile, other)


def test_a_sliding_window_is_refused_unless_no_position_can_leave_it(model_of: ModelOf, profile_of: ProfileOf) -> None:
    common = model_of("llama-gqa-64", torch.float64).config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fields = {name: common[name] for name in (*names, "num_key_value_heads", "head_dim", "initializer_range")}
    narrow = MistralConfig(**fields, max_position_embeddings=64, sliding_window=63)
    profile = profile_of(narrow, NATIVE)
    with pytest.raises(UnsupportedModelError, match="sliding_attention in all layers that have keys"):
        KVTunerCache.from_profile(profile, narrow)
    torch.manual_seed(3)
    model = MistralForCausalLM(MistralConfig(**fields, max_position_embeddings=64, sliding_window=64)).eval()
    cache, cuts = KVTunerCache.from_profile(profile, model.config), (0, 40, 64)
    found = logits_in_chunks(model, cache, prompt(1, 64), cuts)
    expected = logits_in_chunks(model, DynamicCache(), prompt(1, 64), cuts)
    assert (found - expected).abs().max() <= 1e-5


def test_heads_of_a_tensor_parallel_rank_are_refused_before_anything_is_stored(
    model_of: ModelOf, profile_of: ProfileOf
) -> None:
    config = model_of("llama-gqa-64", torch.float64).config
    cache = KVTunerCache.from_profile(profile_of(config, [LayerQuantization(4, 16)] * 2), config)
    with pytest.raises(ProfileError, match="stores 2 KV heads of 64 channels, but attention gave 1 of 64"):
        cache.update(torch.zeros(1, 2, 3, 64), torch.zeros(1, 1, 3, 64), 0)
    assert cache.stored_bytes == 0


def test_another_batch_or_dtype_is_refused_and_changes_nothing(model_of: ModelOf, profile_of: ProfileOf) -> None:
    config = model_of("llama-gqa-64", torch.float64).config
    profile = profile_of(config, [LayerQuantization(4, 16)] * 2)
    cache = KVTunerCache.from_profile(profile, config)
    cache.update(torch.ones(1, 2, 3, 64), torch.ones(1, 2, 3, 64), 0)
    stored = cache.stored_bytes
    with pytest.raises(CacheError, match="batch of 1, but was given one of 2"):
        cache.update(torch.ones(2, 2, 1, 64), torch.ones(2, 2, 1, 64), 0)
    with pytest.raises(CacheError, match=r"holds torch\.float32, but was given torch\.float16"):
        cache.update(torch.ones(1, 2, 1, 64).half(), torch.ones(1, 2, 1, 64).half(), 0)
    assert cache.stored_bytes == stored


def test_an_unknown_read_plan_is_refused(model_of: ModelOf, profile_of: ProfileOf) -> None:
    config = model_of("llama-gqa-64", torch.float64).config
    profile = profile_of(config, NATIVE)
    with pytest.raises(CacheError, match="one of decode, hit, cache, not 'fresh'"):
        KVTunerCache.from_profile(profile, config, "fresh")  # type: ignore[arg-type]
    cache = KVTunerCache.from_profile(profile, config)
    with pytest.raises(CacheError, match="not 'fresh'"), cache.reading("fresh"):  # type: ignore[arg-type]
        pass
    assert cache.read_plan == "decode"


def test_use_beyond_the_positions_of_the_key_means_warns_once(
    model_of: ModelOf, profile_of: ProfileOf, transform_of: TransformOf
) -> None:
    config = model_of("llama-gqa-64", torch.float64).config
    mean = transform_of("centered", ModelGeometry.from_config(config), 0)
    centred = [LayerQuantization(4, 4, mean), LayerQuantization(4, 4)]
    states = torch.ones(1, 2, 4, 64)
    cache = KVTunerCache.from_profile(profile_of(config, centred, last_position=7), config)
    cache.update(states, states, 0)
    cache.update(states, states, 0)
    with pytest.warns(UserWarning, match="over 8 positions, but the cache holds 12 tokens"):
        cache.update(states, states, 0)
    cache.update(states, states, 0)
    for layers, last_position in (([LayerQuantization(4, 4)] * 2, 7), (centred, None)):
        silent = KVTunerCache.from_profile(profile_of(config, layers, last_position=last_position), config)
        for _ in range(3):
            silent.update(states, states, 0)


def profile_by_kinds(
    chain: DecoderChain, pairs: Sequence[tuple[int, int]], window: ExactWindow | None = None
) -> Profile:
    geometry, layers = of_whole_model(chain.cache, [LayerQuantization(k, v) for k, v in pairs])
    return build_profile(
        geometry=geometry,
        layers=layers,
        symmetric=False,
        model=ModelIdentity(id="tiny", revision=None, config_sha256=DIGEST, architecture="Tiny", dtype="float32"),
        budget=AskedBudget("by hand"),
        window=window or ExactWindow(),
    )


def chain_of(model: Any) -> DecoderChain:
    hooked = copy.deepcopy(model)
    hooked.set_attn_implementation(register_hook())
    return DecoderChain(hooked, read_cache_geometry(hooked.config))


def logits_after(model: Any, ids: Tensor, cache: Any, cuts: Sequence[int] = CUTS) -> Tensor:
    """Logits of all tokens, given in chunks that end at the cuts."""
    found, first = [], 0
    for last in cuts:
        positions = torch.arange(first, last).repeat(len(ids), 1)
        with cache.attending(model) if isinstance(cache, KVTunerCache) else nullcontext():
            output = model(ids[:, first:last], position_ids=positions, past_key_values=cache, use_cache=True)
        found.append(output.logits)
        first = last
    return torch.cat(found, dim=1)


def some_tokens() -> Tensor:
    return torch.randint(2, 320, (2, TOKENS), generator=torch.Generator().manual_seed(3))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # GPTBigCode's own
@pytest.mark.parametrize("name", [*SHOWN, *(kind for kind in SHRUNK if kind not in SHRUNK_LATENTS)])
def test_16_bits_are_the_models_own_cache_and_packed_rows_are_the_simulators(
    name: str, make_model: Callable[..., Any]
) -> None:
    """Tolerances: 1e-4 where no code can flip but by float32 sums, and a flipped code moves logits by its step."""
    model = shrunk_model(name) if name in SHRUNK else make_model(name)
    if name == "gemma2":  # without a window the model's own attention reads, and sdpa leaves its cap out
        model.set_attn_implementation("eager")
    chain, ids = chain_of(model), some_tokens()
    layers = chain.geometry.num_layers
    own = logits_after(model, ids, DynamicCache(config=model.config))
    native = KVTunerCache.from_profile_unchecked(profile_by_kinds(chain, [(16, 16)] * layers), model.config)
    torch.testing.assert_close(logits_after(model, ids, native), own, rtol=1e-4, atol=1e-4)
    for pair, window in (((4, 4), None), ((2, 3), ExactWindow(8, 2))):
        profile = profile_by_kinds(chain, [pair] * layers, window)
        specs = {
            layer: LayerSpec(profile.quant_spec(layer, "k"), profile.quant_spec(layer, "v"), profile.window)
            for layer in chain.geometry.ids
        }
        positions = torch.arange(TOKENS).repeat(len(ids), 1)
        trace = chain.trace(ids, positions, quantized_attention(specs, ReadPlan("decode", PROMPT)))
        cache = KVTunerCache.from_profile_unchecked(profile, model.config)
        found = logits_after(model, ids, cache)
        simulated = chain.logits(trace.final)
        effect = (found - own)[:, PROMPT:].abs().max()
        assert effect > 0.01 or name == "cohere2"
        assert (found - simulated).abs().mean() < 0.01 * effect
        assert cache.stored_bytes == 2 * TOKENS * profile.bytes_per_token()
        if name != "jamba":  # whose own code loses its state between chunks of several tokens
            chunks = KVTunerCache.from_profile_unchecked(profile, model.config)
            in_chunks = logits_after(model, ids, chunks, (PROMPT, PROMPT + 4, TOKENS))
            assert (in_chunks - found).abs().mean() < 0.01 * effect


@pytest.mark.parametrize("window", [ExactWindow(), ExactWindow(8, 2)], ids=str)
@pytest.mark.parametrize("bits", [(2, 2), (4, 3), (8, 8)])
@pytest.mark.parametrize("name", ["gemma4-readers", "gemma3n"])
def test_layers_that_read_another_ones_keys_read_what_that_one_stores(
    name: str, bits: tuple[int, int], window: ExactWindow, make_model: Callable[..., Any]
) -> None:
    """A code may be another after sums in another order, which moves few logits by a small part of the effect."""
    model, ids = make_model(name), some_tokens()
    chain = chain_of(model)
    profile = profile_by_kinds(chain, [bits] * chain.geometry.num_layers, window)
    cache = KVTunerCache.from_profile_unchecked(profile, model.config)
    found, exact = (logits[:, PROMPT:] for logits in (logits_after(model, ids, cache), model(ids).logits))
    specs = {
        layer: LayerSpec(profile.quant_spec(layer, "k"), profile.quant_spec(layer, "v"), window)
        for layer in chain.geometry.ids
    }
    positions = torch.arange(TOKENS).repeat(len(ids), 1)
    trace = chain.trace(ids, positions, quantized_attention(specs, ReadPlan("decode", PROMPT)))
    simulated = chain.logits(trace.final)[:, PROMPT:]
    assert (found - simulated).abs().mean() < 0.01 * (found - exact).abs().mean()
    assert (found.argmax(-1) == simulated.argmax(-1)).all()


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3.5", "falcon-h1", "gemma4-readers", "gemma3n"])
def test_generation_goes_through_the_models_own_loop(name: str, make_model: Callable[..., Any]) -> None:
    model = make_model(name)
    chain = chain_of(model)
    profile = profile_by_kinds(chain, [(8, 8)] * chain.geometry.num_layers)
    ids = some_tokens()[:1, :PROMPT]
    cache = KVTunerCache.from_profile_unchecked(profile, model.config)
    # fmt: off
    plain = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    found = model.generate(
        ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0, past_key_values=cache
    )
    # fmt: on
    assert cache.get_seq_length() == PROMPT + 5
    assert (found == plain).float().mean() > 0.9
    beams = KVTunerCache.from_profile_unchecked(profile, model.config)
    model.generate(ids, max_new_tokens=4, num_beams=2, do_sample=False, pad_token_id=0, past_key_values=beams)
    beams.reset()
    assert beams.stored_bytes == 0


def test_a_profile_is_refused_by_a_model_with_other_kinds(make_model: Callable[..., Any]) -> None:
    model = make_model("gemma3")
    profile = profile_by_kinds(chain_of(model), [(4, 4)] * 2)
    for changes, message in (
        ({"layer_types": ["full_attention"] * 4}, "has num_layers 2, but this model has 4"),
        ({"layer_types": [*FULL_FIRST] * 2}, "has full layers 1, 3, but this model has 0, 2;"),
        ({"sliding_window": 16}, "layer 0 has kind window:24 in the profile of tiny, but window:16 in this model"),
    ):
        with pytest.raises(ProfileError, match=message):
            KVTunerCache.from_profile(profile, make_model("gemma3", **changes).config, context_length=512)
    with pytest.raises(ProfileError, match="has num_layers 2, but this model has 3"):
        KVTunerCache.from_profile(profile, make_model("llama-gqa").config)


def test_rows_are_not_read_in_place_beside_other_layers(make_model: Callable[..., Any]) -> None:
    model = make_model("gpt-oss")
    cache = KVTunerCache.from_profile_unchecked(profile_by_kinds(chain_of(model), [(4, 4)] * 2), model.config)
    with (
        pytest.raises(ServingError, match="where all layers are full and have no attention sinks"),
        cache.attending(model, in_place=True),
    ):
        pass


def test_a_model_that_keeps_a_cache_of_its_own_class_is_refused(make_model: Callable[..., Any]) -> None:
    model = make_model("minimax")
    profile = profile_by_kinds(chain_of(model), [(4, 4)] * 2)
    with pytest.raises(UnsupportedModelError, match="'minimax' takes no other cache than its own"):
        KVTunerCache.from_profile(profile, model.config, allow_derived=True)
