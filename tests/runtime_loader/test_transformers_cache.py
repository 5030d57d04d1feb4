"""Models run on packed rows: against an uncached forward that picks, per query and key, what is read quantized."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer
from uncached_forward import logits_in_chunks, simulate, uncached_logits

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import ALL_BITS, NATIVE_BITS
from kvtuner.quant import IDENTITY, QuantSpec, Transform
from kvtuner.read_plan_names import READ_PLANS
from kvtuner.runtime_loader.row_format import LayerFormat, RowFormat
from kvtuner.runtime_loader.transformers_cache import KVTunerCache
from kvtuner.runtime_loader.transformers_layer import KVTunerLayer

ChoicesOf = Callable[..., list[LayerQuantization]]

ModelOf = Callable[[str, torch.dtype], PreTrainedModel]
ProfileOf = Callable[..., Profile]
TransformOf = Callable[[str, ModelGeometry, int], Transform]

KEY_TRANSFORMS = (
    "none",
    "hadamard",
    "balanced",
    "balanced+hadamard",
    "centered",
    "centered+hadamard",
    "centered+balanced",
    "centered+balanced+hadamard",
)
ALL_PAIRS = tuple(product(ALL_BITS, ALL_BITS))
TWO_LAYERS = tuple(zip(ALL_PAIRS, reversed(ALL_PAIRS), strict=True))[: -(-len(ALL_PAIRS) // 2)]
CUTS = (0, 11, 12, 13, 20, 21, 37)
LATENT, ROPE, INDEX = 32, 8, 12
# Both sides run the same float32 quantizer on float64 activations, so codes are equal and float64 error is left.
TOLERANCE = 1e-9


def prompt(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def specs_of(layers: Sequence[LayerQuantization], group_size: int | None, symmetric: bool) -> list[dict[str, Any]]:
    def spec(bits: int, transform: Transform) -> QuantSpec | None:
        return None if bits == NATIVE_BITS else QuantSpec(bits, transform, group_size, symmetric)

    return [
        {"k": spec(choice.k_bits, choice.k_transform), "v": spec(choice.v_bits, choice.v_transform)}
        for choice in layers
    ]


def exact_reads(read_plan: str, cuts: Sequence[int]) -> Tensor:
    """Mark the (query, key) pairs that are exact, [tokens, tokens]: the design's read plans, chunk by chunk."""
    chunk = torch.zeros(cuts[-1], dtype=torch.long)
    for number, (start, stop) in enumerate(pairwise(cuts)):
        chunk[start:stop] = number
    same = chunk[:, None] == chunk[None, :]
    return {"decode": same & (chunk == 0)[:, None], "hit": same, "cache": torch.zeros_like(same)}[read_plan]


class SimulatedCache(DynamicCache):
    """Keeps exact keys and values and quantizes what it returns: the cache's behaviour without its storage."""

    def __init__(self, specs: list[dict[str, Any]], read_plan: str) -> None:
        super().__init__()
        self.specs, self.read_plan = specs, read_plan

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        past = self.get_seq_length(layer_idx)
        keys, values = super().update(k, v, layer_idx, *args, **kwargs)
        spec = self.specs[layer_idx]
        reads = simulate(spec["k"], keys), simulate(spec["v"], values)
        if self.read_plan == "hit" or (self.read_plan == "decode" and not past):
            return tuple(torch.cat((read[:, :, :past], x), dim=2) for read, x in zip(reads, (k, v), strict=True))
        return reads


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def choices_of(transform_of: TransformOf) -> Callable[..., list[LayerQuantization]]:
    """Layer choices of bit pairs, each key transform in its turn."""

    def make(geometry: ModelGeometry, pairs: Sequence[tuple[int, int]], first: int = 0) -> list[LayerQuantization]:
        layers = []
        for number, (k_bits, v_bits) in enumerate(pairs, first):
            key = transform_of(KEY_TRANSFORMS[number % len(KEY_TRANSFORMS)], geometry, number)
            value = transform_of(("hadamard", "none")[number % 2], geometry, number)
            layers.append(
                LayerQuantization(
                    k_bits,
                    v_bits,
                    IDENTITY if k_bits == NATIVE_BITS else key,
                    IDENTITY if v_bits == NATIVE_BITS else value,
                )
            )
        return layers

    return make


NATIVE = [LayerQuantization(16, 16), LayerQuantization(16, 16)]


