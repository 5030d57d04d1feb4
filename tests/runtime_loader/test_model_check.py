"""A profile is checked against the context that it was made for, and against its own model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from transformers import MistralConfig

from kvtuner.errors import ProfileError, UnsupportedModelError
from kvtuner.exported_configs.build import LayerChoice
from kvtuner.runtime_loader.model_check import calibrated_positions, check_model
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.exported_configs.profile import Profile

LAYERS = [LayerChoice(4, 4), LayerChoice(4, 4)]


def windowed(window: int, *, num_heads: int = 4) -> MistralConfig:
    return MistralConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=window,
    )


def test_a_window_as_long_as_the_profile_s_context_is_no_window(profile_of: Callable[..., Profile]) -> None:
    profile = profile_of(windowed(128), LAYERS, last_position=127)
    assert calibrated_positions(profile) == 128
    check_model(profile, windowed(128))
    assert len(KVTunerCache.from_profile(profile, windowed(128)).layers) == 2


def test_a_window_shorter_than_the_profile_s_context_is_refused_with_a_way_out(
    profile_of: Callable[..., Profile],
) -> None:
    profile = profile_of(windowed(128), LAYERS, last_position=127)
    with pytest.raises(UnsupportedModelError, match=r"window of 127 .* 128; search with --context-length 127"):
        KVTunerCache.from_profile(profile, windowed(127))


def test_without_a_calibration_the_model_s_positions_are_the_context(profile_of: Callable[..., Profile]) -> None:
    profile = profile_of(windowed(128), LAYERS)
    assert calibrated_positions(profile) is None
    with pytest.raises(UnsupportedModelError, match=r"window of 128 .* context of 512"):
        check_model(profile, windowed(128))


def test_another_model_is_refused(profile_of: Callable[..., Profile]) -> None:
    profile = profile_of(windowed(128), LAYERS, last_position=127)
    with pytest.raises(ProfileError, match="has num_attention_heads 4, but this model has 2"):
        check_model(profile, windowed(128, num_heads=2))
