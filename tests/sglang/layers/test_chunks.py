"""Models with layers that read chunks (Llama 4): full layers are served packed, the others by SGLang's own kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from served_layers.two_kinds import TRITON, number, packed_bytes
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow

if TYPE_CHECKING:
    from fixture_types import CompareServed, MixedProfile, ModelFolder, ProfileOf, Refused, RunProgram

C, F = "chunked_attention", "full_attention"
LAYERS: dict[str, Any] = {
    "layer_types": [C, C, C, F] * 3, "num_hidden_layers": 12, "no_rope_layers": [1, 1, 1, 0] * 3, "floor_scale": 16,
    "moe_layers": None, "interleave_moe_layer_step": 5, "num_local_experts": 4,
}  # fmt: skip
"""Chunks of 24 tokens, experts in layers 4 and 9, and queries of full layers that grow with their positions."""
ONE_POOL = ("--disable-hybrid-swa-memory",)
ROTATING = """
from types import SimpleNamespace
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.models import llama, llama4
from kvtuner.runtime_loader.sglang.compat.differences import answer_as_transformers

stock = llama.get_rope
assert llama4.get_rope is factory.get_rope is stock
config = SimpleNamespace(architectures=["Llama4ForConditionalGeneration"])
answer_as_transformers(SimpleNamespace(hf_config=config, is_multimodal=True))
assert llama4.get_rope is not stock
assert llama.get_rope is factory.get_rope is stock
"""
"""What a scheduler does before a Llama 4 and its drafts are loaded."""


@pytest.mark.parametrize(
    ("flags", "options", "how"),
    [
        ((), {}, {}),
        # Prompts are cut where no chunk of the model begins.
        (("--chunked-prefill-size", "32", "--page-size", "16"), {"window": ExactWindow(8, 2)}, {"chunk": 32}),
        pytest.param(ONE_POOL, {}, {}, marks=pytest.mark.full),
        pytest.param(("--tp-size", "2"), {}, {}, marks=pytest.mark.full),
    ],
    ids=["", "cut", "one pool", "two ranks"],
)
def test_full_layers_are_packed_and_chunks_are_read_by_sglangs_own_kernels(
    flags: tuple[str, ...], options: dict[str, Any], how: dict[str, Any],
    compare_served: CompareServed, model_folder: ModelFolder, mixed_profile: MixedProfile,
) -> None:  # fmt: skip
    folder = model_folder("llama4-images", **LAYERS)
    profile = mixed_profile(folder, by_kinds=True, **options)
    served = compare_served(folder, profile, *TRITON, *flags, **how)
    assert served.agreement.own > 1e-5
    assert served.agreement.is_near, served.agreement
    of_chunks = 9 * 2 * 4 * 2 * 16
    if flags == ONE_POOL:
        assert f"\n  {packed_bytes(profile) + of_chunks:,} bytes per token" in served.log
    elif not flags:
        assert "\n  3:K4V4,7:K8V3,11:K16V16\n" in served.log
        assert f"\n  {packed_bytes(profile):,} bytes per token, {3 * 2 * 2 * 2 * 16:,} in bf16" in served.log
        tokens = number(r"layers 0-2, 4-6, 8-10 have windows, .*: ([\d,]+) tokens", served.log)
        assert f"{tokens:,} tokens, {(tokens + 1) * of_chunks:,} bytes\n" in served.log  # one pads graphs


def test_16_bits_are_plain_transformers_with_chunks(
    compare_served: CompareServed, model_folder: ModelFolder, profile_of: ProfileOf
) -> None:
    folder = model_folder("llama4-images", **LAYERS)
    native = profile_of(AutoConfig.from_pretrained(folder), [LayerQuantization(16, 16)] * 3, by_kinds=True)
    agreement = compare_served(folder, native, *TRITON, lengths=(24, 47, 48, 49, 1, 97)).agreement
    assert agreement.own < 1e-12
    assert agreement.divergence < 1e-6
    assert agreement.same_argmax == 1


def test_graphs_read_the_slots_of_each_requests_last_chunk(run_program: RunProgram) -> None:
    done = run_program(str(Path(__file__).parents[1] / "programs" / "chunk_program.py"))
    assert done.returncode == 0, done.stderr[-3000:]


def test_drafts_of_other_classes_are_rotated_as_sglang_does(run_program: RunProgram) -> None:
    done = run_program("-c", ROTATING)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.full
def test_layers_of_one_chunk_are_packed_with_their_rotated_keys(
    compare_served: CompareServed, model_folder: ModelFolder, mixed_profile: MixedProfile
) -> None:
    """All layers read all tokens in a context that is no longer than a chunk, and a profile has all of them."""
    folder = model_folder("llama4-images", **{**LAYERS, "attention_chunk_size": 128, "max_position_embeddings": 128})
    served = compare_served(folder, mixed_profile(folder), *TRITON, *ONE_POOL)
    assert served.agreement.own > 1e-5
    assert served.agreement.is_near, served.agreement
    assert "have windows" not in served.log


def test_layers_in_other_turns_than_sglangs_are_refused(refused: Refused, model_folder: ModelFolder) -> None:
    folder = model_folder("llama4-images", **{**LAYERS, "layer_types": [C, F] * 6})
    line = refused(folder, "--enable-kvtuner-quant", "--kvtuner-q-group-size", "16", *ONE_POOL)
    assert line.startswith("layer_types of this model names layers 1, 3, 5, 7, 9, 11, and SGLang's code for Llama4For")
    assert line.endswith(
        "it answers this model otherwise than transformers, without a profile too; run it by KVTunerCache"
    )


def test_weights_as_another_server_had_them_are_refused(refused: Refused, model_folder: ModelFolder) -> None:
    flags = ("--enable-kvtuner-quant", "--kvtuner-q-group-size", "16", "--load-format", "sharded_state")
    line = refused(model_folder("llama4-images", **LAYERS), *flags)
    assert line.startswith("--load-format sharded_state does not work with a profile of Llama4ForConditionalGeneration")
