"""Adapters (LoRA): a server with a profile answers with one as it does with a checkpoint that it was merged into."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import Json, MixedLayers, ModelFolder, ProfileOf, Prompts, SaveProfile, Serve
    from sglang_server import Server

TOKENS = 12
TIE = 0.01
"""Nats between the two likeliest tokens that a flipped code may turn round."""
SERVERS = (
    (),
    pytest.param(("--lora-backend", "triton", "--tp-size", "2"), marks=pytest.mark.full),
    pytest.param(("--lora-backend", "torch_native", "--pp-size", "2"), marks=pytest.mark.full),
)
"""Flags of servers: each of SGLang's kernels, on one rank, two of a layer, and two of half of the layers."""
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def save_adapter(base: Path, adapter: Path, merged: Path, rank: int = 4) -> None:
    """Save a random adapter of all projections of attention, and the model with it in its weights."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator, weights = torch.Generator().manual_seed(3), {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if not name.endswith(TARGETS):
                continue
            down = 0.1 * torch.randn(rank, module.in_features, generator=generator)
            up = 0.1 * torch.randn(module.out_features, rank, generator=generator)
            module.weight += 2 * up @ down  # lora_alpha / rank
            weights[f"base_model.model.{name}.lora_A.weight"] = down
            weights[f"base_model.model.{name}.lora_B.weight"] = up
    adapter.mkdir()
    save_file(weights, adapter / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0,
        "bias": "none", "target_modules": list(TARGETS), "base_model_name_or_path": str(base),
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    model.save_pretrained(merged)
    AutoTokenizer.from_pretrained(base).save_pretrained(merged)


def ask(server: Server, prompts: list[list[int]], adapters: list[str | None] | None = None) -> list[Json]:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    answers: list[Json] = server.post("/generate", {**body, **({"lora_path": adapters} if adapters else {})})
    return answers


def assert_same(found: list[Json], wanted: list[Json]) -> None:
    """Assert the same tokens, unless the two likeliest were all but equal."""
    for answer, other in zip(found, wanted, strict=True):
        pairs = enumerate(zip(answer["output_ids"], other["output_ids"], strict=True))
        parting = next((position for position, (a, b) in pairs if a != b), None)
        if parting is not None:
            (first, _, _), (second, _, _) = other["meta_info"]["output_top_logprobs"][parting]
            assert first - second < TIE, (parting, first, second)


@pytest.mark.parametrize("ranks", SERVERS, ids=" ".join)
def test_an_adapter_answers_as_the_model_that_it_was_merged_into(
    ranks: tuple[str, ...], model_folder: ModelFolder, profile_of: ProfileOf, mixed_layers: MixedLayers,
    save_profile: SaveProfile, prompts: Prompts, serve: Serve, tmp_path: Path,
) -> None:  # fmt: skip
    base, adapter, merged = model_folder("llama-gqa", num_hidden_layers=4), tmp_path / "adapter", tmp_path / "merged"
    save_adapter(base, adapter, merged)
    config = AutoConfig.from_pretrained(base)
    flags = ("--kvtuner-profile", str(save_profile(profile_of(config, mixed_layers(config)))))
    flags = (*flags, "--kvtuner-attend", "cache")
    asked = prompts(40, 9, 70)
    with serve(merged, *flags) as server:
        wanted = ask(server, asked)
    with serve(base, *flags) as server:
        plain = ask(server, asked)
    assert [answer["output_ids"] for answer in wanted] != [answer["output_ids"] for answer in plain]
    lora = ("--lora-paths", f"one={adapter}", "--max-loras-per-batch", "2")
    with serve(base, *flags, *lora, *ranks) as server:
        # One batch with and without it, twice: prefixes of one are no prefixes of the other.
        for _ in range(2):
            mixed = ask(server, [*asked, *asked], ["one"] * 3 + [None] * 3)
            assert_same(mixed[:3], wanted)
            assert_same(mixed[3:], plain)
        assert mixed[0]["meta_info"]["cached_tokens"] > 30
        assert server.post("/load_lora_adapter", {"lora_name": "two", "lora_path": str(adapter)})["success"]
        for name, answers in (("two", wanted), (None, plain), ("one", wanted)):
            assert_same(ask(server, asked, [name] * 3), answers)
        assert "self-test passed" in server.log
        assert "kvtuner: the profile was measured without adapters (LoRA); merge one into" in server.log
