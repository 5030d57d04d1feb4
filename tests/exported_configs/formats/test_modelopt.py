"""ModelOpt's map of layers, as its exporter and its converter write it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats.conversion import parse_map, write
from kvtuner.exported_configs.profile.build import uniform_profile
from kvtuner.precision import PrecisionPair, ScaleLayout

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.geometry import ModelGeometry


def section(algorithm: Any = "MIXED_PRECISION", version: Any = 1, **layers: Any) -> dict[str, Any]:
    """The three fields; ``L0="INT8"`` is layer 0."""
    named = {f"model.layers.{name[1:]}.self_attn": {"quant_algo": word} for name, word in layers.items()}
    return {"kv_cache_quant_algo": algorithm, "kv_cache_quantized_layers": named, "kv_cache_schema_version": version}


def document(**arguments: Any) -> dict[str, Any]:
    return {
        "producer": {"name": "modelopt", "version": "0.47"},
        "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}, **section(**arguments)},
    }


def test_layers_outside_the_map_are_not_quantized(take: Callable[..., Any]) -> None:
    profile, notes = take(document(L0="INT8", L3="INT8"), "modelopt")
    assert [str(pair) for pair in profile.pairs] == ["K8V8", "K16V16", "K16V16", "K8V8"]
    assert (profile.defaults.k.symmetric, profile.defaults.v.symmetric) == (True, True)
    assert (profile.defaults.k.group_size, profile.defaults.v.group_size) == (128, 64)
    assert profile.budget.asked == "imported from modelopt"
    (note,) = notes
    assert "one calibrated scale per tensor" in note and "made while serving" in note


def test_the_map_stands_in_any_of_three_places(take: Callable[..., Any]) -> None:
    fields = section(L1="INT8")
    places = [{"quantization": fields}, {"model_type": "llama", "quantization_config": fields}, {"x": 1, **fields}]
    assert len({take(place, "modelopt")[0].digest for place in places}) == 1


def test_one_algorithm_without_a_map_is_that_of_all_layers(take: Callable[..., Any], geometry: ModelGeometry) -> None:
    profile = take({"quantization": {"kv_cache_quant_algo": "INT8"}}, "modelopt")[0]
    assert profile.digest == uniform_profile(geometry, PrecisionPair(8, 8), profile.model, symmetric=True).digest


def test_floats_are_mapped_on_request_only(take: Callable[..., Any], refusal: Callable[..., str]) -> None:
    mixed = document(L0="FP8", L1="NVFP4", L2="FP8_K_NVFP4_V", L3="NVFP4_AFFINE")
    assert "layer 0 is 'FP8', and a profile holds integers" in refusal(mixed, "modelopt")
    partly = parse_map("FP8=8,NVFP4=4,NVFP4_AFFINE=4")
    assert "layer 2 is 'FP8_K_NVFP4_V'" in refusal(mixed, "modelopt", words=partly)
    words = {**partly, **parse_map("fp8_k_nvfp4_v=K8V4")}
    profile, notes = take(mixed, "modelopt", words=words, group_size=64)
    assert [str(pair) for pair in profile.pairs] == ["K8V8", "K4V4", "K8V4", "K4V4"]
    assert not profile.defaults.k.symmetric and profile.defaults.k.group_size == 64
    assert len(notes) == 4 and all("integers with scales made while serving, another format" in n for n in notes)
    assert take(mixed, "modelopt", words=words, symmetric=True)[0].defaults.k.symmetric


def test_a_mapping_that_no_layer_needs_is_said(take: Callable[..., Any]) -> None:
    notes = take(document(L0="INT8"), "modelopt", words=parse_map("FP8=8"))[1]
    assert "--map FP8=K8V8 was not needed" in notes[1]


def test_int8_is_symmetric_whatever_is_asked(take: Callable[..., Any], refusal: Callable[..., str]) -> None:
    alone = document(L0="INT8", L2="INT8")
    assert take(alone, "modelopt")[0].defaults.k.symmetric
    assert "layer 0: INT8 is symmetric" in refusal(alone, "modelopt", symmetric=False)
    remapped = take(alone, "modelopt", words=parse_map("INT8=8"), symmetric=False)[0]
    assert not remapped.defaults.k.symmetric


def test_int8_beside_mapped_layers_needs_a_word_on_the_grid(
    take: Callable[..., Any], refusal: Callable[..., str]
) -> None:
    both, words = document(L1="NVFP4", L2="INT8"), parse_map("NVFP4=4")
    message = refusal(both, "modelopt", words=words)
    assert "layer 2 is INT8, which is symmetric, layer 1 is what --map says" in message
    assert "say --symmetric or --asymmetric" in message
    for symmetric in (True, False):
        profile, notes = take(both, "modelopt", words=words, symmetric=symmetric)
        assert [str(pair) for pair in profile.pairs] == ["K16V16", "K4V4", "K8V8", "K16V16"]
        assert (profile.defaults.k.symmetric, profile.defaults.v.symmetric) == (symmetric, symmetric)
        assert any("INT8 is symmetric; here it is asymmetric" in note for note in notes) != symmetric
    unquantized = take(both, "modelopt", words=parse_map("NVFP4=16"))[0]
    assert unquantized.defaults.k.symmetric, "16 bits have no grid"
    values_only = parse_map("NVFP4=K16V4")
    assert "say --symmetric or --asymmetric" in refusal(both, "modelopt", words=values_only)


@pytest.mark.parametrize(
    "name", ["layers.2.self_attn", "model.layers.2.attn", "transformer.layers.2.attention", "backbone.layers.2.mixer"]
)
def test_names_of_attention_modules(take: Callable[..., Any], name: str) -> None:
    fields = {**section("INT8"), "kv_cache_quantized_layers": {name: {"quant_algo": "INT8"}}}
    assert [pair.k_bits for pair in take(fields, "modelopt")[0].pairs] == [16, 16, 8, 16]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2",
        "model.layers.2.mlp",
        "model.layers.2.self_attn.k_proj",
        "model.layers.-1.self_attn",
        "model.layers.2.5.self_attn",
        "model.layers.\u0662.self_attn",
        "modellayers.2.self_attn",
        "model.layers.2.self_attn\n",
        "model\n.layers.2.self_attn",
        "model.layers.99999999999999999999.self_attn",
        "x." * 200 + "layers.2.self_attn",
        "(.*)",
        "",
        "\ud800",
    ],
)
def test_names_of_other_modules_are_refused(refusal: Callable[..., str], name: str) -> None:
    fields = {**section("INT8"), "kv_cache_quantized_layers": {name: {"quant_algo": "INT8"}}}
    assert "is no attention module" in refusal(fields, "modelopt")


def with_layers(layers: Any) -> dict[str, Any]:
    return {**section(), "kv_cache_quantized_layers": layers}


A, B = "model.layers.0.self_attn", "model.layers.1.self_attn"
INT8 = {"quant_algo": "INT8"}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (document(version=2, L0="INT8"), "kv_cache_schema_version must be 1, not '2'"),
        (document(version=True, L0="INT8"), "kv_cache_schema_version must be 1"),
        (document(version=1.0, L0="INT8"), "kv_cache_schema_version must be 1"),
        (document(version=None, L0="INT8"), "kv_cache_schema_version must be 1, not 'None'"),
        ({"kv_cache_quant_algo": "INT8", "kv_cache_schema_version": 2}, "kv_cache_schema_version must be 1"),
        (document(L4="INT8"), "layers 0-3, but the file names layer 4"),
        (
            document(algorithm="FP8", L0="INT8"),
            "kv_cache_quant_algo is 'FP8', but kv_cache_quantized_layers has 'INT8'",
        ),
        (document(algorithm=None, L0="INT8"), "kv_cache_quant_algo is null"),
        (document(algorithm="INT8"), "has no layer"),
        (document(algorithm=8, L0="INT8"), "must be a name, not int"),
        (document(L0="INT4"), "layer 0 is 'INT4'"),
        (document(L0="x" * 5000), "layer 0 is 'xxx"),
        (document(L0=8), "must be a name, not int"),
        (with_layers([A]), "must be an object, not list"),
        (with_layers({A: "INT8"}), "must have quant_algo and nothing else"),
        (with_layers({A: {**INT8, "group_size": 16}}), "must have quant_algo and nothing else"),
        (with_layers({A: {}}), "must have quant_algo and nothing else"),
        (with_layers({A: INT8, "model.layers.0.attn": INT8}), "second module of layer 0"),
        (with_layers({A: INT8, "model.layers.00.self_attn": INT8}), "second module of layer 0"),
        (with_layers({A: INT8, "vision.layers.1.self_attn": INT8}), "second module of layer 1, or of another model"),
        ({"kv_cache_quant_algo": "MIXED_PRECISION"}, "kv_cache_quantized_layers is missing"),
        ({"quantization": {"kv_cache_quant_algo": None}}, "its KV cache is not quantized"),
        ({"kv_cache_quant_algo": "FP8"}, "layer 0 is 'FP8'"),
        ({"quantization": {"quant_algo": "FP8"}}, "has no kv_cache_quant_algo"),
        ({"quantization": [section()]}, "has no kv_cache_quant_algo"),
        ({"quantization": section(L0="INT8"), **section(L1="INT8")}, "has more than one kv_cache_quant_algo"),
        ([document()], "must be a JSON object"),
        ("", "must be JSON"),
        ("{", "must be JSON"),
        ("{" * 100000, "must nest at most 64 deep"),
        ("[" * 200000, "must nest at most 64 deep"),
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        ('{"quantization": {"kv_cache_schema_version": ' + "1" * 5000 + "}}", "at most 20 digits"),
        (b"\xff{}", "must be UTF-8"),
        (" " * (8 << 20) + "{}", "at most 8388608 bytes"),
    ],
)
def test_what_is_no_map_of_the_model_is_refused(refusal: Callable[..., str], source: Any, says: str) -> None:
    assert says in refusal(source, "modelopt")


def test_many_names_are_compared_in_no_time(refusal: Callable[..., str]) -> None:
    names = {f"n{number}": 0 for number in range(200_000)}
    text = json.dumps(names)[:-1] + ', "n199999": 1}'
    assert "'n199999' stands twice" in refusal(text, "modelopt")


def test_what_is_written_is_what_modelopt_writes(take: Callable[..., Any], geometry: ModelGeometry) -> None:
    model = take(document(L0="INT8"), "modelopt")[0].model
    whole = uniform_profile(geometry, PrecisionPair(8, 8), model, symmetric=True)
    quantization = json.loads(write(whole, "modelopt").text)["quantization"]
    assert quantization == {"quant_algo": None, **section("INT8", L0="INT8", L1="INT8", L2="INT8", L3="INT8")}
    partly, _ = take(document(L2="INT8"), "modelopt")
    quantization = json.loads(write(partly, "modelopt").text)["quantization"]
    assert quantization == {"quant_algo": None, **section("MIXED_PRECISION", L2="INT8")}


@pytest.mark.parametrize(
    ("pair", "options", "says"),
    [
        ((4, 4), {"symmetric": True}, "layer 0: K4V4 is neither INT8 nor unquantized (and 3 more)"),
        ((8, 16), {"symmetric": True}, "layer 0: K8V16 is neither"),
        ((8, 8), {}, "layer 0: keys are asymmetric"),
        ((8, 8), {"symmetric": True, "k_layout": ScaleLayout(64)}, "layer 0: keys are in groups of 64, not 128"),
    ],
)
def test_other_storage_is_refused_by_layer_and_loss(
    take: Callable[..., Any], geometry: ModelGeometry, pair: tuple[int, int], options: Any, says: str
) -> None:
    model = take(document(L0="INT8"), "modelopt")[0].model
    with pytest.raises(ProfileError, match=re.escape(says)):
        write(uniform_profile(geometry, PrecisionPair(*pair), model, **options), "modelopt")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        *((text, "is no such entry") for text in ("", "FP8", "FP8=", "=8", "FP8=8,", "F\u00e98=8", "a\x07=8")),
        ("FP8=5", "k_bits must be one of"),
        ("FP8=x" * 90, "a precision is written"),
        *((text, "FP8 may stand once, but is twice") for text in ("FP8=8,FP8=4", "FP8=8,fp8=4")),
    ],
)
def test_mappings_that_cannot_be_read_are_refused(text: str, rule: str) -> None:
    with pytest.raises(ProfileError, match=f"^--map.*{rule}") as refused:
        parse_map(text)
    assert str(refused.value).isprintable()
