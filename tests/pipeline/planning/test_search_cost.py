"""The estimate counts the tokens of a dry run, and the parameters that a token meets."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, DeepseekV32Config, LlamaConfig
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from kvtuner.calibration.model_loading import ModelSource, read_shape
from kvtuner.pipeline.dry_run import dry_run_facts
from kvtuner.pipeline.planning.capacity_plan import make_plan
from kvtuner.pipeline.planning.plan_options import PlanOptions
from kvtuner.pipeline.planning.plan_text import search_sentences
from kvtuner.pipeline.planning.search_cost import index_score_bytes, parameters_per_token

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-bias", "qwen3-moe"])
def test_parameters_are_those_of_the_model_without_the_experts_that_a_token_does_not_go_to(
    model_folder: Callable[..., Path], name: str
) -> None:
    folder = str(model_folder(name))
    source = ModelSource(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
    experts = sum(size for parameter, size in sizes.items() if "experts" in parameter)
    assert bool(experts) == (name == "qwen3-moe")
    assert parameters_per_token(source, read_shape(source)) == sum(sizes.values()) - experts // 2  # 2 of 4 experts


def test_the_published_sizes_come_out(hub_model: Callable[..., Path]) -> None:
    for name, parameters in (("llama", 8_030_261_248), ("qwen", 7_615_616_512)):
        source = ModelSource(str(hub_model(name)))
        assert parameters_per_token(source, read_shape(source)) == parameters


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize(("heads", "channels"), [(16, 16), (4, 24)])
def test_scores_of_an_index_are_those_that_transformers_computes(heads: int, channels: int, batch_size: int) -> None:
    sizes = {"index_n_heads": heads, "index_head_dim": channels, "qk_rope_head_dim": 8, "index_topk": 4}
    config = DeepseekV32Config(hidden_size=16, q_lora_rank=8, **sizes)
    index, length = DeepseekV32Indexer(config, 0), 600
    states, residual, turns = (torch.randn(batch_size, length, size) for size in (16, 8, 8))
    mask = torch.zeros(batch_size, 1, length)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        index(states, residual, (turns, turns), mask, torch.arange(length))
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    most = max(itertools.accumulate(event.nbytes() for event in events))
    # Beside them are queries and a sum of all heads: activations, a few numbers for each query and head.
    assert 1 <= most / index_score_bytes(config, batch_size, length) < 1.3
    assert index_score_bytes(LlamaConfig(), batch_size, length) == 0


def test_the_memory_of_a_search_holds_the_scores_of_an_index(hub_model: Callable[..., Path]) -> None:
    options = PlanOptions(
        model=str(hub_model("deepseek-v32")), gpu="H200", tp_size=8, context_length=32_768, concurrency=40
    )
    plan = make_plan(options)
    assert plan.search is not None
    assert plan.search.working_bytes == 2 * 2**30 + 2048 * 129_280 * 4 + 2 * 64 * 2048**2 * 4
    assert "shared first layers and logits, and scores of an index, besides activations" in " ".join(
        search_sentences(plan)
    )


def test_tokens_are_those_of_the_dry_run_of_the_command_and_time_and_memory_follow(
    hub_model: Callable[..., Path],
) -> None:
    options = PlanOptions(model=str(hub_model("llama")), gpu="H100", tp_size=2, context_length=32_768, concurrency=64)
    plan = make_plan(options)
    cost = plan.search
    assert cost is not None
    work = dry_run_facts(options.search_options(*plan.advice.budgets))
    assert cost.forward_tokens == work["forward_tokens"]["total"]
    assert cost.hours == pytest.approx(2 * 8_030_261_248 * cost.forward_tokens / (0.3 * 989e12) / 3600)
    assert cost.working_bytes == 2 * 2**30 + 2048 * 128_256 * 4
    assert cost.memory_bytes == plan.weights.stored_bytes + cost.working_bytes
    nameless = make_plan(PlanOptions(model=options.model, memory=80 << 30, context_length=32_768, concurrency=70))
    assert nameless.search is not None and nameless.search.hours is None
