"""Dtypes of layers, as text and as YAML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats.conversion import parse_map, write
from kvtuner.exported_configs.profile.build import LayerQuantization, uniform_profile
from kvtuner.precision import ExactWindow, PrecisionPair, ScaleLayout
from kvtuner.quant import Transform
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.geometry import ModelGeometry

YAML = "kv_cache_per_layer_dtype:\n  0: bf16\n  1-2: int8\n  '3': K4V2\n"


def test_words_of_both_tools_and_of_ours(take: Callable[..., Any]) -> None:
    profile, notes = take("0:auto,1:INT8, 2:int2,3:k8v4\n", "ranges")
    assert [str(pair) for pair in profile.pairs] == ["K16V16", "K8V8", "K2V2", "K8V4"]
    assert (profile.defaults.k.group_size, profile.defaults.v.group_size) == (128, 64)
    assert not profile.defaults.k.symmetric and notes == ()
    for word in ("bf16", "bfloat16", "fp16", "float16", "auto", "16"):
        assert take(f"0-3:{word}", "ranges")[0].pairs == (PrecisionPair(16, 16),) * 4


def test_yaml_says_the_same(take: Callable[..., Any]) -> None:
    by_text = take("0:bf16,1-2:int8,3:K4V2", "ranges")[0].digest
    for text in (YAML, "kv_cache_per_layer_dtype: 0:bf16,1-2:int8,3:K4V2", YAML.replace("int8", "8")):
        assert take(text, "ranges")[0].digest == by_text


def test_layers_not_named_need_a_default(take: Callable[..., Any], refusal: Callable[..., str]) -> None:
    assert "layer 2 of 0-3 is not named; give the dtype of such layers" in refusal("0-1:bf16", "ranges")
    profile, notes = take("0-1:bf16", "ranges", default_word="int4", symmetric=True, group_size=64)
    assert [str(pair) for pair in profile.pairs] == ["K16V16", "K16V16", "K4V4", "K4V4"]
    assert profile.defaults.v.symmetric and profile.defaults.k.group_size == 64 and notes == ()
    assert "not needed" in take("0-3:8", "ranges", default_word="int4")[1][0]


@pytest.mark.parametrize(
    "word", ["fp8", "fp8_e4m3", "FP8_E5M2", "nvfp4", "fp4_e2m1", "mxfp8", "mxfp4", "float8_e4m3fn"]
)
def test_floats_are_mapped_on_request_only(take: Callable[..., Any], refusal: Callable[..., str], word: str) -> None:
    text = f"0:bf16,1-3:{word}"
    message = refusal(text, "ranges")
    assert f"layer 1 is '{word}', and a profile holds integers" in message and f"--map {word}=8" in message
    assert "--default-dtype is" in refusal("0:bf16", "ranges", default_word=word)
    profile, notes = take(text, "ranges", words=parse_map(f"{word.lower()}=K8V4"))
    assert str(profile.pairs[3]) == "K8V4" and "another format than" in notes[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0-4:8", "names layer 4"),
        ("0-9999:8", "names layer 4"),
        ("0-3:8,2:4", "layer 2 is twice"),
        ("0-3:int3", "layer 0: a precision is written K8V4, 8 or bf16, not 'int3', nor one of int2, int4, int8"),
        ("0-3:" + "8" * 60000, "at most 40 letters"),
        ("3-0:8", "from its lower"),
        ("0-3", "an entry is written"),
        ("0-3:", "an entry is written"),
        ("0-99999:8", "an entry is written"),
        ("0-3:8,", "an entry is written"),
        ("0-3:8," * 20000, "at most 65536 bytes"),
        ("", "must be ranges like"),
        ("bf16", "must be ranges like"),
        ("{0: bf16}", "must be ranges like"),
        (YAML + "kv_cache_dtype: int8\n", "and nothing else"),
        ("kv_cache_per_layer_dtype: [0]", "must map layers to dtypes"),
        ("kv_cache_per_layer_dtype: 1:8", "or be ranges in quotes, not int"),
        ("kv_cache_per_layer_dtype: {true: bf16}", "such as 0: bf16, not 'True'"),
        ("kv_cache_per_layer_dtype: {0.0: bf16}", "such as 0: bf16"),
        ("kv_cache_per_layer_dtype: {0: 8.0}", "such as 0: bf16"),
        ("kv_cache_per_layer_dtype: {0: true}", "such as 0: bf16"),
        ("kv_cache_per_layer_dtype: {0: {a: b}}", "such as 0: bf16"),
        ("kv_cache_per_layer_dtype: {-1: bf16}", "an entry is written"),
        ("kv_cache_per_layer_dtype: {0: 8, '0': 8}", "layer 0 is twice"),
        ("kv_cache_per_layer_dtype: {0-1: 8, 1: 8}", "layer 1 is twice"),
        (YAML.replace("0:", "&a 0:"), "anchor or alias"),
        (b"0-3:\xff", "must be UTF-8"),
    ],
)
def test_what_cannot_be_read_is_refused(refusal: Callable[..., str], text: str | bytes, says: str) -> None:
    assert says in refusal(text, "ranges")


def test_neighbours_are_written_as_one_range(take: Callable[..., Any]) -> None:
    for text in ("0-1:bf16,2:int8,3:int4\n", "0-3:int2\n", "0:bf16,1-2:int4,3:bf16\n"):
        exported = write(take(text, "ranges")[0], "ranges")
        assert (exported.text, exported.notes) == (text, ())


def test_keys_and_values_of_other_bits_are_refused_even_with_a_loss(take: Callable[..., Any]) -> None:
    profile = take("0-2:8,3:K8V4", "ranges")[0]
    for lossy in (False, True):
        with pytest.raises(ProfileError, match="layer 3: K8V4 has other bits for keys than for values"):
            write(profile, "ranges", lossy=lossy)


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        ({"symmetric": True}, ["from layer 0 on: keys are symmetric", "from layer 0 on: values are symmetric"]),
        ({"window": ExactWindow(32)}, ["from layer 0 on: the last 32 tokens exact"]),
        (
            {"fit": "least_squares"},
            [f"from layer 0 on: {noun} are fitted by least squares" for noun in ("keys", "values")],
        ),
        ({"k_layout": ScaleLayout(word_bits=16)}, ["from layer 0 on: keys have 16 bits for scale and minimum"]),
        ({"v_layout": ScaleLayout(32)}, ["from layer 0 on: values are in groups of 32, not 64"]),
        ({"k_layout": ScaleLayout(128, granularity="per_channel")}, ["from layer 0 on: keys are per channel"]),
    ],
)
def test_what_is_dropped_is_refused_or_said(
    take: Callable[..., Any], geometry: ModelGeometry, options: Any, dropped: list[str]
) -> None:
    model = take("0-3:8", "ranges")[0].model
    profile = uniform_profile(geometry, PrecisionPair(4, 4), model, **options)
    with pytest.raises(ProfileError, match=r"layer 0: .*; --lossy accepts that"):
        write(profile, "ranges")
    exported = write(profile, "ranges", lossy=True)
    assert exported.text == "0-3:int4\n"
    assert [note.removeprefix("dropped, ") for note in exported.notes] == dropped


def test_nothing_is_lost_of_8_bits_which_are_not_fitted_and_have_wide_words(
    take: Callable[..., Any], geometry: ModelGeometry
) -> None:
    model = take("0-3:8", "ranges")[0].model
    profile = uniform_profile(
        geometry, PrecisionPair(8, 8), model, fit="least_squares", k_layout=ScaleLayout(word_bits=16)
    )
    assert write(profile, "ranges").text == "0-3:int8\n"


def test_the_first_transformed_layer_is_named(make_profile: Callable[..., Profile]) -> None:
    rotated = LayerQuantization(4, 4, Transform(TransformKind.parse("hadamard")))
    profile = make_profile(
        layers=[LayerQuantization(16, 16), LayerQuantization(4, 4), LayerQuantization(16, 16), rotated, rotated],
        k_layout=ScaleLayout(48),
        v_layout=ScaleLayout(32),
    )
    with pytest.raises(ProfileError, match="layer 3: keys are hadamard; --lossy"):
        write(profile, "ranges")
    assert write(profile, "ranges", lossy=True).notes == ("dropped, from layer 3 on: keys are hadamard",)
