"""What each layer caches, by the configurations of real models and of custom code, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from kvtuner.errors import GeometryError, KVTunerError, UnsupportedModelError
from kvtuner.geometry import ModelGeometry
from kvtuner.layer_geometry import CacheGeometry
from kvtuner.supported_models import has_states, read_cache_geometry, refuse_other_caches

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


def config_of(prefix: str, **fields: Any) -> Any:
    return getattr(transformers, f"{prefix}Config")(**fields)


def remote(**fields: Any) -> Any:
    """What custom code on the hub may bring: only the fields that it likes."""
    text = SimpleNamespace(**HEADS, **fields)
    return SimpleNamespace(get_text_config=lambda decoder: text)


@pytest.mark.parametrize(
    ("prefix", "fields", "kinds", "tuned"),
    [
        ("Llama", {}, {"full": 32}, (32, 32, 32, 128, 128)),
        ("Gemma3Text", {}, {"window:4096": 22, "full": 4}, (4, 8, 4, 256, 256)),
        ("GptOss", {}, {"window:128": 18, "full": 18}, (18, 64, 8, 64, 64)),
        ("Gemma4Text", {}, {"window:512": 25, "full": 5}, (5, 8, 4, 512, 512)),
        ("Llama4Text", {}, {"window:8192": 36, "full": 12}, (12, 40, 8, 128, 128)),
        ("Qwen3Next", {}, {"none": 36, "full": 12}, (12, 16, 2, 256, 256)),
        ("Jamba", {}, {"none": 28, "full": 4}, (4, 32, 8, 128, 128)),
        ("MiMoV2Flash", {}, {"full": 9, "window:128": 39}, (9, 64, 4, 192, 128)),
        ("NemotronH", {"layers_block_type": ["mamba", "attention", "moe"]}, {"none": 2, "full": 1}, None),
        ("FalconH1", {}, {"full": 32}, None),
        # As of Gemma 3n E4B and E2B, and of Gemma 4 E2B: readers read the last layer of their type that has keys.
        (
            "Gemma3nText",
            {},
            {"window:512": 16, "full": 4, "shared:18": 12, "shared:19": 3},
            (4, 8, 2, 256, 256),
        ),
        (
            "Gemma3nText",
            {"num_hidden_layers": 30, "num_kv_shared_layers": 10},
            {"window:512": 16, "full": 4, "shared:18": 8, "shared:19": 2},
            (4, 8, 2, 256, 256),
        ),
        (
            "Gemma4Text",
            {
                "num_hidden_layers": 35,
                "num_kv_shared_layers": 20,
                "num_key_value_heads": 1,
                "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            },
            {"window:512": 12, "full": 3, "shared:13": 16, "shared:14": 4},
            (3, 8, 1, 512, 512),
        ),
        (
            "Gemma4Text",
            {"num_kv_shared_layers": 6, "sliding_window": 131072, "global_head_dim": 256},
            {"full": 24, "shared:22": 5, "shared:23": 1},
            (24, 8, 4, 256, 256),
        ),
    ],
)
def test_layers_of_real_models_have_their_kinds(
    prefix: str, fields: dict[str, Any], kinds: dict[str, int], tuned: tuple[int, ...] | None
) -> None:
    geometry = read_cache_geometry(config_of(prefix, **fields))
    found = [str(layer.kind) for layer in geometry.layers]
    assert {kind: found.count(kind) for kind in dict.fromkeys(found)} == kinds
    full = geometry.tuned()
    assert full.ids == tuple(layer_id for layer_id, kind in enumerate(found) if kind == "full")
    assert tuned in (None, tuple(full.counts().values())[:5])


@pytest.mark.parametrize(
    ("prefix", "kinds", "counts"),
    [
        ("DeepseekV2", {"latent": 32}, (32, 1, 512, 0, 64)),
        ("DeepseekV3", {"latent": 61}, (128, 1, 512, 0, 64)),
        ("Glm4MoeLite", {"latent": 47}, (20, 1, 512, 0, 64)),
        ("MiniCPM3", {"latent": 62}, (40, 1, 256, 0, 32)),
        ("KimiLinear", {"none": 21, "latent": 6}, (32, 1, 512, 0, 64)),
    ],
)
def test_latents_of_real_models_are_one_head_and_rotary_channels_beside_it(
    prefix: str, kinds: dict[str, int], counts: tuple[int, ...]
) -> None:
    geometry = read_cache_geometry(config_of(prefix))
    found = [str(layer.kind) for layer in geometry.layers]
    assert {kind: found.count(kind) for kind in dict.fromkeys(found)} == kinds
    tuned = geometry.tuned()
    assert (*(*tuned.counts().values(),)[1:5], tuned.rope_dim) == counts
    assert tuned.is_latent and tuned.sides == ("k",)
    with pytest.raises(UnsupportedModelError, match=r"MLA|linear_attention"):
        refuse_other_caches(config_of(prefix))
    assert CacheGeometry.of(replace(tuned, layer_ids=None)).tuned() == replace(tuned, layer_ids=None)


def test_indexes_beside_latents_are_those_of_the_layers_that_have_one() -> None:
    """GLM-5 has one in every layer, or some layers read by that of a layer before them.

    SGLang keeps a token's keys in fp8 with a scale.
    """
    assert read_cache_geometry(config_of("DeepseekV32")).index_bytes() == 61 * (128 + 4)
    assert read_cache_geometry(config_of("GlmMoeDsa")).index_bytes() == 78 * (128 + 4)
    geometry = read_cache_geometry(config_of("GlmMoeDsa", num_hidden_layers=5, index_topk_pattern="FSSFS"))
    assert [layer.index_dim for layer in geometry.layers] == [128, 0, 0, 128, 0]
    assert geometry.tuned() == read_cache_geometry(config_of("GlmMoeDsa", num_hidden_layers=5)).tuned()
    assert geometry.tuned().counts() == {**geometry.layers[1].model_counts(), "num_layers": 5, "num_shared_layers": 0}


def test_heads_of_windows_may_be_others() -> None:
    layers = read_cache_geometry(config_of("Gemma4Text")).layers
    assert [(layer.num_kv_heads, layer.head_dim) for layer in layers[4:6]] == [(4, 256), (4, 512)]
    own = remote(
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=8, max_position_embeddings=64, num_hidden_layers=2, swa_head_dim=32,
    )  # fmt: skip
    assert [layer.head_dim for layer in read_cache_geometry(own).layers] == [16, 32]


def test_a_window_as_long_as_the_context_is_none() -> None:
    config = config_of("Gemma3Text", max_position_embeddings=8192)
    assert read_cache_geometry(config, context_length=4097).tuned().num_layers == 4
    whole = read_cache_geometry(config, context_length=4096)
    assert whole.tuned() == ModelGeometry.from_config(config) and whole.tuned().layer_ids is None


@pytest.mark.parametrize(
    ("config", "error", "named"),
    [
        (config_of("Glm5NextText"), UnsupportedModelError, "has indexed_attention in layer 3, which reads its tokens"),
        (remote(kv_lora_rank=16, num_hidden_layers=2), GeometryError, "has no qk_rope_head_dim"),
        (
            remote(kv_lora_rank=16, sliding_window=8, max_position_embeddings=64),
            UnsupportedModelError,
            "has sliding_attention in layer 0, which reads its tokens otherwise",
        ),
        (config_of("T5"), UnsupportedModelError, "'t5' has an encoder"),
        (config_of("Mamba"), UnsupportedModelError, "'mamba' has no layer with a KV cache"),
        (
            config_of("Gemma4Text", num_kv_shared_layers=25),
            UnsupportedModelError,
            "'gemma4_text' has full_attention in layer 5, one of 25 layers that read another layer's keys, but no layer"
            " of that type has keys of its own",
        ),
        (remote(num_hidden_layers=2, num_kv_shared_layers=3), UnsupportedModelError, "has full_attention in layer 0"),
        (config_of("Qwen4ExpText"), UnsupportedModelError, "has indexed_attention in layer 3, which reads its tokens"),
        (
            config_of("Mistral", sliding_window=4096, max_position_embeddings=8192),
            UnsupportedModelError,
            "'mistral' has sliding_attention in all layers that have keys: a window of 4096 tokens, shorter than the"
            " context of 8192; search with --context-length 4096",
        ),
        (remote(layer_types=["full_attention", "what"]), UnsupportedModelError, "has what in layer 1"),
        (remote(layer_types=["full_attention", "sliding_attention"]), UnsupportedModelError, "sliding_attention in l"),
        (
            config_of("Laguna", num_hidden_layers=2, num_attention_heads_per_layer=[48, 64]),
            GeometryError,
            "num_attention_heads_per_layer differs from layer to layer",
        ),
        (
            remote(layer_types=["full_attention", "full_attention", "conv"], head_dim=[16, 32, 16]),
            GeometryError,
            "layer 1 has other heads or channels than layer 0",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused_by_name(config: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        read_cache_geometry(config)


def test_states_beside_keys_are_told() -> None:
    states = [has_states(config_of(name)) for name in ("Llama", "Gemma3Text", "Qwen3Next", "FalconH1")]
    assert states == [False, False, True, True]
    assert has_states(remote(layer_types=["conv", "full_attention"]))


@pytest.mark.slow  # imports the configurations of all models
def test_no_configuration_that_transformers_makes_is_anything_but_read_or_refused() -> None:
    """Six hundred kinds, those of encoders, images and sound too; a few cannot be made without parts."""
    read = refused = 0
    for name in CONFIG_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:  # one that needs the configurations of its parts
            continue
        for check in (read_cache_geometry, refuse_other_caches, has_states):
            try:
                check(config)
            except KVTunerError as error:
                assert "\n" not in str(error)
                refused += 1
            else:
                read += 1
    assert read > 1000 and refused > 300
