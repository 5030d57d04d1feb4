"""Models with layers that keep a state of each request: their layers with keys are served packed beside those."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from served_layers.kimi_linear import written_as_the_hub
from served_layers.two_kinds import TEXT_ALONE, number, packed_bytes
from transformers import AutoConfig

from kvtuner.calibration.model_loading import ModelSource, read_shape
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.pipeline.planning.server_memory import ServerMemory
from kvtuner.pipeline.planning.state_cost import state_cost
from kvtuner.precision import GIB, MIB, ExactWindow

if TYPE_CHECKING:
    from fixture_types import (
        Compare,
        CompareServed,
        MixedProfile,
        ModelFolder,
        ProfileOf,
        Prompts,
        Refused,
        RunProgram,
        SaveProfile,
        Serve,
    )

L, F = "linear_attention", "full_attention"
_DELTA: dict[str, Any] = {"layer_types": [L, F, L, F, L, F], "num_hidden_layers": 6, "full_attention_interval": 2}
"""Layers with keys of all widths, and one of 16 bits. SGLang reads the interval, transformers the types."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3-next": _DELTA,
    "qwen3.5": _DELTA,
    "qwen3.5-images": _DELTA,
    "granite4": {"layer_types": [L, F, L, F, L, F], "num_hidden_layers": 6},
    "nemotron-h": {  # SGLang's mixer takes 8 groups, whatever n_groups is
        "layers_block_type": ["mamba", "attention", "mamba", "attention", "mlp", "mamba", "attention"],
        "n_groups": 8,
    },
    "falcon-h1": {"num_hidden_layers": 3},
    "lfm2": {"layer_types": ["conv", F, "conv", F, "conv", F], "num_hidden_layers": 6},
    "kimi-linear": {  # SGLang's experts leave their factor out where they have no kernels
        "layer_types": [L, F, L, F, L, F], "mlp_layer_types": ["dense", *["sparse"] * 5], "num_hidden_layers": 6,
        "routed_scaling_factor": 1.0,
    },
}  # fmt: skip
STATES = 48
"""The states of each layer: a running request takes several, and a prefix that is kept one."""
FLAGS = ("--max-mamba-cache-size", str(STATES), "--skip-server-warmup")
BY_NAME = ("--attention-backend", "triton")
"""SGLang asks for this backend by name before it knows of a profile, and refuses the name for LFM2."""
EXACT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
"""SGLang keeps the inputs of convolutions in bfloat16 by default, whatever the model's dtype."""
LENGTHS = (5, 70, 1, 33)
"""The lengths of prompts, of which one is longer than a chunk of the linear layers."""
STATE_BYTES = {
    **dict.fromkeys(FAMILIES, 3 * 4 * (4 * 16 * 16 + 3 * (2 * 2 * 16 + 4 * 16))),
    **dict.fromkeys(("granite4", "falcon-h1"), 3 * 4 * (8 * 16 * 16 + 3 * (8 * 16 + 2 * 16))),
    "nemotron-h": 3 * 4 * (8 * 16 * 16 + 3 * (8 * 16 + 2 * 8 * 16)),
    "lfm2": 3 * 4 * 2 * 64,
    "kimi-linear": 3 * 4 * (4 * 16 * 16 + 3 * 3 * 4 * 16),
}
"""The bytes of a state in all three layers that have one: of the delta rule or a state space, and of convolutions."""
LAYERS = {
    **dict.fromkeys(FAMILIES, "1:K4V4,3:K8V3,5:K16V16"),
    "nemotron-h": "1:K4V4,3:K8V3,6:K16V16",
    "falcon-h1": "0:K4V4,1:K8V3,2:K16V16",  # a state and keys in each
    "kimi-linear": "1:K4V4,3:K8V8,5:K16V16",
}
"""The pairs of the layers with keys."""
WINDOWS = {"qwen3-next": ExactWindow(8, 2), "kimi-linear": ExactWindow(8, 2)}
"""The exact windows of the profiles of some of them."""
DELTA_RULES: dict[str, dict[str, int]] = {
    "qwen3-next": {},
    "kimi-linear": {"kv_lora_rank": 256, "qk_rope_head_dim": 32},
}
"""Those of the delta rule by heads and by channels, with the least latents that SGLang's own Triton kernels take."""
LIKE_OTHERS = ("qwen3.5", "qwen3.5-images", "falcon-h1")
"""Those whose states are of the kinds of others: for `make test-full`."""


