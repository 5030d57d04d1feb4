"""Models whose windows or rotary positions SGLang's own code reads otherwise than transformers are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Exaone4Config, Llama4Config, Olmo3Config, Qwen3NextConfig

from kvtuner.errors import ServingError, UnsupportedModelError
from kvtuner.runtime_loader.sglang.compat.differences import refuse_ordered_channels, refuse_other_positions

W, C, F = "sliding_attention", "chunked_attention", "full_attention"
TURNS = {"layer_types": [C, C, C, F] * 2}
WORD = {"layer_types": [W, F, W, F], "sliding_window_pattern": "LG"}


def exaone(base: float = 1e6, **fields: Any) -> Exaone4Config:
    rope = {"rope_type": "default", "rope_theta": base}
    return Exaone4Config(
        architectures=["Exaone4ForCausalLM"], num_hidden_layers=4, rope_parameters=rope, **{**WORD, **fields}
    )


@pytest.mark.parametrize(
    "fields",
    [
        WORD,
        {"layer_types": [W, W, W, F], "sliding_window_pattern": "LLLG"},
        {"layer_types": [F] * 4, "sliding_window": None},
        {"layer_types": [F] * 4, "sliding_window_pattern": "G"},
    ],
)
def test_an_exaone_4_is_served_by_the_word_that_makes_its_layers_and_by_no_other(fields: dict[str, Any]) -> None:
    config = exaone(**fields)
    refuse_other_positions(config, config)
    config.sliding_window_pattern = "LLG"
    with pytest.raises(UnsupportedModelError, match="this model has 'LLG' in its place"):
        refuse_other_positions(config, config)


@pytest.mark.parametrize(("pattern", "shown"), [(2, "2"), ("LLG", "'LLG'"), (None, "None")])
def test_a_pattern_that_is_not_the_word_of_the_layers_is_shown_as_it_is_configured(
    pattern: int | str | None, shown: str
) -> None:
    config = exaone(sliding_window_pattern=pattern)
    with pytest.raises(UnsupportedModelError, match=f"this model has {shown} in its place, and layers LGLG; write the"):
        refuse_other_positions(config, config)


@pytest.mark.parametrize("pattern", [None, 0])
def test_full_layers_beside_a_window_that_none_has_are_rotated_by_sglang_alone(pattern: int | None) -> None:
    config = exaone(layer_types=[F] * 4, sliding_window=24, sliding_window_pattern=pattern)
    with pytest.raises(UnsupportedModelError, match=f"none of its layers, and SGLang, by {pattern} for its sliding_wi"):
        refuse_other_positions(config, config)


def test_a_rotary_base_that_sglang_does_not_read_is_refused_with_the_flag_that_tells_it() -> None:
    config = exaone(5e5)
    line = """which is 500000.0 by .*; add --json-model-override-args '{"rope_theta": 500000.0}' \\(SGLang reads"""
    with pytest.raises(UnsupportedModelError, match=line):
        refuse_other_positions(config, config)
    config.rope_theta = 500000.0
    refuse_other_positions(config, config)


def test_a_base_is_compared_with_what_sglangs_own_configuration_holds() -> None:
    """SGLang reads some models by a class of its own, which takes a default where a file has rope_parameters alone."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    config = Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"], rope_parameters=rope)
    served = SimpleNamespace(architectures=["Qwen3NextForCausalLM"], rope_theta=1e4)
    with pytest.raises(UnsupportedModelError, match=r"takes 10000.0 for its rotary base, which is 10000000.0"):
        refuse_other_positions(config, served)
    served.rope_theta = 10_000_000
    refuse_other_positions(config, served)


def olmo(sliding: dict[str, Any] | None = None, **full: Any) -> Olmo3Config:
    """An OLMo 3 with rotary parameters by type of layer."""
    rope = {"rope_type": "default", "rope_theta": 5e5}
    by_type = {"sliding_attention": {**rope, **(sliding or {})}, "full_attention": {**rope, **full}}
    return Olmo3Config(architectures=["Olmo3ForCausalLM"], rope_parameters=by_type)


