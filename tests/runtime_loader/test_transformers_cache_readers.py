"""Layers that read another one's rows: a cache that owners alone fill, against the simulator and token by token."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3nTextConfig

from kvtuner.calibration.forward.attention_hook import register_hook
from kvtuner.calibration.forward.chain import DecoderChain
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.forward.simulator import LayerSpec, quantized_attention
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow
from kvtuner.runtime_loader.transformers_cache import KVTunerCache
from kvtuner.runtime_loader.transformers_layer import KVTunerLayer
from kvtuner.supported_models import read_cache_geometry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fixture_types import ProfileOf

    from kvtuner.exported_configs.profile.profile import Profile

PROMPT, TOKENS = 40, 52
READERS = ("gemma4-readers", "gemma3n")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def tokens_of(batch: int) -> Tensor:
    return torch.randint(2, 320, (batch, TOKENS), generator=torch.Generator().manual_seed(5))


def one_by_one(model: Any, profile: Profile, ids: Tensor) -> tuple[Tensor, KVTunerCache]:
    """Logits of all tokens after the prompt, each read alone, and the cache."""
    cache = KVTunerCache.from_profile(profile, model.config, allow_derived=True)
    with cache.attending(model):
        model(ids[:, :PROMPT], past_key_values=cache)
        logits = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(PROMPT, TOKENS)]
    return torch.cat(logits, dim=1), cache


def simulated(model: Any, profile: Profile, ids: Tensor) -> Tensor:
    """The same logits of a model whose keys and values are as the profile stores them, all tokens at once."""
    hooked = copy.deepcopy(model)
    hooked.set_attn_implementation(register_hook())
    chain = DecoderChain(hooked, read_cache_geometry(hooked.config))
    specs = {
        layer: LayerSpec(profile.quant_spec(layer, "k"), profile.quant_spec(layer, "v"), profile.window)
        for layer in profile.tuned_geometry().ids
    }
    positions = torch.arange(TOKENS).expand(len(ids), -1)
    trace = chain.trace(ids, positions, quantized_attention(specs, ReadPlan("decode", PROMPT)))
    return chain.logits(trace.final)[:, PROMPT:]


@pytest.mark.filterwarnings("ignore:the profile of tiny is for configuration")
@pytest.mark.parametrize("window", [ExactWindow(), ExactWindow(8, 2)], ids=str)
@pytest.mark.parametrize("bits", [(2, 2), (4, 3), (8, 8)])
@pytest.mark.parametrize("name", READERS)
def test_tokens_and_logits_are_those_of_the_simulation_in_which_readers_read_what_the_owner_stores(
    name: str, bits: tuple[int, int], window: ExactWindow, make_model: Callable[..., Any], profile_of: ProfileOf
) -> None:
    """A code may be another after sums in another order, which moves few logits by a small part of the effect."""
    model, ids = make_model(name), tokens_of(2)
    num_tuned = read_cache_geometry(model.config).tuned().num_layers
    profile = profile_of(model.config, [LayerQuantization(*bits)] * num_tuned, window=window, by_kinds=True)
    found, cache = one_by_one(model, profile, ids)
    expected, exact = simulated(model, profile, ids), model(ids, use_cache=False).logits[:, PROMPT:]
    assert (found - expected).abs().mean() < 0.01 * (found - exact).abs().mean()
    assert (found.argmax(-1) == expected.argmax(-1)).all()
    assert cache.stored_bytes == 2 * TOKENS * profile.bytes_per_token()


@pytest.mark.filterwarnings("ignore:the profile of tiny is for configuration")
@pytest.mark.parametrize("name", READERS)
def test_owners_alone_have_a_layer_of_the_cache(
    name: str, make_model: Callable[..., Any], profile_of: ProfileOf
) -> None:
    model = make_model(name)
    profile = profile_of(model.config, [LayerQuantization(4, 4)] * 2, by_kinds=True)
    cache = KVTunerCache.from_profile(profile, model.config, allow_derived=True)
    assert [isinstance(layer, KVTunerLayer) for layer in cache.layers] == [True, False, True, False]
    other = make_model(name, num_kv_shared_layers=1)
    with pytest.raises(ProfileError, match="has num_layers 2, but this model has 3"):
        KVTunerCache.from_profile(profile, other.config, allow_derived=True)
    types = other.config.layer_types
    longer = make_model(name, num_hidden_layers=9, num_kv_shared_layers=5, layer_types=[*types, *types[-2:]])
    with pytest.raises(ProfileError, match="has 7 layers, but this model has 9"):
        KVTunerCache.from_profile(profile, longer.config, allow_derived=True)


@pytest.mark.filterwarnings("ignore:the profile of tiny is for configuration")
def test_a_profile_of_version_1_counts_readers_of_the_last_layer(profile_of: ProfileOf) -> None:
    """Where all layers are full, version 1 says as much of readers as the kinds of version 2."""
    fields: dict[str, Any] = {
        "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16,
        "num_kv_shared_layers": 2, "layer_types": ["full_attention"] * 5,
    }  # fmt: skip
    config = Gemma3nTextConfig(**fields)
    layers = [LayerQuantization(4, 4)] * 3
    counted, by_kinds = profile_of(config, layers), profile_of(config, layers, by_kinds=True)
    assert (counted.schema_version, by_kinds.schema_version) == (1, 2)
    assert counted.bytes_per_token() == by_kinds.bytes_per_token()
    for profile in (counted, by_kinds):
        assert len(KVTunerCache.from_profile(profile, config, allow_derived=True).layers) == 3
        with pytest.raises(ProfileError, match="this model has"):
            more = Gemma3nTextConfig(**{**fields, "num_kv_shared_layers": 1})
            KVTunerCache.from_profile(profile, more, allow_derived=True)


@pytest.mark.filterwarnings("ignore:the profile of tiny is for configuration")
@pytest.mark.parametrize("name", READERS)
def test_generation_goes_through_the_models_own_loop(
    name: str, make_model: Callable[..., Any], profile_of: ProfileOf
) -> None:
    model, ids = make_model(name), tokens_of(1)[:, :PROMPT]
    asked: dict[str, Any] = {"min_new_tokens": 6, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    profile = profile_of(model.config, [LayerQuantization(16, 16)] * 2, by_kinds=True)
    cache = KVTunerCache.from_profile(profile, model.config, allow_derived=True)
    assert torch.equal(model.generate(ids, past_key_values=cache, **asked), model.generate(ids, **asked))
    assert cache.get_seq_length() == PROMPT + 5