def flags_of(name: str) -> tuple[str, ...]:
    """The flags that a family is served with."""
    return (*FLAGS, *(BY_NAME if name != "lfm2" else ()), *(TEXT_ALONE if "images" in name else ()))


def checkpoint(name: str, model_folder: ModelFolder, tmp_path: Path, **changes: Any) -> Path:
    """The folder of a family's model.

    Those of Nemotron-H and Kimi Linear call kinds of layers as the hub's do, which SGLang reads.
    """
    folder = model_folder(name, **{**FAMILIES[name], **changes})
    if name == "kimi-linear":
        return written_as_the_hub(folder, tmp_path / name)
    if name != "nemotron-h":
        return folder
    copy = Path(shutil.copytree(folder, tmp_path / name))
    written = (copy / "config.json").read_text(encoding="utf-8")
    named = written.replace('"linear_attention"', '"mamba"').replace('"full_attention"', '"attention"')
    (copy / "config.json").write_text(named, encoding="utf-8")
    return copy


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in LIKE_OTHERS)) for name in FAMILIES]
)
def test_layers_with_keys_are_packed_beside_those_that_keep_states(
    name: str, compare_served: CompareServed, model_folder: ModelFolder, mixed_profile: MixedProfile, tmp_path: Path
) -> None:
    folder = checkpoint(name, model_folder, tmp_path)
    profile = mixed_profile(folder, by_kinds=True, window=WINDOWS.get(name))
    served = compare_served(folder, profile, *flags_of(name), lengths=LENGTHS, num_tokens=24, **EXACT)
    assert served.agreement.own > 1e-5
    assert served.agreement.is_near, served.agreement
    assert f"\n  {LAYERS[name]}\n" in served.log
    geometry = profile.tuned_geometry()
    in_bf16 = 3 * 2 * (geometry.head_dim + geometry.rope_dim if geometry.is_latent else 2 * 2 * geometry.head_dim)
    assert f"\n  {packed_bytes(profile):,} bytes per token, {in_bf16:,} in bf16" in served.log
    taken = (STATES + 1) * STATE_BYTES[name]  # one pads batches
    assert f"layers without keys have {STATES} states each, {taken:,} bytes in all\n" in served.log


@pytest.mark.parametrize(("name", "sizes"), DELTA_RULES.items())
def test_16_bits_and_a_server_without_a_profile_are_plain_transformers(
    name: str, sizes: dict[str, int], serve: Serve, compare: Compare, model_folder: ModelFolder, profile_of: ProfileOf,
    save_profile: SaveProfile, prompts: Prompts, tmp_path: Path,
) -> None:  # fmt: skip
    folder = checkpoint(name, model_folder, tmp_path, **sizes)
    native = profile_of(AutoConfig.from_pretrained(folder), [LayerQuantization(16, 16)] * 3, by_kinds=True)
    for flags in ((), ("--kvtuner-profile", str(save_profile(native)))):
        with serve(folder, *flags, *flags_of(name), "--triton-attention-num-kv-splits", "1", **EXACT) as server:
            agreement = compare(server, folder, native, prompts(5, 33, 70), 12)
            assert ("by profile" in server.log) == bool(flags)
        assert agreement.own < 1e-12
        assert agreement.divergence < 1e-6
        assert agreement.same_argmax == 1


@pytest.mark.full
@pytest.mark.parametrize("name", DELTA_RULES)
def test_ranks_share_the_heads_of_keys_and_of_states(
    name: str, compare_served: CompareServed, model_folder: ModelFolder, mixed_profile: MixedProfile, tmp_path: Path
) -> None:
    folder = checkpoint(name, model_folder, tmp_path)
    profile, flags = mixed_profile(folder, by_kinds=True), (*flags_of(name), "--tp-size", "2")
    served = compare_served(folder, profile, *flags, lengths=LENGTHS, num_tokens=24, **EXACT)
    assert served.agreement.own > 1e-5
    assert served.agreement.is_near, served.agreement
    taken = (STATES + 1) * STATE_BYTES[name] // 2
    assert served.log.count(f"layers without keys have {STATES} states each, {taken:,} bytes in all") == 2