@pytest.mark.parametrize("read_plan", READ_PLANS)
def test_logits_of_every_pair_are_those_of_an_uncached_forward(
    read_plan: str, model_name: str, model_of: ModelOf, profile_of: ProfileOf, choices_of: ChoicesOf
) -> None:
    model = model_of(model_name, torch.float64)
    geometry = ModelGeometry.from_config(model.config)
    tokens, exact = prompt(1, CUTS[-1]), exact_reads(read_plan, CUTS)
    for number, pairs in enumerate(TWO_LAYERS):
        layers = choices_of(geometry, pairs, first=number)
        grid = {"group_size": geometry.head_dim // (1 + number % 2), "symmetric": number % 3 == 0}
        cache = KVTunerCache.from_profile(profile_of(model.config, layers, **grid), model.config, read_plan)
        found = logits_in_chunks(model, cache, tokens, CUTS)
        expected = uncached_logits(model, tokens, specs_of(layers, **grid), exact)
        assert (found - expected).abs().max() <= TOLERANCE, pairs


@pytest.mark.parametrize("read_plan", READ_PLANS)
def test_an_fp8_cache_reads_as_the_baseline_and_takes_a_byte_for_each_channel(
    read_plan: str, model_name: str, model_of: ModelOf
) -> None:
    model = model_of(model_name, torch.float64)
    geometry = ModelGeometry.from_config(model.config)
    spec = QuantSpec(8, fp8=True)
    tokens, specs = prompt(1, CUTS[-1]), [{"k": spec, "v": spec}] * geometry.num_layers
    cache = KVTunerCache.fp8(model.config, read_plan)
    found = logits_in_chunks(model, cache, tokens, CUTS)
    expected = uncached_logits(model, tokens, specs, exact_reads(read_plan, CUTS))
    assert (found - expected).abs().max() <= TOLERANCE
    assert (
        expected - uncached_logits(model, tokens, specs, torch.ones(CUTS[-1], CUTS[-1], dtype=torch.bool))
    ).abs().max() > 1e-4
    channels = geometry.num_kv_heads * (geometry.head_dim + geometry.v_head_dim)
    assert cache.stored_bytes == geometry.num_layers * channels * CUTS[-1]


def test_the_three_read_plans_differ_and_the_test_would_see_it(model_of: ModelOf, profile_of: ProfileOf) -> None:
    model = model_of("llama-gqa-64", torch.float64)
    specs = specs_of([LayerQuantization(4, 4)] * 2, None, False)
    logits = [uncached_logits(model, prompt(1, 37), specs, exact_reads(plan, CUTS)) for plan in READ_PLANS]
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert (logits[left] - logits[right]).abs().max() > 1e-3


def test_only_the_cache_plan_does_not_depend_on_where_chunks_are_cut(model_of: ModelOf, profile_of: ProfileOf) -> None:
    model = model_of("llama-gqa-64", torch.float64)
    profile = profile_of(model.config, [LayerQuantization(2, 4)] * 2)
    for read_plan in READ_PLANS:
        once, cut = (
            logits_in_chunks(model, KVTunerCache.from_profile(profile, model.config, read_plan), prompt(1, 37), cuts)
            for cuts in ((0, 37), CUTS)
        )
        assert ((once - cut).abs().max() <= TOLERANCE) == (read_plan == "cache")


def test_a_plan_for_one_block_reads_a_cache_hit_exactly_within_itself(model_of: ModelOf, profile_of: ProfileOf) -> None:
    model, tokens = model_of("qwen3-mha-64", torch.float64), prompt(1, 24)
    layers = [LayerQuantization(2, 2)] * 2
    cache = KVTunerCache.from_profile(profile_of(model.config, layers), model.config)
    first = logits_in_chunks(model, cache, tokens, (0, 9))
    with pytest.raises(RuntimeError, match="on the way"), cache.reading("hit") as hit:
        second = model(tokens[:, 9:16], past_key_values=hit).logits
        raise RuntimeError("on the way")
    assert cache.read_plan == "decode"
    third = model(tokens[:, 16:], past_key_values=cache).logits
    cuts = (0, 9, 16, 24)
    exact = exact_reads("decode", cuts)
    exact[9:16] = exact_reads("hit", cuts)[9:16]
    expected = uncached_logits(model, tokens, specs_of(layers, None, False), exact)
    assert (torch.cat((first, second, third), dim=1) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_attention_implementation_reads_the_same(
    implementation: str, model_of: ModelOf, profile_of: ProfileOf
) -> None:
    model, layers = copy.deepcopy(model_of("llama-gqa-64", torch.float64)), [LayerQuantization(4, 8)] * 2
    model.set_attn_implementation(implementation)
    cache = KVTunerCache.from_profile(profile_of(model.config, layers), model.config)
    found = logits_in_chunks(model, cache, prompt(2, 37), CUTS)
    oracle = SimulatedCache(specs_of(layers, None, False), "decode")
    assert (found - logits_in_chunks(model, oracle, prompt(2, 37), CUTS)).abs().max() <= TOLERANCE


def test_nan_in_the_keys_reaches_the_logits_as_it_would_unquantized(model_of: ModelOf, profile_of: ProfileOf) -> None:
    model = copy.deepcopy(model_of("llama-gqa-64", torch.float32))
    model.get_input_embeddings().weight[5] = torch.nan
    packed = KVTunerCache.from_profile(profile_of(model.config, [LayerQuantization(4, 4)] * 2), model.config, "cache")
    for cache in (packed, DynamicCache()):
        logits = logits_in_chunks(model, cache, torch.tensor([[3, 4, 5, 6]]), (0, 2, 3, 4))
        assert logits.isnan().any(dim=-1).tolist() == [[False, False, True, True]]


def generate(model: PreTrainedModel, tokens: Tensor, cache: Any, **options: Any) -> Any:
    torch.manual_seed(11)
    return model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        past_key_values=cache,
        max_new_tokens=options.pop("max_new_tokens", 24),
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 2.0},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"do_sample": True, "num_beams": 3},
    "several per prompt": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.parametrize("mode", MODES)
