"""The cache that a configuration tells, and models refused by the name of what a profile cannot describe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny.layered_models import LAYERED, MULTIMODAL
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    DynamicCache,
    FalconH1Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
    T5Config,
)

from kvtuner.errors import UnsupportedModelError
from kvtuner.supported_models import read_cache_geometry, read_served_geometry, refuse_other_caches

if TYPE_CHECKING:
    from collections.abc import Callable


def remote_config(*, is_encoder_decoder: bool = False, **fields: Any) -> Any:
    """What custom code on the hub may bring: a language model inside, with only the fields it likes."""
    text = SimpleNamespace(**fields)
    return SimpleNamespace(get_text_config=lambda decoder: text, is_encoder_decoder=is_encoder_decoder)


CHUNKS = remote_config(
    layer_types=["chunked_attention", "full_attention"], attention_chunk_size=64, max_position_embeddings=128,
    num_hidden_layers=2, hidden_size=32, num_attention_heads=2,
)  # fmt: skip
"""A model with chunks of which no server knows."""


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (DeepseekV3Config(), r"'deepseek_v3' has multi-head latent attention \(MLA\)"),
        (T5Config(), "'t5' has an encoder"),
        (Gemma3TextConfig(), "'gemma3_text' has sliding_attention in layer 0"),
        (GptOssConfig(), "'gpt_oss' has attention sinks"),
        (Qwen3NextConfig(), "'qwen3_next' has linear_attention in layer 0"),
        (Llama4TextConfig(), "'llama4_text' has chunked_attention in layer 0"),
        (MistralConfig(sliding_window=4096, max_position_embeddings=8192), "'mistral' has sliding_attention"),
        (LlavaConfig(text_config=MistralConfig(sliding_window=4096)), "'mistral' has sliding_attention"),
        (remote_config(sliding_window=64, max_position_embeddings=65), "sliding_attention in layer 0"),
        (remote_config(attention_chunk_size=64), "chunked_attention in layer 0"),
        (remote_config(layer_types=["full_attention", "conv"]), "conv in layer 1"),
        (remote_config(model_type="x", num_kv_shared_layers=2), "'x' has layers that read another layer's keys"),
        (remote_config(model_type="y", is_encoder_decoder=True), "'y' has an encoder"),
        (remote_config(cross_attention_layers=[3]), "has cross-attention layers"),
        (
            Gemma4TextConfig(use_bidirectional_attention="all"),
            "text .* later tokens too, by use_bidirectional_.*='all'",
        ),
        (LlamaConfig(is_causal=False), "'llama' has text that reads later tokens too, by is_causal=False"),
    ],
)
def test_a_model_with_another_cache_is_refused_by_name(config: Any, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        refuse_other_caches(config)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(),
        Qwen2Config(sliding_window=64, use_sliding_window=False),
        MistralConfig(sliding_window=None),
        MistralConfig(sliding_window=8192, max_position_embeddings=8192),
        Phi3Config(sliding_window=262144, max_position_embeddings=131072),
        LlavaConfig(text_config=LlamaConfig()),
        remote_config(),
        remote_config(layer_types=["sliding_attention"], sliding_window=9, max_position_embeddings=9),
    ],
)
def test_a_model_whose_layers_read_every_token_is_taken(config: PreTrainedConfig) -> None:
    refuse_other_caches(config)
    config.get_text_config(decoder=True).kv_lora_rank = 8
    with pytest.raises(UnsupportedModelError, match="MLA"):
        refuse_other_caches(config)


TINY: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "field", "value", "causal"),
    [
        (Gemma4TextConfig, "use_bidirectional_attention", "all", "vision"),
        (Gemma3TextConfig, "use_bidirectional_attention", True, False),
        (LlamaConfig, "is_causal", False, True),
    ],
)
@torch.no_grad()
def test_text_that_reads_later_tokens_is_refused_by_the_field_that_says_so(
    kind: Any, field: str, value: str | bool, causal: str | bool
) -> None:
    more = {"vocab_size_per_layer_input": 40, "global_head_dim": 16} if kind is Gemma4TextConfig else {}
    tokens = torch.arange(12).view(2, 6)
    tokens[1, :5] = tokens[0, :5]
    for setting in (value, causal):
        torch.manual_seed(0)
        config = kind(**{**TINY, **more, field: setting})
        first = AutoModelForCausalLM.from_config(config)(tokens).logits[:, :5]
        assert torch.equal(*first) == (setting == causal), "transformers' own forward"
    for read in (read_cache_geometry, read_served_geometry, refuse_other_caches):
        with pytest.raises(UnsupportedModelError, match=rf"' has text that .* later tokens too, by {field}={value!r};"):
            read(kind(**{**TINY, **more, field: value}))
    assert read_served_geometry(kind(**{**TINY, **more, field: causal})).tuned().num_layers in (1, 6)


def test_a_server_takes_layers_that_read_all_tokens_or_a_window_beside_those_without_keys() -> None:
    kinds = [layer.kind.name for layer in read_served_geometry(Gemma3TextConfig(num_hidden_layers=6)).layers]
    assert kinds == ["window"] * 5 + ["full"]
    assert read_served_geometry(LlamaConfig()).tuned().layer_ids is None
    assert read_served_geometry(GptOssConfig()).tuned().num_layers == 18
    assert read_served_geometry(Qwen3NextConfig()).tuned().ids == tuple(range(3, 48, 4))
    assert read_served_geometry(FalconH1Config()).tuned().layer_ids is None
    assert read_served_geometry(DeepseekV3Config()).tuned().is_latent
    assert read_served_geometry(DeepseekV32Config()).layers[1].index_dim == 128
    assert read_served_geometry(Llama4TextConfig()).tuned().ids == tuple(range(3, 48, 4))
    assert read_served_geometry(Gemma3nTextConfig()).num_readers() == {18: 12, 19: 3}
    assert read_served_geometry(Gemma4TextConfig(num_kv_shared_layers=18)).num_readers() == {10: 15, 11: 3}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (CHUNKS, "chunked_attention in layer 0, which reads its chunk alone"),
        (MistralConfig(sliding_window=64), "sliding_attention in all layers that have keys: a window of 64 tokens"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_server_refuses_layers_with_other_caches(config: PreTrainedConfig, what: str) -> None:
    with pytest.raises(UnsupportedModelError, match=what):
        read_served_geometry(config)


@pytest.mark.parametrize("name", [name for name in (*LAYERED, *MULTIMODAL) if name not in ("zamba2", "minimax")])
def test_heads_and_channels_are_those_that_transformers_caches(name: str, make_model: Callable[..., Any]) -> None:
    model = make_model(name)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(2, 42).unsqueeze(0), past_key_values=cache)
    for layer, own in zip(read_cache_geometry(model.config).layers, cache.layers, strict=False):
        if layer.kind.owns_cache:
            found = own.keys.shape[1], own.keys.shape[3], own.values.shape[3]
            assert found == (layer.num_kv_heads, layer.head_dim, layer.v_head_dim)