@pytest.mark.parametrize(
    ("name", "window"),
    [("qwen3-next", ExactWindow()), ("qwen3-next", ExactWindow(8, 2)), ("kimi-linear", ExactWindow(8, 2))],
    ids=str,
)
def test_both_pools_take_the_available_bytes(
    name: str, window: ExactWindow, serve: Serve, model_folder: ModelFolder, mixed_profile: MixedProfile,
    save_profile: SaveProfile, tmp_path: Path,
) -> None:  # fmt: skip
    """SGLang takes states from its memory first, by a ratio of the whole; packed rows get the rest to the byte."""
    folder = checkpoint(name, model_folder, tmp_path)
    profile = mixed_profile(folder, by_kinds=True, window=window)
    all_memory = ("--max-total-tokens", "100000000", "--mem-fraction-static", "0.1", "--skip-server-warmup")
    flags = (*BY_NAME, "--mamba-full-memory-ratio", "0.5", "--page-size", "16", *all_memory)
    with serve(folder, "--kvtuner-profile", str(save_profile(profile)), *flags, **EXACT) as server:
        log = server.log
    rows = number(r"([\d,]+) bytes are available for the KV cache", log)
    copies = number(r"beside ([\d,]+) bytes for the exact copies", log) if window.num_tokens else 0
    of_states = number(r"layers without keys have [\d,]+ states each, ([\d,]+) bytes", log)
    tokens = number(r"\n  ([\d,]+) tokens, in bytes that hold", log)
    assert tokens > 100_000
    assert tokens == number(r"available for the KV cache: ([\d,]+) tokens", log)
    assert rows - 16 * packed_bytes(profile) < tokens * packed_bytes(profile) <= rows
    # SGLang's own sizes are in binary gigabytes, as floats.
    whole = rows + copies + of_states
    assert of_states == pytest.approx(whole / 3, abs=2 * STATE_BYTES[name] + 16 * packed_bytes(profile))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_profile_is_of_the_model_that_sglang_reads_by_a_class_of_its_own(
    name: str, model_folder: ModelFolder, run_program: RunProgram, tmp_path: Path
) -> None:
    folder = checkpoint(name, model_folder, tmp_path)
    program = Path(__file__).parents[1] / "programs/identity_program.py"
    done = run_program(str(program), str(folder), *TEXT_ALONE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"differs": [], "changed": ["configuration"]}


@pytest.mark.parametrize(
    ("name", "changes", "flags", "line"),
    [
        ("qwen3-next", {}, ("--enable-hierarchical-cache",), "--enable-hierarchical-cache does not work with a packed"),
        ("qwen3-next", {}, ("--pp-size", "2"), "--pp-size 2 does not work with a packed KV pool beside layers that"),
        ("qwen3-next", {"full_attention_interval": 3}, (), "SGLang gives keys to other layers of Qwen3NextForCausalLM"),
        ("qwen3-next", {"full_attention_interval": None}, (), "Qwen3NextForCausalLM is configured without full_att"),
        ("kimi-linear", {"linear_attn_config": None}, (), "KimiLinearForCausalLM is configured without linear_attn_c"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_states_is_refused(
    name: str, changes: dict[str, Any], flags: tuple[str, ...], line: str, refused: Refused, model_folder: ModelFolder
) -> None:
    given = {field: value for field, value in {**FAMILIES[name], **changes}.items() if value is not None}
    folder = model_folder(name, **given)
    of_heads = ("--enable-kvtuner-quant", "--kvtuner-q-group-size", "32")
    assert refused(folder, *of_heads, *BY_NAME, *flags).startswith(line)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_counts_the_states_that_sglang_keeps(
    name: str, model_folder: ModelFolder, run_program: RunProgram, tmp_path: Path
) -> None:
    folder = checkpoint(name, model_folder, tmp_path)
    ranks, available = (1, 2, 4), (MIB, 3 * MIB + 1, 5 * GIB, 61 * GIB + 12_345)
    program = Path(__file__).parents[1] / "programs/state_program.py"
    done = run_program(str(program), str(folder), *TEXT_ALONE, json.dumps([ranks, available]))
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    shape = read_shape(ModelSource(str(folder)))
    costs = [state_cost(shape, tp_size=tp_size) for tp_size in ranks]
    assert [6 * cost.num_bytes for cost in costs] == answers["bytes"]  # five states, and one that pads batches
    assert {cost.per_request for cost in costs} == {answers["per_request"]}
    empty = ServerMemory(81_559, 0, 512, states=costs[0])
    servers = [replace(empty, weights_bytes=empty.pool_bytes - num_bytes) for num_bytes in available]
    assert [server.num_states for server in servers] == [states for states, _ in answers["pools"]]
    for server, (_, rest) in zip(servers, answers["pools"], strict=True):
        assert server.pool_bytes - server.states_bytes == pytest.approx(rest, abs=1)  # SGLang's are in GiB, as floats