def test_sixteen_bits_everywhere_generate_what_the_usual_cache_generates(
    mode: str, model_name: str, model_of: ModelOf, profile_of: ProfileOf
) -> None:
    model, tokens = model_of(model_name, torch.float32), prompt(2, 13)
    cache = KVTunerCache.from_profile(profile_of(model.config, NATIVE), model.config)
    found = generate(model, tokens, cache, **MODES[mode])
    expected = generate(model, tokens, DynamicCache(), **MODES[mode])
    assert torch.equal(found.sequences, expected.sequences)
    for left, right in zip(found.logits, expected.logits, strict=True):
        assert (left - right).abs().max() <= 1e-5


@pytest.mark.parametrize("read_plan", READ_PLANS)
@pytest.mark.parametrize("mode", MODES)
def test_packed_rows_generate_what_a_cache_of_exact_rows_and_quantized_reads_generates(
    mode: str, read_plan: str, model_of: ModelOf, profile_of: ProfileOf, choices_of: ChoicesOf
) -> None:
    model, tokens = model_of("llama-gqa-64", torch.float64), prompt(2, 13)
    layers = choices_of(ModelGeometry.from_config(model.config), [(2, 4), (4, 16)], first=6)
    cache = KVTunerCache.from_profile(profile_of(model.config, layers), model.config, read_plan)
    found = generate(model, tokens, cache, **MODES[mode])
    oracle = SimulatedCache(specs_of(layers, None, False), read_plan)
    expected = generate(model, tokens, oracle, **MODES[mode])
    assert torch.equal(found.sequences, expected.sequences)
    for left, right in zip(found.logits, expected.logits, strict=True):
        assert (left - right).abs().max() <= TOLERANCE


def test_sequences_of_a_batch_do_not_see_each_other(model_of: ModelOf, profile_of: ProfileOf) -> None:
    model, tokens = model_of("qwen2-mqa-80", torch.float64), prompt(3, 37)
    profile = profile_of(model.config, [LayerQuantization(4, 2)] * 2)
    together = logits_in_chunks(model, KVTunerCache.from_profile(profile, model.config), tokens, CUTS)
    for row in range(3):
        cache = KVTunerCache.from_profile(profile, model.config)
        alone = logits_in_chunks(model, cache, tokens[row : row + 1], CUTS)
        assert (together[row] - alone[0]).abs().max() <= TOLERANCE


def test_assisted_decoding_crops_and_still_generates_the_greedy_tokens(
    model_of: ModelOf, profile_of: ProfileOf
) -> None:
    removed = []

    class Watched(KVTunerCache):
        def crop(self, tokens_to_remove: int) -> None:
            before = self.get_seq_length()
            super().crop(tokens_to_remove)
            removed.append(before - self.get_seq_length())

    model = model_of("llama-gqa-64", torch.float64)
    profile, tokens = profile_of(model.config, [LayerQuantization(8, 4)] * 2), prompt(1, 6).repeat(1, 3)
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": 0}
    greedy = generate(model, tokens, KVTunerCache.from_profile(profile, model.config), **options)
    cache = Watched.from_profile(profile, model.config)
    assisted = generate(model, tokens, cache, prompt_lookup_num_tokens=4, **options)
    assert torch.equal(assisted.sequences, greedy.sequences)
    assert greedy.sequences.shape[1] > tokens.shape[1] + 10
    assert any(removed), "every draft was accepted: nothing was cropped"


