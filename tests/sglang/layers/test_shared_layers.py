"""Models whose last layers store no keys and read those of an earlier layer of their type, packed or with a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from served_layers.two_kinds import TEXT_ALONE, TRITON, number
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow, PrecisionPair

if TYPE_CHECKING:
    from fixture_types import (
        Compare,
        CompareServed,
        MixedLayers,
        MixedProfile,
        ModelFolder,
        ProfileOf,
        Prompts,
        Refused,
        SaveProfile,
        Serve,
    )

W, F = "sliding_attention", "full_attention"
CHUNK = 64
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4-readers-images": {"tie_word_embeddings": True},
    "gemma3n": {"tie_word_embeddings": True, "layer_types": [W, F, W, F, W, F, W]},
}
"""Models of seven layers, the last three of which read others: layers 2 and 3, one of them with a window of 24."""
PROMPTS = (5, 33, 1, 17)
"""The lengths of prompts that one chunk holds."""
LONG_PROMPTS = (150, 71)
"""The lengths of prompts that are cut.

Of what layers that read others compute for a token, later tokens read nothing: what a chunk read shows in what is
predicted behind each of its tokens, not in answers.
"""
LAYERS = [LayerQuantization(8, 8), LayerQuantization(2, 2)]
"""Full layers, of which the last three read the second."""


def flags_of(name: str) -> tuple[str, ...]:
    return (*TRITON, "--chunked-prefill-size", str(CHUNK), *(TEXT_ALONE if "images" in name else ()))


def read_the_first_full_layer(model: Any) -> None:
    """Let the last layers of Gemma 4 in transformers read layer 0 in place of layer 2."""
    layers = model.model.language_model.layers
    assert [layer.self_attn.store_full_length_kv for layer in layers[:3]] == [False, False, True]
    layers[0].self_attn.store_full_length_kv, layers[2].self_attn.store_full_length_kv = True, False


@pytest.mark.parametrize(
    ("name", "attend"),
    [
        ("gemma4-readers-images", "fresh"),
        pytest.param("gemma4-readers-images", "cache", marks=pytest.mark.full),
        ("gemma3n", "fresh"),
        pytest.param("gemma3n", "cache", marks=pytest.mark.full),
    ],
)
def test_a_layer_reads_the_rows_and_the_chunk_of_another(
    name: str, attend: str, serve: Serve, compare: Compare, model_folder: ModelFolder, profile_of: ProfileOf,
    mixed_layers: MixedLayers, save_profile: SaveProfile, prompts: Prompts,
) -> None:  # fmt: skip
    folder = model_folder(name, **FAMILIES[name])
    config = AutoConfig.from_pretrained(folder)
    packed, native = mixed_layers(config)
    profile = profile_of(config, [native, packed], by_kinds=True)
    plan: Any = "cache" if attend == "cache" else None
    flags = ("--kvtuner-profile", str(save_profile(profile)), "--kvtuner-attend", attend, *flags_of(name))
    with serve(folder, *flags) as server:
        agreements = [
            compare(server, folder, profile, prompts(*PROMPTS), 40, read_plan=plan, of_prompts=True),
            compare(server, folder, profile, prompts(*LONG_PROMPTS, seed=1), 4, CHUNK, read_plan=plan, of_prompts=True),
            compare(server, folder, profile, prompts(90, 71, 65, 128, seed=2), 2, CHUNK, read_plan=plan, is_hit=True),
        ]
        if name != "gemma3n":
            alter = read_the_first_full_layer
            other = compare(server, folder, profile, prompts(*PROMPTS), 4, read_plan=plan, alter=alter)
            assert other.divergence > 0.1
            assert not other.is_near
    for agreement in agreements:
        assert agreement.own > 1e-5
        assert agreement.is_near, agreement
    geometry, owners = profile.tuned_geometry(), profile.geometry.owners()
    assert list(owners) == [0, 1, 2, 3]
    of_native = 4 * geometry.num_kv_heads * (geometry.head_dim + geometry.v_head_dim)  # float32 here
    stored = profile.row_shape(1).pair_bytes(PrecisionPair(4, 4)) + of_native
    of_windows = sum(4 * layer.num_elements for layer in owners.values() if layer.kind.name == "window")
    if name == "gemma3n":
        assert "layers read windows of 24 tokens as configured, for which SGLang's code has 25" in server.log
        assert f"\n  {stored + of_windows:,} bytes per token, " in server.log
        assert "\n  0-2:K16V16,3:K4V4\n" in server.log
    else:
        assert f"\n  {stored:,} bytes per token, " in server.log
        assert "\n  0:K16V16,2:K4V4\n" in server.log
        tokens = number(r"layers 1, 3 have windows, .*: ([\d,]+) tokens", server.log)
        assert f"{tokens:,} tokens, {(tokens + 1) * of_windows:,} bytes\n" in server.log  # one pads graphs


@pytest.mark.parametrize(
    ("name", "attend"),
    [
        ("gemma4-readers-images", "fresh"),
        pytest.param("gemma4-readers-images", "cache", marks=pytest.mark.full),
        pytest.param("gemma3n", "fresh", marks=pytest.mark.full),
        pytest.param("gemma3n", "cache", marks=pytest.mark.full),
    ],
)
def test_a_layer_reads_the_exact_copies_of_another(
    name: str, attend: str, serve: Serve, compare: Compare, model_folder: ModelFolder, profile_of: ProfileOf,
    save_profile: SaveProfile, prompts: Prompts,
) -> None:  # fmt: skip
    """A chunk takes the places of copies that layers behind the one that stores it still read."""
    folder = model_folder(name, **FAMILIES[name])
    profile = profile_of(AutoConfig.from_pretrained(folder), LAYERS, by_kinds=True, window=ExactWindow(12, 3))
    flags = ("--kvtuner-profile", str(save_profile(profile)), "--kvtuner-attend", attend, *flags_of(name))
    plan: Any = "cache" if attend == "cache" else None
    with serve(folder, *flags) as server:
        at_once = compare(server, folder, profile, prompts(*PROMPTS), 40, read_plan=plan, of_prompts=True)
        cut = prompts(*LONG_PROMPTS, seed=1)
        in_chunks = compare(server, folder, profile, cut, 4, CHUNK, read_plan=plan, of_prompts=True)
    for agreement in (at_once, in_chunks):
        assert agreement.own > 1e-5
        assert agreement.is_near, agreement


def test_16_bits_are_plain_transformers_where_layers_read_others(
    compare_served: CompareServed, model_folder: ModelFolder, profile_of: ProfileOf
) -> None:
    name = "gemma4-readers-images"
    folder = model_folder(name, **FAMILIES[name])
    native = profile_of(AutoConfig.from_pretrained(folder), [LayerQuantization(16, 16)] * 2, by_kinds=True)
    agreement = compare_served(folder, native, *TRITON, *TEXT_ALONE).agreement
    assert agreement.own < 1e-12
    assert agreement.divergence < 1e-6
    assert agreement.same_argmax == 1


@pytest.mark.full
def test_ranks_share_the_heads_of_layers_that_others_read(
    compare_served: CompareServed, model_folder: ModelFolder, profile_of: ProfileOf
) -> None:
    name = "gemma4-readers-images"
    folder = model_folder(name, **FAMILIES[name])
    profile = profile_of(AutoConfig.from_pretrained(folder), LAYERS, by_kinds=True, window=ExactWindow(8, 2))
    flags = (*TRITON, *TEXT_ALONE, "--tp-size", "2", "--chunked-prefill-size", "32")
    served = compare_served(folder, profile, *flags, lengths=(5, 33, 60), chunk=32, num_tokens=20)
    assert served.agreement.own > 1e-5
    assert served.agreement.is_near, served.agreement
    assert served.log.count("layers 1, 3 have windows, in a part of their own") == 2


@pytest.mark.full
def test_layers_of_all_types_are_packed_where_no_context_is_longer_than_a_window(
    compare_served: CompareServed, model_folder: ModelFolder, mixed_profile: MixedProfile
) -> None:
    folder = model_folder("gemma3n", **FAMILIES["gemma3n"], sliding_window=512)
    profile = mixed_profile(folder, by_kinds=True)
    assert profile.tuned_geometry().ids == (0, 1, 2, 3)
    served = compare_served(folder, profile, *TRITON, lengths=PROMPTS)
    assert served.agreement.own > 1e-5
    assert served.agreement.is_near, served.agreement


def test_a_model_whose_layers_read_others_in_sglang_is_refused(refused: Refused, model_folder: ModelFolder) -> None:
    """SGLang's code for Gemma 3n takes the last two layers that store for one with a window and a full one."""
    folder = model_folder("gemma3n", tie_word_embeddings=True)
    line = refused(folder, "--enable-kvtuner-quant", "--kvtuner-q-group-size", "16", *TRITON)
    assert line.startswith("layer 4 of this model reads the keys of layer 3 in SGLang, but by its configuration")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--enable-hierarchical-cache",), "--enable-hierarchical-cache does not work with a packed KV pool beside"),
        (("--pp-size", "2"), "--pp-size 2 does not work with a packed KV pool beside layers that read another layer's"),
        (
            ("--kvtuner-axis-key", "1", "--kvtuner-residual-length", "16", "--page-size", "16"),
            "keys per channel beside layers that have a window, keep a state or read another layer's keys were never",
        ),
    ],
)
def test_what_does_not_go_with_layers_that_read_others_is_refused(
    flags: tuple[str, ...], line: str, refused: Refused, model_folder: ModelFolder
) -> None:
    folder = model_folder("gemma3n", **FAMILIES["gemma3n"])
    of_heads = ("--enable-kvtuner-quant", "--kvtuner-q-group-size", "16")
    assert refused(folder, *of_heads, *flags).startswith(line)
