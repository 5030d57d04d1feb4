"""What a token reads of a model's weights, how fast that can be, and what a server takes of its machine."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, OPTConfig

from kvtuner.bench import expert_share
from kvtuner.bench.hardware import (
    GPU_BUSY,
    GPU_MEMORY,
    GPU_MEMORY_BUSY,
    MEMORY,
    Observer,
    read_bandwidth_in_subprocess,
    weight_bytes,
)
from kvtuner.calibration.model_loading import DEMO_MODEL

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 100,
}


def parameters(config: Any) -> dict[str, int]:
    return {name: each.numel() for name, each in AutoModelForCausalLM.from_config(config).named_parameters()}


def test_a_tied_embedding_is_read_as_the_output_layer() -> None:
    config = AutoConfig.from_pretrained(DEMO_MODEL)
    assert weight_bytes(config, {"dtype": "bfloat16"}) == 2 * sum(parameters(config).values())
    assert weight_bytes(config, {"dtype": "float32"}) == 4 * sum(parameters(config).values())


def test_an_untied_embedding_is_only_looked_up() -> None:
    config = LlamaConfig(**SMALL, tie_word_embeddings=False)
    read = [size for name, size in parameters(config).items() if "embed_tokens" not in name]
    assert weight_bytes(config, {"dtype": "float16"}) == 2 * sum(read)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("kind", "only_looked_up"), [(GPT2Config, ["wpe"]), (OPTConfig, ["embed_positions"]), (LlamaConfig, [])]
)
def test_tables_of_positions_are_only_looked_up(kind: Any, only_looked_up: list[str], is_tied: bool) -> None:
    config = kind(**{**SMALL, "hidden_size": 48}, word_embed_proj_dim=48, tie_word_embeddings=is_tied)
    found = parameters(config)
    left_out = [*only_looked_up, *([] if is_tied else ["wte", "embed_tokens"])]
    read = sum(size for name, size in found.items() if not any(part in name for part in left_out))
    assert read < sum(found.values()) or not left_out
    assert weight_bytes(config, {"dtype": "float32"}) == 4 * read


def test_of_experts_those_that_a_token_reaches_are_read() -> None:
    config = MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=True)
    found = parameters(config)
    experts = sum(size for name, size in found.items() if ".experts." in name)
    assert experts > 0
    assert weight_bytes(config, {}) == 2 * (sum(found.values()) - experts * 3 // 4)


def test_jetmoes_experts_are_known_by_their_shapes_and_its_routers_are_met_whole() -> None:
    config = AutoConfig.for_model("jetmoe", **SMALL, num_local_experts=8, num_experts_per_tok=2, kv_channels=16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    experts = [shape for shape in shapes.values() if len(shape) == 3]
    assert len(experts) == 4 * SMALL["num_hidden_layers"], "of attention and of the feed-forward part"
    everything = sum(map(math.prod, shapes.values()))
    assert expert_share.reached_elements(config, shapes) == everything - sum(map(math.prod, experts)) * 3 // 4


def test_quantized_weights_are_counted_at_the_least_that_they_can_take() -> None:
    config = LlamaConfig(**SMALL, tie_word_embeddings=True)
    plain = weight_bytes(config, {"dtype": "bfloat16"})
    assert plain is not None
    assert weight_bytes(config, {"dtype": "bfloat16", "quantization": "awq"}) == plain // 4


def test_what_cannot_be_counted_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_share, "EXPERT_COUNTS", (("experts_by_another_name", "of_which"),))
    assert weight_bytes(MixtralConfig(**SMALL, num_local_experts=8), {}) is None
    assert weight_bytes(SimpleNamespace(), {}) is None


@pytest.mark.slow
def test_bandwidth_is_that_of_a_machine() -> None:
    found = read_bandwidth_in_subprocess(8 << 20, "cpu")
    assert found is not None
    assert 1e8 < found < 1e13
    assert read_bandwidth_in_subprocess(8 << 20, "nowhere") is None


def test_memory_is_of_all_processes_that_were_started() -> None:
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(200 << 20); print(len(x), flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert child.stdout is not None
        child.stdout.readline()
        with Observer(os.getpid(), 1).watching() as usage:
            time.sleep(0.1)
        assert usage[MEMORY] > 200 << 20
    finally:
        child.communicate(b"\n")
    with Observer(child.pid, 1).watching() as usage:
        pass
    assert usage[MEMORY] == 0, "a server that is gone takes nothing"


class FakeNvml:
    """The part of NVML that is asked; this machine has no driver."""

    class NVMLError(Exception):
        """NVML's error of the same name."""

    def __init__(self, gpus: list[tuple[int, int, int, list[int]]], *, tells: bool = True) -> None:
        self.gpus, self.tells = gpus, tells

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if not self.tells:
            raise self.NVMLError
        return SimpleNamespace(gpu=self.gpus[handle][1], memory=self.gpus[handle][2])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=self.gpus[handle][0])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        return [SimpleNamespace(pid=pid) for pid in self.gpus[handle][3]]


def seen(nvml: FakeNvml, num_gpus: int) -> dict[str, float]:
    observer = Observer(os.getpid(), num_gpus)
    observer._nvml, observer._gpus = nvml, list(range(len(nvml.gpus)))
    with observer.watching() as usage:
        pass
    return {name: value for name, value in usage.items() if name != MEMORY}


def test_gpus_are_those_that_the_server_computes_on() -> None:
    mine = os.getpid()
    gpus = [(70, 90, 60, [1]), (40, 50, 20, [mine]), (42, 70, 40, [mine, 7])]
    assert seen(FakeNvml(gpus), 2) == {GPU_MEMORY: 82, GPU_BUSY: 0.6, GPU_MEMORY_BUSY: pytest.approx(0.3)}


def test_in_a_container_whose_processes_have_other_numbers_the_fullest_are_taken() -> None:
    gpus = [(10, 10, 10, [1]), (40, 50, 20, [2]), (42, 70, 40, [3])]
    assert seen(FakeNvml(gpus), 1) == {GPU_MEMORY: 42, GPU_BUSY: 0.7, GPU_MEMORY_BUSY: 0.4}


def test_what_a_driver_does_not_tell_is_not_measured() -> None:
    assert seen(FakeNvml([(10, 10, 10, [1])], tells=False), 1) == {}
