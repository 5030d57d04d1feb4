"""Models with layers that have a window: full layers are served packed, the others by SGLang's own kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow

if TYPE_CHECKING:
    from fixture_types import Compare, MixedLayers, ModelFolder, ProfileOf, Prompts, Refused, SaveProfile, Serve

LENGTHS = (5, 33, 1, 60, 17, 48)
W, F = "sliding_attention", "full_attention"
LAYERS: dict[str, Any] = {"layer_types": [W, F, W, F, W, F], "num_hidden_layers": 6}
"""Full layers of all widths, and one of 16 bits; windows are of 24 tokens."""
TIED = {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {**TIED, "final_logit_softcapping": None},
    "gemma3": TIED,
}
FLAGS = ("--attention-backend", "triton", "--triton-attention-num-kv-splits", "1")
"""SGLang asks for this backend by name before it knows of a profile; its kernels are interpreted, split by split."""
WINDOWS = {"gemma3": ExactWindow(8, 2)}
"""The exact windows of the profiles of some of them."""


@pytest.mark.parametrize("name", FAMILIES)
def test_full_layers_are_packed_and_windows_are_read_by_sglangs_own_kernels(
    name: str,
    serve: Serve,
    compare: Compare,
    prompts: Prompts,
    model_folder: ModelFolder,
    profile_of: ProfileOf,
    save_profile: SaveProfile,
    mixed_layers: MixedLayers,
) -> None:
    folder = model_folder(name, **LAYERS, **FAMILIES[name])
    config = AutoConfig.from_pretrained(folder)
    profile = profile_of(config, mixed_layers(config), by_kinds=True, window=WINDOWS.get(name))
    with serve(folder, "--kvtuner-profile", str(save_profile(profile)), *FLAGS) as server:
        agreement = compare(server, folder, profile, prompts(*LENGTHS), 40)
        log = server.log
    assert agreement.own > 1e-5
    assert agreement.positions == 240
    assert agreement.divergence <= 0.02 * agreement.own + 1e-6, agreement
    assert agreement.same_argmax >= 0.995, agreement
    # SGLang keeps all tokens of these models' windows, in float32 here.
    assert "\n  0:K16V16,1:K4V4,2:K16V16,3:K8V3,4-5:K16V16\n" in log
    heads, channels = config.num_key_value_heads, profile.tuned_geometry().head_dim
    native, shape = 2 * 4 * heads * channels, profile.row_shape(1)
    packed = sum(shape.pair_bytes(pair) for pair in profile.tuned_pairs[:2])
    assert f"\n  {packed + 4 * native:,} bytes per token, {6 * native // 2:,} in bf16" in log


def test_16_bits_are_plain_transformers_with_windows(
    serve: Serve,
    compare: Compare,
    prompts: Prompts,
    model_folder: ModelFolder,
    profile_of: ProfileOf,
    save_profile: SaveProfile,
) -> None:
    folder = model_folder("gemma2", **LAYERS, **FAMILIES["gemma2"])
    native = profile_of(AutoConfig.from_pretrained(folder), [LayerQuantization(16, 16)] * 3, by_kinds=True)
    with serve(folder, "--kvtuner-profile", str(save_profile(native)), *FLAGS) as server:
        agreement = compare(server, folder, native, prompts(*LENGTHS), 40)
    assert agreement.own < 1e-12
    assert agreement.divergence < 1e-6
    assert agreement.same_argmax == 1


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--enable-hierarchical-cache",), "--enable-hierarchical-cache does not work with a packed KV pool beside"),
        (("--pp-size", "2"), "--pp-size 2 does not work with a packed KV pool beside layers with a window: stages of"),
        (("--speculative-algorithm", "NGRAM"), "--speculative-algorithm NGRAM does not work with a packed KV pool"),
    ],
)
def test_what_does_not_go_with_windows_is_refused(
    flags: tuple[str, ...], line: str, refused: Refused, model_folder: ModelFolder
) -> None:
    folder = model_folder("gemma2", **LAYERS, **FAMILIES["gemma2"])
    of_heads = ("--enable-kvtuner-quant", "--kvtuner-q-group-size", "16")
    assert refused(folder, *of_heads, *flags).startswith(line)


def test_a_model_whose_windows_sglang_does_not_know_is_refused(refused: Refused, model_folder: ModelFolder) -> None:
    line = refused(model_folder("cohere2"), "--enable-kvtuner-quant", "--kvtuner-q-group-size", "16")
    assert line.startswith("SGLang's code for Cohere2ForCausalLM tells its Triton attention of no window, though")
