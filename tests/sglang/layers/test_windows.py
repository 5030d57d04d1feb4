"""Models with layers that have a window: full layers are served packed, the others by SGLang's own kernels."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from served_layers.two_kinds import TEXT_ALONE, TRITON, number, packed_bytes
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow

if TYPE_CHECKING:
    from fixture_types import (
        CompareServed,
        MixedProfile,
        ModelFolder,
        ProfileOf,
        Refused,
        RunProgram,
        SaveProfile,
        Serve,
    )

W, F = "sliding_attention", "full_attention"
LAYERS: dict[str, Any] = {"layer_types": [W, F, W, F, W, F], "num_hidden_layers": 6}
"""Full layers of all widths, and one of 16 bits; windows are of 24 tokens."""
TIED = {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {**TIED, "final_logit_softcapping": None},
    "gemma3": TIED,
    "gpt-oss": {},
    "gemma4-images": {"tie_word_embeddings": True},
    "exaone4": {  # SGLang's code has the base of hub's checkpoints, and an epsilon of QK norms, for numbers of its own
        "sliding_window_pattern": "LG",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rms_norm_eps": 1e-6,
    },
}
APART = ("gpt-oss", "gemma4-images")
"""Those whose windows SGLang keeps in a part of the pool of their own; it keeps all tokens of the others'."""
WINDOWS = {"gemma3": ExactWindow(8, 2), "gpt-oss": ExactWindow(8, 2)}
"""The exact windows of the profiles of some of them."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name == "gemma2")) for name in FAMILIES]
)
def test_full_layers_are_packed_and_windows_are_read_by_sglangs_own_kernels(
    name: str, compare_served: CompareServed, model_folder: ModelFolder, mixed_profile: MixedProfile
) -> None:
    folder = model_folder(name, **LAYERS, **FAMILIES[name])
    profile = mixed_profile(folder, by_kinds=True, window=WINDOWS.get(name))
    served = compare_served(folder, profile, *TRITON, *(TEXT_ALONE if "images" in name else ()))
    assert served.agreement.own > 1e-5
    assert served.agreement.is_near, served.agreement
    packed, (window, full) = packed_bytes(profile), itemgetter(0, 1)(profile.geometry.owners())
    of_window = 2 * 4 * window.num_kv_heads * window.head_dim
    if name in APART:
        assert "\n  1:K4V4,3:K8V3,5:K16V16\n" in served.log
        in_bf16 = 3 * 2 * 2 * full.num_kv_heads * full.head_dim
        assert f"\n  {packed:,} bytes per token, {in_bf16:,} in bf16" in served.log
        tokens = number(r"layers 0, 2, 4 have windows, .*: ([\d,]+) tokens", served.log)
        assert f"{tokens:,} tokens, {3 * (tokens + 1) * of_window:,} bytes\n" in served.log  # one pads graphs
    else:
        assert "\n  0:K16V16,1:K4V4,2:K16V16,3:K8V3,4-5:K16V16\n" in served.log
        assert f"\n  {packed + 3 * of_window:,} bytes per token, {6 * of_window // 2:,} in bf16" in served.log


@pytest.mark.full
def test_ranks_share_the_heads_of_both_parts_and_their_sinks(
    compare_served: CompareServed, model_folder: ModelFolder, mixed_profile: MixedProfile
) -> None:
    folder = model_folder("gpt-oss", **LAYERS)
    served = compare_served(folder, mixed_profile(folder, by_kinds=True), *TRITON, "--tp-size", "2")
    assert served.agreement.own > 1e-5
    assert served.agreement.is_near, served.agreement
    assert served.log.count("layers 0, 2, 4 have windows, in a part of their own") == 2


@pytest.mark.parametrize("name", ["gemma2", pytest.param("gpt-oss", marks=pytest.mark.full)])
def test_16_bits_are_plain_transformers_with_windows(
    name: str, compare_served: CompareServed, model_folder: ModelFolder, profile_of: ProfileOf
) -> None:
    folder = model_folder(name, **LAYERS, **FAMILIES[name])
    native = profile_of(AutoConfig.from_pretrained(folder), [LayerQuantization(16, 16)] * 3, by_kinds=True)
    agreement = compare_served(folder, native, *TRITON).agreement
    assert agreement.own < 1e-12
    assert agreement.divergence < 1e-6
    assert agreement.same_argmax == 1


def test_a_profile_of_gemma_4_is_of_the_model_that_sglang_reads(
    model_folder: ModelFolder, run_program: RunProgram
) -> None:
    """SGLang gives all of its layers the heads of the full ones, in the configuration that it holds."""
    folder = model_folder("gemma4-images", **LAYERS)
    done = run_program(str(Path(__file__).parents[1] / "programs" / "identity_program.py"), str(folder), *TEXT_ALONE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"differs": [], "changed": ["configuration"]}


@pytest.mark.parametrize(
    ("flags", "window", "ratio"),
    [
        (("--swa-full-tokens-ratio", "0.37", "--page-size", "16"), ExactWindow(), 0.37),
        pytest.param(("--swa-full-tokens-ratio", "0.37"), ExactWindow(8, 2), 0.37, marks=pytest.mark.full),
        pytest.param(("--disable-radix-cache", "--page-size", "16"), ExactWindow(), None, marks=pytest.mark.full),
        (("--disable-radix-cache",), ExactWindow(8, 2), None),
    ],
)
def test_both_parts_of_a_pool_take_the_available_bytes(
    flags: tuple[str, ...],
    window: ExactWindow,
    ratio: float | None,
    serve: Serve,
    model_folder: ModelFolder,
    mixed_profile: MixedProfile,
    save_profile: SaveProfile,
) -> None:
    """Windows have a share of the full layers' tokens or, without a radix cache, as many as requests need."""
    folder = model_folder("gpt-oss", **LAYERS)
    profile = mixed_profile(folder, by_kinds=True, window=window)
    # SGLang takes the profiled number where the cap is above it.
    all_memory = ("--max-total-tokens", "100000000", "--mem-fraction-static", "0.1", "--skip-server-warmup")
    with serve(folder, "--kvtuner-profile", str(save_profile(profile)), *TRITON, *flags, *all_memory) as server:
        log = server.log
    available = number(r"([\d,]+) bytes are available for the KV cache", log)
    tokens = number(r"available for the KV cache: ([\d,]+) tokens", log)
    of_windows = number(r"tokens and ([\d,]+) of layers with a window", log)
    page, packed, native = 16 if "--page-size" in flags else 1, packed_bytes(profile), 3 * 2 * 4 * 2 * 16

    def taken(tokens: int) -> int:
        share = of_windows if ratio is None else int(tokens * ratio) // page * page
        return tokens * packed + share * native

    assert tokens > 100_000
    assert tokens % page == of_windows % page == 0
    assert ratio is None or of_windows == int(tokens * ratio) // page * page
    # A page more would not fit, but for what SGLang rounds down in the windows' part.
    assert taken(tokens) <= available < taken(tokens + page) + page * native
    # What was allocated, beside a page that pads graphs.
    held = number(r"layers 0, 2, 4 have windows, .*: [\d,]+ tokens, ([\d,]+) bytes", log)
    assert held == (of_windows + page) * native
    assert number(r"\n  ([\d,]+) tokens, in bytes that hold", log) == tokens
    assert ("exact copies of rank 0" in log) == bool(window.num_tokens)


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


