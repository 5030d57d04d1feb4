"""Models that cache latents (MLA): their latents are served packed, beside rotary channels in the served dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from served_layers.two_kinds import TEXT_ALONE, TRITON, number, packed_bytes
from tiny.served_images import save_image_model
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow

if TYPE_CHECKING:
    from fixture_types import (
        Compare,
        CompareServed,
        MakeTokenizer,
        MixedProfile,
        ModelFolder,
        ProfileOf,
        Prompts,
        Refused,
        RunProgram,
        SaveProfile,
        Serve,
    )

LAYERS = 5
_EXPERTS: dict[str, Any] = {
    "initializer_range": 0.2, "moe_layer_freq": 1, "scoring_func": "softmax", "num_hidden_layers": LAYERS,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek-v2": _EXPERTS,
    "deepseek-v3": {**_EXPERTS, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4-moe-lite": {**_EXPERTS, "first_k_dense_replace": 1},
    "minicpm3": {"initializer_range": 0.2, "num_hidden_layers": LAYERS},
}
"""Layers of all widths, and the fields beside transformers' that SGLang reads, as the hub's checkpoints have them."""
UNIFORM = ("--enable-kvtuner-quant", "--kvtuner-q-group-size", "32")
WINDOWS = {"deepseek-v3": ExactWindow(8, 2)}
"""The exact windows of the profiles of some of them."""
PLAIN_SIZES = {"kv_lora_rank": 256, "qk_rope_head_dim": 32}
"""The least sizes of latents that SGLang's own Triton kernels take."""


@pytest.mark.parametrize("name", FAMILIES)
def test_latents_are_packed_beside_rotary_channels(
    name: str, compare_served: CompareServed, model_folder: ModelFolder, mixed_profile: MixedProfile
) -> None:
    folder = model_folder(name, **FAMILIES[name])
    profile = mixed_profile(folder, by_kinds=True, window=WINDOWS.get(name))
    served = compare_served(folder, profile, "--enable-metrics", lengths=(5, 33, 1, 48), num_tokens=32)
    assert served.agreement.own > 1e-5
    assert served.agreement.is_near, served.agreement
    assert "\n  0:K4V4,1:K8V8,2:K3V3,3:K4V4,4:K16V16\n" in served.log
    assert "\n  attention torch, attend fresh, self-test passed\n" in served.log
    geometry = profile.tuned_geometry()
    in_bf16 = 2 * LAYERS * (geometry.head_dim + geometry.rope_dim)
    assert f"\n  {packed_bytes(profile):,} bytes per token, {in_bf16:,} in bf16" in served.log
    labels = f'digest="{profile.digest}",layer="2",pp_rank="0",side="k",tp_rank="0"'
    assert f"kvtuner_kv_bits{{{labels}}} 3.0" in served.metrics
    assert 'side="v"' not in served.metrics


@pytest.mark.parametrize("window", [None, pytest.param(ExactWindow(8, 2), marks=pytest.mark.full)], ids=str)
def test_kernels_pack_and_read_latents(
    window: ExactWindow | None, compare_served: CompareServed, model_folder: ModelFolder, mixed_profile: MixedProfile
) -> None:
    folder = model_folder("deepseek-v3", **{**FAMILIES["deepseek-v3"], **PLAIN_SIZES})
    profile = mixed_profile(folder, by_kinds=True, window=window)
    served = compare_served(
        folder, profile, "--chunked-prefill-size", "64", lengths=(5, 130), num_tokens=4, chunk=64,
        KVTUNER_ATTENTION="triton",
    )  # fmt: skip
    assert served.agreement.own > 1e-5
    assert served.agreement.is_near, served.agreement
    assert "\n  attention triton, attend fresh, self-test passed\n" in served.log


def test_every_rank_holds_whole_latents_and_its_share_of_queries(
    compare_served: CompareServed, model_folder: ModelFolder, mixed_profile: MixedProfile
) -> None:
    folder = model_folder("deepseek-v2", **FAMILIES["deepseek-v2"])
    profile = mixed_profile(folder, by_kinds=True)
    flags = ("--tp-size", "2", "--page-size", "16", "--chunked-prefill-size", "32")
    served = compare_served(folder, profile, *flags, lengths=(5, 70, 33), num_tokens=24, chunk=32)
    assert served.agreement.own > 1e-5
    assert served.agreement.is_near, served.agreement
    assert served.log.count(f"\n  {packed_bytes(profile):,} bytes per token") == 2


