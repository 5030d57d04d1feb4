"""Fields that decide nothing of the network, as official files and servers write them, do not change its hash."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from kvtuner.exported_configs.identity.model_identity import config_sha256


def built(family: str, **values: Any) -> str:
    """The hash of a configuration as a file has it: what is derived follows from the rest."""
    config = getattr(transformers, f"{family}Config")
    return config_sha256(
        config.from_dict({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, **values})
    )


WINDOWS_OFF = [{"sliding_window": window, "max_window_layers": n} for window in (None, 64, 131072) for n in (0, 3, 28)]


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Qwen2Moe", "Qwen3Moe"])
def test_windows_that_are_off_count_nothing(kind: str) -> None:
    assert {built(kind, **values) for values in WINDOWS_OFF} == {built(kind)}
    assert built(kind, use_sliding_window=True, sliding_window=64, max_window_layers=2) != built(kind)


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3"])
def test_windows_count_only_where_a_layer_slides(kind: str) -> None:
    above = [{"use_sliding_window": True, "sliding_window": 64, "max_window_layers": n} for n in (4, 5, 28)]
    listed = {"use_sliding_window": False, "layer_types": ["full_attention"] * 4, "max_window_layers": 9}
    assert {built(kind, **values) for values in (*WINDOWS_OFF, *above, listed)} == {built(kind)}
    on = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * 2
    assert built(kind, **on) == built(kind, **{**on, "max_window_layers": 7}, layer_types=kinds)
    different = [{}, on, {**on, "sliding_window": 65}, {**on, "max_window_layers": 3}, {**on, "max_window_layers": 0}]
    assert len({built(kind, **values) for values in different}) == len(different)


@pytest.mark.parametrize("kind", ["Mistral", "Phi3"])
def test_windows_of_all_layers_count(kind: str) -> None:
    assert len({built(kind, sliding_window=window) for window in (None, 64, 4096)}) == 3
    stray = {"layer_types": ["full_attention"] * 4}  # which these classes do not read
    assert built(kind, sliding_window=64, **stray) == built(kind, sliding_window=64)


def test_windows_of_a_configuration_without_a_list_of_layers_count_while_they_are_on() -> None:
    class Unlisted(transformers.PretrainedConfig):  # type: ignore[misc]  # transformers is untyped here
        model_type = "unlisted"
        use_sliding_window: bool = False
        sliding_window: int | None = None
        max_window_layers: int = 28

    on = {"use_sliding_window": True, "sliding_window": 64}
    assert config_sha256(Unlisted(sliding_window=64, max_window_layers=3)) == config_sha256(Unlisted())
    assert len({config_sha256(Unlisted(**on, max_window_layers=number)) for number in (2, 3)}) == 2


@pytest.mark.parametrize(
    ("kind", "noise"),
    [
        ("Llama", {"head_dim": None, "num_key_value_heads": None, "pretraining_tp": 2, "rope_scaling": None}),
        ("Llama", {"head_dim": 16, "num_key_value_heads": 4, "attention_dropout": 0, "rope_interleaved": False}),
        ("Mistral", {"head_dim": 16, "attention_dropout": 0.5}),
        (
            "Phi3",
            {"original_max_position_embeddings": 99, "embd_pdrop": 0.5, "resid_pdrop": 0.5, "attention_bias": False},
        ),
        ("Gemma", {"hidden_act": "gelu", "hidden_activation": None, "use_bidirectional_attention": False}),
        ("Gemma2", {"cache_implementation": "hybrid", "use_bidirectional_attention": False}),
        ("Gemma2", {"layer_types": ["sliding_attention", "full_attention"] * 2, "use_bidirectional_attention": None}),
        ("Gemma3Text", {"sliding_window_pattern": 6, "cache_implementation": "hybrid"}),
        ("Qwen3", {"attention_bias": False, "max_window_layers": 36, "sliding_window": 4096}),
    ],
)
def test_what_official_files_say_besides_changes_nothing(kind: str, noise: dict[str, Any]) -> None:
    assert built(kind, **noise) == built(kind)


def test_switches_that_are_on_and_numbers_that_are_zero_count() -> None:
    for family, values in (
        ("Gemma", {"use_bidirectional_attention": True}),
        ("Llama", {"attention_bias": True}),
        ("Gemma2", {"attn_logit_softcapping": None}),
        ("Gemma2", {"final_logit_softcapping": 0.0}),
        ("Gemma3Text", {"attn_logit_softcapping": 0.0}),
    ):
        assert built(family, **values) != built(family)