@pytest.mark.parametrize(
    ("name", "flags", "line"),
    [
        ("cohere2", (), "SGLang's code for Cohere2ForCausalLM tells its Triton attention of no window, though"),
        ("gpt-oss", ("--context-length", "24"), "SGLang keeps layers 0, 2, 4 of GptOssForCausalLM in a part for"),
    ],
)
def test_a_model_whose_windows_sglang_reads_otherwise_is_refused(
    name: str, flags: tuple[str, ...], line: str, refused: Refused, model_folder: ModelFolder
) -> None:
    folder = model_folder(name, **LAYERS)
    assert refused(folder, "--enable-kvtuner-quant", "--kvtuner-q-group-size", "16", *flags).startswith(line)


@pytest.mark.parametrize(("pattern", "shown"), [(2, "2"), ("LLG", "'LLG'"), (None, "None")])
def test_windows_by_another_word_than_the_types_of_layers_are_refused(
    pattern: int | str | None, shown: str, refused: Refused, model_folder: ModelFolder
) -> None:
    """SGLang would ask a number's length, and gives other layers windows and rotary positions by a word or by none."""
    folder = model_folder("exaone4", **LAYERS, **{**FAMILIES["exaone4"], "sliding_window_pattern": pattern})
    line = refused(folder, "--enable-kvtuner-quant", "--kvtuner-q-group-size", "16", *TRITON)
    assert f"such as LLLG where each fourth layer has no window; this model has {shown} in its place" in line
    assert "layers LGLGLG; write the word into its config.json" in line


def test_a_rotary_base_that_sglang_does_not_read_is_refused(refused: Refused, model_folder: ModelFolder) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    folder = model_folder("exaone4", **LAYERS, **{**FAMILIES["exaone4"], "rope_parameters": rope})
    line = refused(folder, "--enable-kvtuner-quant", "--kvtuner-q-group-size", "16", *TRITON)
    assert """add --json-model-override-args '{"rope_theta": 10000.0}'""" in line


@pytest.mark.full
def test_a_rotary_base_that_a_flag_tells_sglang_is_served(
    compare_served: CompareServed, model_folder: ModelFolder, mixed_profile: MixedProfile
) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    folder = model_folder("exaone4", **LAYERS, **{**FAMILIES["exaone4"], "rope_parameters": rope})
    flags = (*TRITON, "--json-model-override-args", '{"rope_theta": 10000.0}')
    served = compare_served(folder, mixed_profile(folder, by_kinds=True), *flags)
    assert served.agreement.is_near, served.agreement
    assert "under other rotations" not in served.log