def test_16_bits_and_a_server_without_a_profile_are_plain_transformers(
    serve: Serve, compare: Compare, model_folder: ModelFolder, profile_of: ProfileOf, save_profile: SaveProfile,
    prompts: Prompts,
) -> None:  # fmt: skip
    folder = model_folder("deepseek-v2", **{**FAMILIES["deepseek-v2"], **PLAIN_SIZES, "num_hidden_layers": 2})
    native = profile_of(AutoConfig.from_pretrained(folder), [LayerQuantization(16, 16)] * 2, by_kinds=True)
    own = TRITON
    for flags in (own, ("--kvtuner-profile", str(save_profile(native)))):
        with serve(folder, *flags, "--skip-server-warmup") as server:
            agreement = compare(server, folder, native, prompts(5, 33), 4)
            assert ("by profile" in server.log) == (flags is not own)
        assert agreement.own < 1e-12
        assert agreement.divergence < 1e-6
        assert agreement.same_argmax == 1


def test_a_model_that_reads_images_has_its_text_served_and_keeps_its_identity(
    make_tokenizer: MakeTokenizer, mixed_profile: MixedProfile, compare_served: CompareServed, run_program: RunProgram,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Kimi K2.5 alone; its images are of tests/sglang/features/test_images.py."""
    save_image_model("Kimi_K25", make_tokenizer(), tmp_path)
    profile = mixed_profile(tmp_path, by_kinds=True)
    served = compare_served(tmp_path, profile, *TEXT_ALONE, lengths=(5, 33, 1, 48), num_tokens=24)
    assert served.agreement.own > 1e-5
    assert served.agreement.is_near, served.agreement
    assert "\n  0:K4V4,1:K8V8,2:K16V16\n" in served.log
    program = Path(__file__).parents[1] / "programs/identity_program.py"
    done = run_program(str(program), str(tmp_path), *TEXT_ALONE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"differs": [], "changed": ["configuration"]}


def test_tokens_take_the_available_bytes(
    serve: Serve, model_folder: ModelFolder, mixed_profile: MixedProfile, save_profile: SaveProfile
) -> None:
    folder = model_folder("deepseek-v2", **FAMILIES["deepseek-v2"])
    profile = mixed_profile(folder, by_kinds=True)
    flags = ("--max-total-tokens", "100000000", "--mem-fraction-static", "0.05", "--skip-server-warmup")
    with serve(folder, "--kvtuner-profile", str(save_profile(profile)), *flags) as server:
        log = server.log
    rows, tokens = number(r"([\d,]+) bytes are available for the KV cache", log), number(r": ([\d,]+) tokens\n", log)
    assert tokens > 100_000
    assert tokens == number(r"\n  ([\d,]+) tokens, in bytes that hold", log)
    assert rows - packed_bytes(profile) < tokens * packed_bytes(profile) <= rows


@pytest.mark.parametrize(
    ("flags", "variables", "line"),
    [
        (("--enable-hierarchical-cache",), {}, "--enable-hierarchical-cache does not work with a packed pool of lat"),
        (("--enable-hierarchical-cache", "--kvtuner-hicache-only"), {}, "latents (MLA) have no quantized host tier"),
        (("--enable-lmcache",), {}, "--enable-lmcache does not work with a packed pool of latents (MLA): it was never"),
        (("--speculative-algorithm", "NGRAM"), {}, "--speculative-algorithm NGRAM does not work with a packed pool of"),
        (("--disaggregation-mode", "prefill"), {}, "--disaggregation-mode prefill does not work with a packed pool of"),
        (("--lora-paths", "one=/adapter"), {}, "--lora-paths ['one=/adapter'] does not work with a packed pool of la"),
        (("--pp-size", "2"), {}, "--pp-size 2 does not work with a packed pool of latents (MLA): stages of such mod"),
        ((*UNIFORM, "--kvtuner-nbits-value", "8"), {}, "a latent is read as keys and as values and has one width, n"),
        ((), {"KVTUNER_ATTENTION": "cpu"}, "KVTUNER_ATTENTION=cpu does not read latents (MLA) on cpu, only torch on"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_latents_is_refused(
    flags: tuple[str, ...], variables: dict[str, str], line: str, refused: Refused, model_folder: ModelFolder,
    mixed_profile: MixedProfile, save_profile: SaveProfile,
) -> None:  # fmt: skip
    folder = model_folder("deepseek-v2", **FAMILIES["deepseek-v2"])
    profile = ("--kvtuner-profile", str(save_profile(mixed_profile(folder, by_kinds=True))))
    profile = () if flags[:1] == UNIFORM[:1] else profile
    assert refused(folder, *profile, *flags, before_weights=True, **variables).startswith(line)