def test_eight_bits_stay_close_to_the_usual_cache_and_two_do_not(model_of: ModelOf, profile_of: ProfileOf) -> None:
    model, tokens = model_of("llama-gqa-64", torch.float32), prompt(4, 37)
    reference = logits_in_chunks(model, DynamicCache(), tokens, CUTS).double().log_softmax(-1)
    kl = {}
    for bits in (2, 8):
        cache = KVTunerCache.from_profile(profile_of(model.config, [LayerQuantization(bits, bits)] * 2), model.config)
        logits = logits_in_chunks(model, cache, tokens, CUTS).double().log_softmax(-1)
        kl[bits] = (reference.exp() * (reference - logits)).sum(-1).mean().item()
    assert 0 < kl[8] < 1e-3 < 1e-1 < kl[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_bytes_are_the_profile_s_bytes_of_every_token(
    dtype: torch.dtype, model_name: str, model_of: ModelOf, profile_of: ProfileOf, choices_of: ChoicesOf
) -> None:
    model = model_of(model_name, dtype)
    for pairs in TWO_LAYERS:
        profile = profile_of(model.config, choices_of(ModelGeometry.from_config(model.config), pairs))
        cache = KVTunerCache.from_profile(profile, model.config)
        generate(model, prompt(3, 13), cache, do_sample=False, max_new_tokens=5)
        tokens = 13 + 5 - 1  # the last token is never fed back
        assert cache.get_seq_length() == tokens
        assert cache.stored_bytes == profile.bytes_per_token() * tokens * 3
        assert cache.stored_bytes <= cache.allocated_bytes <= profile.bytes_per_token() * (13 + 16) * 3


def test_a_float32_model_packs_alike_and_keeps_sixteen_bit_sides_at_twice_their_bytes(
    model_of: ModelOf, profile_of: ProfileOf
) -> None:
    model = model_of("qwen2-mqa-80", torch.float32)
    profile = profile_of(model.config, [LayerQuantization(4, 16), LayerQuantization(2, 8)])
    cache = KVTunerCache.from_profile(profile, model.config)
    logits_in_chunks(model, cache, prompt(3, 37), CUTS)
    native = 80 * 2  # one KV head of 80 channels, 2 bytes each
    assert cache.stored_bytes == (profile.bytes_per_token() + native) * 37 * 3


def store(layer: KVTunerLayer | DynamicIndexedLayer, states: tuple[Tensor, ...]) -> Tensor:
    """Store a chunk's latents, rotary channels and keys of the index; return what the index reads."""
    layer.update(*states[:2])
    keys = layer.update_indexer(states[2])
    assert isinstance(keys, Tensor)
    return keys


@pytest.mark.parametrize("seed", range(12))
def test_keys_of_an_index_go_where_their_tokens_go(seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    packed = KVTunerLayer(LayerFormat(RowFormat(1, LATENT, None), RowFormat(1, ROPE, None), is_latent=True))
    own, batch = DynamicIndexedLayer(), 2
    for _ in range(30):
        operation = draw.choice(["store", "store", "store", "crop", "select", "repeat", "reorder", "reset"])
        if operation == "store" or own.get_seq_length() < 3:
            tokens = draw.randint(1, 9)
            states = tuple(
                torch.randn(shape, generator=generator, dtype=torch.bfloat16)
                for shape in ((batch, 1, tokens, LATENT), (batch, 1, tokens, ROPE), (batch, tokens, INDEX))
            )
            assert torch.equal(store(packed, states), store(own, states))
        elif operation == "reset":
            batch = draw.randint(1, 3)
            for layer in (packed, own):
                layer.reset()
        elif operation == "repeat" and batch < 5:
            batch *= 2
            for layer in (packed, own):
                layer.batch_repeat_interleave(2)
        else:
            removed, indices = draw.randint(1, 2), torch.tensor(draw.choices(range(batch), k=batch))
            for layer in (packed, own):
                match operation:
                    case "crop":
                        layer.crop(-removed)
                    case "select":
                        layer.batch_select_indices(indices)
                    case _:
                        layer.reorder_cache(indices)
        assert packed.get_seq_length() == own.get_seq_length()
        assert packed.index_keys.stored_bytes == 2 * batch * INDEX * own.get_seq_length()
