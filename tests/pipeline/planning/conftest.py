"""Configurations as models of the hub have them, with an index instead of weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from transformers import (
    DeepseekV3Config,
    DeepseekV32Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3NextConfig,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LLAMA_BYTES = 16_060_522_496
QWEN_BYTES = 15_231_233_024
GPT_OSS_BYTES = 13_761_264_768
DEEPSEEK_BYTES = 688_586_727_753


@pytest.fixture(scope="session")
def hub_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`hub_model("llama" or "qwen", **changes)`: a folder like Llama-3.1-8B's or Qwen2.5-7B's, without weights.

    "deepseek-v3" has latents, and "deepseek-v32" indexes beside them. "gpt-oss" and "gemma3" are like gpt-oss-20b's and
    Gemma 3's of 12B, whose layers have windows, of 8 bits a weight. "qwen3-next" has states beside keys, as its default
    configuration says.
    """

    def make(name: str, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("configurations") / name
        if name == "llama":
            settings = {
                "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
            }  # fmt: skip
            config: Any = LlamaConfig(
                **{**settings, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **changes}
            )
            total = LLAMA_BYTES
        elif name in ("gpt-oss", "gemma3"):
            make_config: Any = GptOssConfig if name == "gpt-oss" else Gemma3TextConfig
            own = {"architectures": [f"{'GptOss' if name == 'gpt-oss' else 'Gemma3'}ForCausalLM"], "dtype": "bfloat16"}
            heads = {"num_hidden_layers": 24, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8}
            config, total = make_config(**own, **(heads if name == "gpt-oss" else {}), **changes), GPT_OSS_BYTES
        elif name == "qwen3-next":
            config, total = Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"], dtype="bfloat16", **changes), 0
        elif name in ("deepseek-v3", "deepseek-v32"):
            latent_config: Any = DeepseekV3Config if name == "deepseek-v3" else DeepseekV32Config
            own = {"architectures": [latent_config.__name__.replace("Config", "ForCausalLM")], "dtype": "bfloat16"}
            config = latent_config(**own, max_position_embeddings=163_840, **changes)
            total = DEEPSEEK_BYTES
        else:
            settings = {
                "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
                "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32_768,
            }  # fmt: skip
            config = Qwen2Config(**{**settings, "architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16", **changes})
            total = QWEN_BYTES
        config.save_pretrained(folder)
        index = {"metadata": {"total_size": total}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return make
