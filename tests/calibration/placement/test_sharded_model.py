"""Models in parts: two ranks of torchrun compute what transformers does whole, each with half of the weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from tiny.latent_models import LATENT
from tiny.layered_models import LAYERED

from kvtuner.calibration.placement.sharded_model import ShardingPlan, refuse_sharding
from kvtuner.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import ModelFolder

PROGRAM = Path(__file__).parent / "sharded_program.py"
ROUNDING = 2e-5
"""Sums over a split dimension are added in another order: some 1e-6 of the largest value in float32."""
HALVED = 0.51
MOSTLY_HALVED = 0.62
"""The share of tiny models whose embeddings or projections to latents every rank has whole."""
COMPARED: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("llama-gqa", {}, HALVED),
    ("qwen2-bias", {"tie_word_embeddings": True}, HALVED),
    ("qwen3-qk-norm", {}, HALVED),
    ("qwen3-moe", {}, HALVED),
    ("phi3", {}, HALVED),
    ("gemma3", {"tie_word_embeddings": True}, MOSTLY_HALVED),
    ("deepseek-v2", {}, MOSTLY_HALVED),
    ("qwen3-next", {}, HALVED),
)


def run_on_two_ranks(*folders: Path) -> list[dict[str, Any]]:
    """What each rank of the program found, by folder."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, str(PROGRAM), *map(str, folders)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_two_ranks_measure_what_one_does_with_half_of_the_weights_each(model_folder: ModelFolder) -> None:
    folders = [model_folder(family, **changes) for family, changes, _ in COMPARED]
    both = run_on_two_ranks(*folders)
    assert both[0] == both[1]  # to the last bit: whatever ranks decide, they decide alike
    for folder, (family, _, most) in zip(folders, COMPARED, strict=True):
        found = both[0][str(folder)]
        assert set(found["differences"]) >= {"final", "logits", "keys", "some logits", "gradient"}, family
        assert max(found["differences"].values()) < ROUNDING, (family, found)
        assert found["share"] < most, family
        assert found["is_same_hash"], family


@pytest.mark.full
def test_every_family_is_measured_as_a_whole_model_or_refused(
    model_folder: ModelFolder, families: tuple[str, ...]
) -> None:
    names = {name: model_folder(name) for name in (*families, *LATENT, *LAYERED)}
    both = run_on_two_ranks(*names.values())
    assert both[0] == both[1]
    for name, folder in names.items():
        found = both[0][str(folder)]
        if "refused" in found:
            assert "--stream" in found["refused"], name
        else:
            # Attention of seven layers whose scores are not scaled down: 6e-5 of the gradient, half without readers.
            most = 5 * ROUNDING if name == "gemma4-readers" else ROUNDING
            assert max(found["differences"].values()) < most, (name, found)
            assert found["is_same_hash"], name


def skeleton_of(make_model: Callable[..., Any], name: str, **changes: Any) -> tuple[Any, int]:
    """A model of no weights, and its number of layers."""
    config = make_model(name, **changes).config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model, config.num_hidden_layers


def test_projections_around_attention_give_all_heads_and_the_rest_keeps_its_plan(
    make_model: Callable[..., Any],
) -> None:
    plan = ShardingPlan.of(*skeleton_of(make_model, "qwen3-qk-norm"), "model")
    attention = "model.layers.*.self_attn"
    assert {f"{attention}.{name}": plan.changes[f"{attention}.{name}"] for name in ("q_proj", "k_proj", "v_proj")} == {
        f"{attention}.{name}": "colwise_gather_output" for name in ("q_proj", "k_proj", "v_proj")
    }
    assert plan.changes[f"{attention}.o_proj"] == "rowwise_split_input"
    assert not any(".mlp." in key for key in plan.changes)
    assert plan.given["model.layers.*.mlp.down_proj"] == "rowwise"


@pytest.mark.parametrize(
    ("name", "changes", "ranks", "reason"),
    [
        ("llama-gqa", {"intermediate_size": 90}, 4, r"--tp 4 must divide .*mlp\.gate_proj.* splits the 90"),
        ("llama-gqa", {"vocab_size": 321}, 2, r"--tp 2 must divide .* splits the 321"),
        ("qwen3-moe", {"moe_intermediate_size": 46}, 4, r"--tp 4 must divide .*gate_up_proj.* splits the 92"),
        ("gpt-oss", {}, 2, r"splits \d+% of the weights"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_with_the_way_out(
    make_model: Callable[..., Any], name: str, changes: dict[str, Any], ranks: int, reason: str
) -> None:
    skeleton, layers = skeleton_of(make_model, name, **changes)
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*--stream") as error:
        ShardingPlan.of(skeleton, layers, "some/model").refuse_ranks(skeleton, ranks, "some/model")
    assert "some/model" in str(error.value)


def test_a_model_without_a_plan_is_refused_with_the_way_out(make_model: Callable[..., Any]) -> None:
    skeleton, layers = skeleton_of(make_model, "llama-gqa")
    skeleton.tp_plan = None
    with pytest.raises(UnsupportedModelError, match=r"model has no plan of tensor parallelism.*--stream"):
        ShardingPlan.of(skeleton, layers, "model")


def test_a_style_of_attention_that_is_not_known_is_refused_by_name(make_model: Callable[..., Any]) -> None:
    skeleton, layers = skeleton_of(make_model, "llama-gqa")
    skeleton.tp_plan = {**skeleton.tp_plan, "model.layers.*.self_attn.q_proj": "packed_colwise"}
    with pytest.raises(UnsupportedModelError, match=r"self_attn\.q_proj as 'packed_colwise'"):
        ShardingPlan.of(skeleton, layers, "model")


def test_quantized_weights_are_refused(make_model: Callable[..., Any]) -> None:
    config = make_model("llama-gqa").config
    refuse_sharding(config, "model")
    config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(UnsupportedModelError, match=r"quantized.*--stream"):
        refuse_sharding(config, "model")
