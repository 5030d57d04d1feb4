"""Schemes of models with latents: bytes, and answers against transformers' own cache and the simulation."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny.latent_models import INDEX, INDEXES, LATENT, RANK, ROPE
from tiny.shrunk_models import SHRUNK_LATENTS, shrunk_model
from transformers import DynamicCache

from kvtuner.calibration.forward.attention_hook import register_hook
from kvtuner.calibration.forward.chain import DecoderChain
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.forward.simulator import LayerSpec, quantized_attention
from kvtuner.errors import PrecisionError, ProfileError, ServingError
from kvtuner.exported_configs.profile.build import uniform_profile
from kvtuner.exported_configs.profile.records import ModelIdentity
from kvtuner.precision import ExactWindow, PrecisionPair, ScaleLayout, row_bytes
from kvtuner.runtime_loader.transformers_cache import KVTunerCache
from kvtuner.supported_models import read_cache_geometry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from kvtuner.exported_configs.profile.profile import Profile

PROMPT, TOKENS = 21, 34
CUTS = (PROMPT, *range(PROMPT + 1, TOKENS + 1))


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def profile_at(config: Any, bits: int, window: ExactWindow | None = None, **layout: Any) -> Profile:
    identity = ModelIdentity(
        id="tiny", revision=None, config_sha256="sha256:" + "0" * 64, architecture="Tiny", dtype="float32"
    )
    pair = PrecisionPair(bits, bits)
    return uniform_profile(
        read_cache_geometry(config), pair, identity, window=window or ExactWindow(), k_layout=ScaleLayout(**layout)
    )


def logits_after(model: Any, ids: Tensor, cache: Any, cuts: Sequence[int] = CUTS) -> Tensor:
    """Logits of all tokens, given in chunks that end at the cuts."""
    found, first = [], 0
    for last in cuts:
        positions = torch.arange(first, last).unsqueeze(0).expand(len(ids), -1)
        with cache.attending(model) if isinstance(cache, KVTunerCache) else nullcontext():
            found.append(model(ids[:, first:last], position_ids=positions, past_key_values=cache).logits)
        first = last
    return torch.cat(found, dim=1)


def some_tokens() -> Tensor:
    return torch.randint(2, 320, (2, TOKENS), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
def test_a_token_takes_the_bytes_of_its_latent_and_its_rotary_channels(
    bits: int, make_model: Callable[..., Any]
) -> None:
    model = make_model("deepseek-v3").to(torch.bfloat16)
    profile, ids = profile_at(model.config, bits, group_size=16), some_tokens()
    in_row = 2 * RANK if bits == 16 else row_bytes(1, RANK, bits, 16)
    assert profile.bytes_per_token() == 3 * (in_row + 2 * ROPE)
    assert profile.bytes_per_token(tp_size=4) == profile.bytes_per_token()
    assert profile.mean_bits * (RANK + ROPE) == bits * RANK + 16 * ROPE
    assert profile.bf16_bytes_per_token() == 3 * 2 * (RANK + ROPE)
    cache = KVTunerCache.from_profile_unchecked(profile, model.config)
    logits_after(model, ids, cache)
    assert cache.stored_bytes == 2 * TOKENS * profile.bytes_per_token()
    fp8 = KVTunerCache.fp8(model.config)
    logits_after(model, ids, fp8)
    assert fp8.stored_bytes == 2 * TOKENS * 3 * (RANK + ROPE)


@pytest.mark.parametrize("name", [*LATENT, *SHRUNK_LATENTS])
def test_16_bits_are_the_models_own_cache_and_packed_latents_are_the_simulators(
    name: str, make_model: Callable[..., Any]
) -> None:
    """Tolerances: 1e-4 where no code can flip but by float32 sums, and a flipped code moves logits by its step."""
    model, ids = shrunk_model(name) if name in SHRUNK_LATENTS else make_model(name), some_tokens()
    hooked = copy.deepcopy(model)
    hooked.set_attn_implementation(register_hook())
    chain = DecoderChain(hooked, read_cache_geometry(model.config))
    own = logits_after(model, ids, DynamicCache(config=model.config))
    native = KVTunerCache.from_profile_unchecked(profile_at(model.config, 16), model.config)
    torch.testing.assert_close(logits_after(model, ids, native), own, rtol=1e-4, atol=1e-4)
    for bits, window in ((4, ExactWindow()), (2, ExactWindow(8, 2))):
        profile = profile_at(model.config, bits, window)
        specs = {layer: LayerSpec(profile.quant_spec(layer, "k"), None, window) for layer in chain.geometry.ids}
        positions = torch.arange(TOKENS).unsqueeze(0).expand(len(ids), -1)
        trace = chain.trace(ids, positions, quantized_attention(specs, ReadPlan("decode", PROMPT)))
        simulated = chain.logits(trace.final)
        cache = KVTunerCache.from_profile_unchecked(profile, model.config)
        found = logits_after(model, ids, cache)
        effect = (found - own)[:, PROMPT:].abs().max()
        assert effect > 1e-3
        assert (found - simulated).abs().mean() < 0.01 * effect
        chunks = KVTunerCache.from_profile_unchecked(profile, model.config)
        in_chunks = logits_after(model, ids, chunks, (PROMPT, PROMPT + 4, TOKENS))
        assert (in_chunks - found).abs().mean() < 0.01 * effect


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_selects_no_padding_beside_an_exact_window(name: str, make_model: Callable[..., Any]) -> None:
    """A sequence behind padding is what it is alone; tolerance: rotary angles and rows are computed in float32."""
    # Of so many heads' products one is positive, so that no tokens tie at a score of 0.
    model, ids, padding = make_model(name, index_n_heads=32).double(), some_tokens(), 9
    model.set_experts_implementation("eager")  # the default takes no float64
    profile = profile_at(model.config, 4, ExactWindow(8))
    padded = torch.cat((some_tokens()[:, -padding:], ids), dim=1)
    mask = torch.ones_like(padded)
    mask[1, :padding] = 0
    positions = torch.stack((torch.arange(padding + TOKENS), (torch.arange(padding + TOKENS) - padding).clamp(min=0)))

    def logits_in_chunks(sequences: slice, first: int) -> Tensor:
        cache, parts = KVTunerCache.from_profile_unchecked(profile, model.config, "cache"), []
        with cache.attending(model):
            for start, stop in itertools.pairwise((first, 25, 26, 31, padding + TOKENS)):
                parts.append(
                    model(
                        padded[sequences, start:stop],
                        attention_mask=mask[sequences, first:stop],
                        position_ids=positions[sequences, start:stop],
                        past_key_values=cache,
                    ).logits[:, max(padding - start, 0) :]
                )
        return torch.cat(parts, dim=1)

    found, alone = logits_in_chunks(slice(None), 0)[1:], logits_in_chunks(slice(1, 2), padding)
    assert (found - alone).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["deepseek-v2", "glm-moe-dsa"])
def test_generation_beams_and_crops_go_through_packed_latents(name: str, make_model: Callable[..., Any]) -> None:
    model, ids = make_model(name), some_tokens()[:1, :PROMPT]
    profile = profile_at(model.config, 8)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    cache = KVTunerCache.from_profile_unchecked(profile, model.config)
    found = model.generate(ids, **options, past_key_values=cache)
    assert cache.get_seq_length() == PROMPT + 5
    assert (found == plain).float().mean() > 0.9
    cache.crop(-2)
    assert cache.get_seq_length() == PROMPT + 3
    assert cache.index_bytes == 4 * INDEX * INDEXES.get(name, 0) * (PROMPT + 3)
    beams = KVTunerCache.from_profile_unchecked(profile, model.config)
    model.generate(ids, **options, num_beams=2, past_key_values=beams)
    beams.reset()
    assert (beams.stored_bytes, beams.index_bytes) == (0, 0)


def test_what_latents_cannot_have_is_refused(make_model: Callable[..., Any]) -> None:
    model = make_model("deepseek-v3")
    geometry = read_cache_geometry(model.config)
    profile = profile_at(model.config, 4)
    with pytest.raises(PrecisionError, match="a latent is read as keys and as values and has one width, not K8V4"):
        uniform_profile(geometry, PrecisionPair(8, 4), profile.model)
    cache = KVTunerCache.from_profile_unchecked(profile, model.config)
    with (
        pytest.raises(ServingError, match="rows are read in place where all layers are full"),
        cache.attending(model, in_place=True),
    ):
        pass
    with pytest.raises(ProfileError, match="head_dim 32, but this model has 64"):
        KVTunerCache.from_profile(profile, make_model("deepseek-v3", kv_lora_rank=64).config)
    with pytest.raises(ProfileError, match="rope_dim 8, but this model has 16"):
        KVTunerCache.from_profile(profile, make_model("deepseek-v3", qk_rope_head_dim=16).config)
    with pytest.raises(
        ProfileError, match=r"layer 0 has an index of keys of 16 channels .* but no index in this model"
    ):
        KVTunerCache.from_profile(profile_at(make_model("deepseek-v32").config, 4), make_model("deepseek-v2").config)
    with pytest.raises(ProfileError, match="v_head_dim 0, but this model has"):
        KVTunerCache.from_profile(profile, make_model("llama-gqa", num_key_value_heads=1, head_dim=32).config)