def test_a_base_by_type_of_layer_is_refused_where_sglang_reads_one_field() -> None:
    served = SimpleNamespace(architectures=["Olmo2ForCausalLM"], rope_theta=10000.0)
    with pytest.raises(UnsupportedModelError, match=r"Olmo3ForCausalLM takes 10000.0 for .*, which is 5000"):
        refuse_other_positions(olmo(), served)
    served.rope_theta = 5e5
    refuse_other_positions(olmo(), served)


def test_two_bases_or_a_scaling_of_one_type_of_layer_are_refused_whatever_field_sglang_has() -> None:
    served = SimpleNamespace(architectures=["Olmo2ForCausalLM"], rope_theta=5e5)
    with pytest.raises(UnsupportedModelError, match=r"this model has bases \[10000.0, 500000.0\]"):
        refuse_other_positions(olmo({"rope_theta": 1e4}), served)
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    with pytest.raises(UnsupportedModelError, match=r"this model has a rope_type of \{'full_attention': 'yarn'\}; "):
        refuse_other_positions(olmo(**yarn), served)
    served.rope_scaling = yarn
    refuse_other_positions(olmo(**yarn), served)


def llama(**text: Any) -> Llama4Config:
    turns = {"num_hidden_layers": 8, "interleave_moe_layer_step": 2}
    return Llama4Config(architectures=["Llama4ForConditionalGeneration"], text_config={**turns, **text})


@pytest.mark.parametrize("step", [0, 1, 2, 3, 9])
def test_a_llama_4_is_served_by_the_turns_of_its_layers_that_transformers_makes_too(step: int) -> None:
    of_all = {"moe_layers": list(range(8))} if step == 0 else {}
    config = llama(interleave_moe_layer_step=step, **of_all)
    text = config.text_config
    assert [layer for layer, rotates in enumerate(text.no_rope_layers) if not rotates] == [3, 7]
    refuse_other_positions(config, config)
    text.no_rope_layers[3] = 1  # which is enough to be refused
    with pytest.raises(UnsupportedModelError, match="no_rope_layers of this model names layers 7, and SGLang's code"):
        refuse_other_positions(config, config)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ({"layer_types": [C, F] * 4}, "layer_types of this model names layers 1, 3, 5, 7, and SGLang's .* 3, 7, what"),
        ({"layer_types": [F] * 8}, "layer_types of this model names layers 0-7, and SGLang's code for Llama4For"),
        ({"no_rope_layers": [1] * 8, **TURNS}, "no_rope_layers of this model names no layer, and SGLang's code for"),
        ({"no_rope_layers": [1, 0] * 4, **TURNS}, "no_rope_layers of this model names layers 1, 3, 5, 7, and SGL"),
        ({"moe_layers": [1, 3]}, "moe_layers of this model names layers 1, 3, and SGLang's code .* 1, 3, 5, 7, what"),
    ],
)
def test_a_llama_4_whose_layers_come_in_other_turns_is_refused(text: dict[str, Any], line: str) -> None:
    config = llama(**text)
    with pytest.raises(UnsupportedModelError, match=line):
        refuse_other_positions(config, config)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"load_format": "sharded_state"}, "--load-format sharded_state does not work with a profile of Llama4ForCond"),
        ({"load_format": "presharded"}, "--load-format presharded does not work"),
        ({"load_format": "remote_instance"}, "--load-format remote_instance does not work"),
        ({"weight_cache_mode": "client"}, "--weight-cache-mode client does not work with a profile of Llama4ForCondi"),
    ],
)
def test_weights_of_a_llama_4_that_another_server_had_are_refused(fields: dict[str, str], line: str) -> None:
    name = "Llama4ForConditionalGeneration"
    for served in ({"load_format": "auto"}, {"load_format": "safetensors", "weight_cache_mode": "off"}):
        refuse_ordered_channels(name, SimpleNamespace(**served))
        refuse_ordered_channels("LlamaForCausalLM", SimpleNamespace(**{**served, **fields}))
        with pytest.raises(ServingError, match=line):
            refuse_ordered_channels(name, SimpleNamespace(**{**served, **fields}))
