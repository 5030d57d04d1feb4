"""A profile is checked against the context that it was made for, and against its own model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import Gemma3nTextConfig, MistralConfig

from kvtuner.errors import ProfileError, UnsupportedModelError
from kvtuner.evaluation.cache_scheme import ProfileScheme
from kvtuner.exported_configs.identity.model_identity import identity_of
from kvtuner.exported_configs.profile.build import LayerQuantization, uniform_profile
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import ExactWindow, PrecisionPair, ScaleLayout
from kvtuner.runtime_loader.model_check import (
    calibrated_positions,
    check_model,
    check_token_groups,
)
from kvtuner.runtime_loader.transformers_cache import KVTunerCache
from kvtuner.runtime_loader.transformers_layer import KVTunerLayer

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import ProfileOf

    from kvtuner.exported_configs.profile.profile import Profile

LAYERS = [LayerQuantization(4, 4), LayerQuantization(4, 4)]


def windowed(window: int, *, num_heads: int = 4) -> MistralConfig:
    return MistralConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=window,
    )


def test_a_window_as_long_as_the_profile_s_context_is_no_window(profile_of: ProfileOf) -> None:
    profile = profile_of(windowed(128), LAYERS, last_position=127)
    assert calibrated_positions(profile) == 128
    check_model(profile, windowed(128))
    assert len(KVTunerCache.from_profile(profile, windowed(128)).layers) == 2


def test_a_window_shorter_than_the_profile_s_context_is_refused_with_a_way_out(profile_of: ProfileOf) -> None:
    profile = profile_of(windowed(128), LAYERS, last_position=127)
    with pytest.raises(UnsupportedModelError, match=r"window of 127 .* 128; search with --context-length 127"):
        KVTunerCache.from_profile(profile, windowed(127))


def test_without_a_calibration_the_model_s_positions_are_the_context(profile_of: ProfileOf) -> None:
    profile = profile_of(windowed(128), LAYERS)
    assert calibrated_positions(profile) is None
    with pytest.raises(UnsupportedModelError, match=r"window of 128 .* context of 512"):
        check_model(profile, windowed(128))


def test_keys_per_channel_need_a_window_of_a_group(profile_of: ProfileOf) -> None:
    config = windowed(512)
    served = profile_of(config, [LayerQuantization(4, 4), LayerQuantization(16, 4)])

    def per_channel(k_bits: int, residual_length: int) -> Profile:
        layout, window = ScaleLayout(32, granularity="per_channel"), ExactWindow(residual_length)
        pair = PrecisionPair(k_bits, 4)
        return uniform_profile(served.to_geometry(), pair, served.model, k_layout=layout, window=window)

    for check in (check_model, KVTunerCache.from_profile):
        check(served, config)
        check(per_channel(16, 0), config)
        check(per_channel(4, 32), config)
        with pytest.raises(ProfileError, match="32 tokens per scale need residual_length 32 or more, not 31"):
            check(per_channel(4, 31), config)
    latents = ModelGeometry(2, 8, 1, 64, 0, rope_dim=16)
    layout = ScaleLayout(32, granularity="per_channel")
    with pytest.raises(ProfileError, match="latents are stored per token, not per channel"):
        check_token_groups(
            uniform_profile(latents, PrecisionPair(4, 4), served.model, k_layout=layout, window=ExactWindow(32))
        )


def test_an_exact_window_is_kept_by_the_transformers_cache_and_asked_of_servers(
    profile_of: ProfileOf, tmp_path: Path
) -> None:
    config = windowed(512)
    profile = profile_of(config, [LayerQuantization(4, 4)] * 2, window=ExactWindow(32, 4))
    check_model(profile, config)
    assert KVTunerCache.from_profile(profile, config).window == ExactWindow(32, 4)
    flag, path = ProfileScheme.of("own", profile).server_flags(tmp_path)
    assert flag == "--kvtuner-profile"
    assert load_profile(Path(path)).window == ExactWindow(32, 4)


def test_another_model_is_refused(profile_of: ProfileOf) -> None:
    profile = profile_of(windowed(128), LAYERS, last_position=127)
    with pytest.raises(ProfileError, match="has num_attention_heads 4, but this model has 2"):
        check_model(profile, windowed(128, num_heads=2))


def recorded(profile: Profile, config: MistralConfig, **changes: Any) -> Profile:
    """A profile that says which configuration it was searched for."""
    given: dict[str, Any] = {"id": "Owner/Name", "revision": None, "dtype": "bfloat16"}
    model = identity_of(config, **given).model_copy(update={"architecture": profile.model.architecture, **changes})
    return profile.model_copy(update={"model": model})


def test_a_cache_takes_the_configuration_that_was_searched_in_whatever_words(profile_of: ProfileOf) -> None:
    profile = recorded(profile_of(windowed(128), LAYERS, last_position=127), windowed(128))
    config = windowed(128)
    config._name_or_path, config.dtype, config.eos_token_id = "somewhere/deep/else", "float16", 7
    assert KVTunerCache.from_profile(profile, config).get_seq_length() == 0  # and without a warning


def test_a_cache_refuses_a_derived_configuration_unless_it_is_allowed(profile_of: ProfileOf) -> None:
    profile = recorded(profile_of(windowed(128), LAYERS, last_position=127), windowed(128))
    derived = windowed(128)
    derived.intermediate_size += 1
    with pytest.raises(ProfileError, match=r"of Owner/Name is for configuration sha256:\w+, .* by allow_derived=True$"):
        KVTunerCache.from_profile(profile, derived)
    with pytest.warns(UserWarning, match="allowed: kvtuner eval PROFILE --model Owner/Name tells what that costs"):
        cache = KVTunerCache.from_profile(profile, derived, allow_derived=True)
    assert len(cache.layers) == 2
    assert len(KVTunerCache.from_profile_unchecked(profile).layers) == 2
    with pytest.raises(ProfileError, match="has num_attention_heads 4, but this model has 2"):
        KVTunerCache.from_profile(profile, windowed(128, num_heads=2), allow_derived=True)


def test_a_cache_refuses_a_fine_tune_of_the_hub_by_its_name(profile_of: ProfileOf) -> None:
    profile = recorded(profile_of(windowed(128), LAYERS, last_position=127), windowed(128))
    tuned = windowed(128)
    for place in ("Owner/Name-Chat", "/x/hub/models--Owner--Name-Chat/snapshots/" + "0" * 40):
        tuned._name_or_path = place
        with pytest.raises(ProfileError, match="is for Owner/Name, but this model is Owner/Name-Chat, of the same"):
            KVTunerCache.from_profile(profile, tuned)


def test_a_cache_warns_of_other_rotations(profile_of: ProfileOf) -> None:
    profile = recorded(profile_of(windowed(128), LAYERS, last_position=127), windowed(128))
    turned = windowed(128)
    turned.rope_parameters = {"rope_type": "default", "rope_theta": 7.0}
    with pytest.warns(UserWarning, match="measured under other rotations"):
        KVTunerCache.from_profile(profile, turned)


@pytest.mark.filterwarnings("ignore:the profile of tiny is for configuration")
@pytest.mark.parametrize("name", ["gemma4-readers", "gemma3n"])
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
    """Version 1 says as much of readers as the kinds of version 2 where all layers are full."""
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
