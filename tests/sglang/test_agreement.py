"""A served profile gives what the transformers host gives, as the design defines agreement."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sglang_server import LENGTHS
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow
from kvtuner.runtime_loader.attention_backends import backend_for

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import Compare, CompareServed, MixedProfile, ModelFolder, ProfileOf, Prompts, Serve

    from kvtuner.precision import Fit, WordBits

FAMILIES = ("llama-gqa", "qwen2-bias", "qwen3-qk-norm", "qwen3-moe")
LAYERS = 9
"""A layer for every kind of key transform, and one of 16 bits."""


WIDE: tuple[WordBits, WordBits] = (32, 32)
SHORT: tuple[WordBits, WordBits] = (16, 16)
GRIDS: list[tuple[str, bool, Fit, tuple[WordBits, WordBits]]] = [
    (FAMILIES[0], True, "minmax", WIDE),
    (FAMILIES[1], False, "minmax", SHORT),
    (FAMILIES[2], False, "least_squares", (16, 32)),
    (FAMILIES[3], False, "minmax", WIDE),
]
OTHER_GRIDS = [
    pytest.param(name, not symmetric, "least_squares", SHORT, marks=pytest.mark.full) for name, symmetric, _, _ in GRIDS
]


@pytest.mark.parametrize(("name", "symmetric", "fit", "words"), [*GRIDS, *OTHER_GRIDS])
def test_a_mixed_profile_agrees_with_the_transformers_host(
    name: str,
    symmetric: bool,
    fit: Fit,
    words: tuple[WordBits, WordBits],
    compare_served: CompareServed,
    model_folder: ModelFolder,
    mixed_profile: MixedProfile,
) -> None:
    if name == "qwen3-moe" and version("sglang").startswith("0.5.22"):
        pytest.skip("SGLang 0.5.22 itself predicts NaN for this model on a processor, without a profile too")
    folder = model_folder(name, num_hidden_layers=LAYERS)
    config = AutoConfig.from_pretrained(folder)
    # Short words on both sides in groups of half a head, as a search takes them.
    grids: dict[str, Any] = {"symmetric": symmetric, "fit": fit, "words": words, "half_groups": words == SHORT}
    profile = mixed_profile(folder, **grids)
    served = compare_served(folder, profile, "--enable-metrics")
    assert served.agreement.own > 1e-4
    assert served.agreement.is_near, served.agreement
    metrics = served.metrics
    rank = f'digest="{profile.digest}",pp_rank="0",tp_rank="0"'
    attention = backend_for(torch.device("cpu")).name
    how = f'attend="fresh",attention="{attention}",digest="{profile.digest}",model="tiny",pp_rank="0",tp_rank="0"'
    shape, channels = profile.row_shape(1), config.num_key_value_heads * profile.geometry.head_dim
    sides = [(shape.k_bytes, pair.k_bits) for pair in profile.pairs] + [
        (shape.v_bytes, pair.v_bits) for pair in profile.pairs
    ]
    stored = sum(4 * channels if bits == 16 else packed(bits) for packed, bits in sides)  # native rows are float32
    bf16 = 2 * channels * len(sides)
    assert f"kvtuner_kv_capacity_tokens{{{rank}}} 2048.0" in metrics
    assert f"kvtuner_kv_bytes_per_token_bf16{{{rank}}} {bf16:.1f}" in metrics
    assert f"kvtuner_kv_capacity_tokens_bf16{{{rank}}} {2048 * stored // bf16:.1f}" in metrics
    assert f"kvtuner_info{{{how}}} 1.0" in metrics
    for layer_id, pair in enumerate(profile.pairs):
        for side, bits in (("k", pair.k_bits), ("v", pair.v_bits)):
            labels = f'digest="{profile.digest}",layer="{layer_id}",pp_rank="0",side="{side}",tp_rank="0"'
            assert f"kvtuner_kv_bits{{{labels}}} {bits:.1f}" in metrics


def test_windows_that_cover_the_context_are_none_and_a_logit_cap_is_kept(
    compare_served: CompareServed, model_folder: ModelFolder, mixed_profile: MixedProfile, capped: dict[str, Any]
) -> None:
    folder = model_folder("Gemma2", num_hidden_layers=LAYERS, **capped)
    agreement = compare_served(folder, mixed_profile(folder)).agreement
    assert agreement.own > 1e-4
    assert agreement.is_near, agreement


def test_16_bits_everywhere_is_plain_transformers(
    compare_served: CompareServed, model_folder: ModelFolder, profile_of: ProfileOf
) -> None:
    folder = model_folder("llama-gqa", num_hidden_layers=LAYERS)
    config = AutoConfig.from_pretrained(folder)
    profile = profile_of(config, [LayerQuantization(16, 16)] * LAYERS)
    agreement = compare_served(folder, profile).agreement
    assert agreement.own < 1e-12
    assert agreement.divergence < 1e-6
    assert agreement.same_argmax == 1


def test_without_a_profile_a_server_is_sglangs_own(
    serve: Serve, compare: Compare, prompts: Prompts, model_folder: ModelFolder, profile_of: ProfileOf
) -> None:
    folder = model_folder("llama-gqa")
    config = AutoConfig.from_pretrained(folder)
    plain = profile_of(config, [LayerQuantization(16, 16)] * config.num_hidden_layers)
    with serve(folder) as server:
        agreement = compare(server, folder, plain, prompts(*LENGTHS), 40)
        log = server.log
    assert agreement.divergence < 1e-6
    assert "KV cache of rank" not in log
    assert "max_total_num_tokens=2048" in log


@pytest.mark.full
@pytest.mark.parametrize(("bits", "symmetric"), [(16, False), (8, False), (8, True), (4, False), (4, True), (3, False)])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_agrees_at_every_uniform_width(
    name: str,
    bits: int,
    symmetric: bool,
    compare_served: CompareServed,
    model_folder: ModelFolder,
    profile_of: ProfileOf,
) -> None:
    folder = model_folder(name, num_hidden_layers=LAYERS)
    config = AutoConfig.from_pretrained(folder)
    profile = profile_of(config, [LayerQuantization(bits, bits)] * LAYERS, symmetric=symmetric)
    agreement = compare_served(folder, profile).agreement
    assert agreement.is_near, agreement


@pytest.mark.parametrize(
    ("bits", "asym", "residual_length"),
    [(4, "false", 32), *(pytest.param(*flags, 0, marks=pytest.mark.full) for flags in ((8, "true"), (3, "true")))],
)
def test_uniform_flags_serve_a_profile_of_their_own(
    bits: int,
    asym: str,
    residual_length: int,
    serve: Serve,
    compare: Compare,
    prompts: Prompts,
    model_folder: ModelFolder,
    profile_of: ProfileOf,
) -> None:
    folder = model_folder("qwen3-qk-norm", num_hidden_layers=LAYERS)
    config = AutoConfig.from_pretrained(folder)
    window, layers = ExactWindow(residual_length), [LayerQuantization(bits, bits)] * LAYERS
    profile = profile_of(config, layers, symmetric=asym == "false", window=window)
    flags = (
        "--enable-kvtuner-quant", "--kvtuner-nbits-key", str(bits), "--kvtuner-nbits-value", str(bits),
        "--kvtuner-asym", asym, "--kvtuner-q-group-size", "32", "--kvtuner-axis-key", "0", "--kvtuner-axis-value", "0",
        "--kvtuner-residual-length", str(residual_length),
    )  # fmt: skip
    with serve(folder, *flags) as server:
        agreement = compare(server, folder, profile, prompts(*LENGTHS), 40)
        log = server.log
    assert profile.digest in log
    assert f"0-{LAYERS - 1}:K{bits}V{bits}" in log
    assert agreement.is_near, agreement


def test_the_demo_model_answers_from_a_searched_profile(serve: Serve, tmp_path: Path) -> None:
    import random

    from kvtuner.calibration.demo.tasks import recall_problem
    from kvtuner.calibration.model_loading import DEMO_MODEL
    from kvtuner.cli import main

    run = tmp_path / "run"
    little = ["--sequences", "1,1,2", "--sequence-length", "128", "--fisher-draws", "1", "--sampler", "none"]
    command = ["search", "--model", "demo", "--budget", "4bit", *little, "--out", str(run), "--no-report", "--json"]
    assert main(command) == 0
    profile = json.loads((run / "profile.json").read_text())
    problems = [recall_problem(random.Random(seed), 30, 1) for seed in range(5)]
    for dtype in ("float32", "bfloat16"):
        with serve(DEMO_MODEL, "--kvtuner-profile", str(run / "profile.json"), "--dtype", dtype) as server:
            for problem in problems:
                key, value = problem.table[problem.questions[0]]
                body = {"prompt": f"{problem.prompt}{key}:", "max_tokens": 3, "temperature": 0, "model": "demo"}
                assert server.post("/v1/completions", body)["choices"][0]["text"] == value, dtype
            log = server.log
        assert profile["digest"] in log
        # The profile has no 16-bit layers, which would take four bytes in float32.
        assert f"{profile['budget']['bytes_per_token']:,} bytes per token" in log
