"""The estimate counts the tokens of a dry run, and the parameters that a token meets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from transformers import AutoModelForCausalLM

from kvtuner.calibration.model_loading import ModelSource, read_shape
from kvtuner.pipeline.dry_run import dry_run_facts
from kvtuner.pipeline.planning.capacity_plan import make_plan
from kvtuner.pipeline.planning.plan_options import PlanOptions
from kvtuner.pipeline.planning.search_cost import parameters_per_token

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
