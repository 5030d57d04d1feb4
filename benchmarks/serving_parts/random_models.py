"""Models of a size with random weights, as folders that every server loads: their speed matters, not their words."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtuner.calibration.model_loading import DEMO_MODEL

if TYPE_CHECKING:
    from pathlib import Path

SHAPES: Final[dict[str, Any]] = {
    "25M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8},
    "100M": {"hidden_size": 896, "intermediate_size": 2432, "num_hidden_layers": 12, "num_attention_heads": 14},
}
"""Qwen2's architecture with 2 KV heads of 64 channels, a vocabulary of the demo's tokenizer, and 8,192 positions."""


def model_folder(name: str, folder: Path) -> tuple[Path, int]:
    """The folder of a model, `demo` or one of `SHAPES`, which is made where it is not there; and its parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    if name == "demo":
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(DEMO_MODEL))
        return DEMO_MODEL, model.num_parameters()
    demo = AutoConfig.from_pretrained(DEMO_MODEL)
    config = Qwen2Config(
        **SHAPES[name],
        num_key_value_heads=2,
        vocab_size=demo.vocab_size,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=demo.bos_token_id,
        eos_token_id=demo.eos_token_id,
        dtype=torch.float32,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    path = folder / name
    if not path.exists():
        model.save_pretrained(path)
        for file in DEMO_MODEL.glob("*token*"):
            shutil.copy(file, path)
    return path, model.num_parameters()
