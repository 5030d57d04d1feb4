"""Hostile values in a well-formed file: at every place, and against every rule, with a forged digest."""

from __future__ import annotations

import base64
import copy
import json
import struct
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.exported_configs.profile.load import load_profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Document = dict[str, Any]
    Steps = tuple[str | int, ...]
    Put = Callable[[Document, Steps, Any], Document]
    Refusal = Callable[[bytes], str]
    Seal = Callable[[Document], Document]

NULLABLE = {
    ("model", "revision"),
    ("quality",),
    ("quality", "predicted_kl"),
    ("provenance", "calibration"),
    ("provenance", "search"),
}
MARK = "marked for replacement"


def encode(document: Document) -> bytes:
    return json.dumps(document).encode()


def places(node: Any, steps: Steps = ()) -> Iterator[tuple[Steps, Any]]:
    """Every value of a document with the way to it."""
    yield steps, node
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for step, child in children:
        yield from places(child, (*steps, step))


def put_raw(put: Put, document: Document, steps: Steps, literal: str) -> bytes:
    """The document's text with a literal that json would not write at one place."""
    return json.dumps(put(document, steps, MARK)).replace(f'"{MARK}"', literal).encode()


def fp16(*values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}e", *values)).decode()


def test_every_integer_refuses_floats_booleans_texts_and_monsters(
    put: Put, refusal: Refusal, pristine: Document
) -> None:
    integers = [(steps, value) for steps, value in places(pristine) if type(value) is int]
    assert len(integers) > 40
    for steps, value in integers:
        for wrong in (float(value), value == 1, str(value), [value], {"value": value}):
            refusal(encode(put(pristine, steps, wrong)))
        for literal in (str(10**400), str(-(10**400)), "9" * 5000, "1e3", "-1", str(2**64)):
            refusal(put_raw(put, pristine, steps, literal))


def test_every_float_refuses_nan_infinity_overflow_and_other_types(
    put: Put, refusal: Refusal, pristine: Document
) -> None:
    floats = [steps for steps, value in places(pristine) if type(value) is float]
    assert len(floats) > 10
    for steps in floats:
        for literal in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400, "1e31"):
            assert "must" in refusal(put_raw(put, pristine, steps, literal))
        for wrong in (True, "0.5", [0.5], {"mean": 0.5}):
            refusal(encode(put(pristine, steps, wrong)))


def test_every_text_and_truth_value_refuses_other_types(put: Put, refusal: Refusal, pristine: Document) -> None:
    leaves = [(steps, value) for steps, value in places(pristine) if type(value) in (str, bool)]
    assert {type(value) for _, value in leaves} == {str, bool}
    for steps, _ in leaves:
        for wrong in (0, 1, 1.0, [], {}, "\ud800", "a\nb", "\x1b[31m"):
            refusal(encode(put(pristine, steps, wrong)))


def test_null_stands_only_where_the_format_says_so(put: Put, refusal: Refusal, pristine: Document) -> None:
    for steps, _ in places(pristine):
        optional = steps in NULLABLE or steps[-2:] in (("k", "transform"), ("v", "transform"))
        if steps and not (optional and steps[0] != "defaults"):
            refusal(encode(put(pristine, steps, None)))
    for steps in NULLABLE:
        assert load_profile(encode(put(pristine, steps, None))).digest == pristine["digest"]


def test_every_field_but_the_optional_ones_must_be_present(refusal: Refusal, pristine: Document) -> None:
    for steps, _ in places(pristine):
        if not steps or isinstance(steps[-1], int):
            continue
        document: Any = copy.deepcopy(pristine)
        node = document
        for step in steps[:-1]:
            node = node[step]
        del node[steps[-1]]
        message = refusal(encode(document))
        assert str(steps[-1]) in message or "digest is sha256:" in message, steps


def test_unknown_fields_are_refused_in_every_object(put: Put, refusal: Refusal, pristine: Document) -> None:
    objects = [steps for steps, value in places(pristine) if isinstance(value, dict)]
    assert len(objects) > 20
    for steps in objects:
        for name in ("extra", "lam", "Layer", "__class__", "\ud800", "a\nb", "x" * 5000):
            refusal(encode(put(pristine, (*steps, name), 1)))


def test_unknown_field_is_named_with_its_place(put: Put, refusal: Refusal, pristine: Document) -> None:
    message = refusal(encode(put(pristine, ("layers", 0, "v", "mu"), {"dtype": "float16"})))
    assert "layers[0].v.mu: unknown field" in message


def test_keys_that_stand_twice_are_refused_in_every_object(put: Put, refusal: Refusal, pristine: Document) -> None:
    for steps, value in places(pristine):
        if isinstance(value, dict):
            name = next(iter(value))
            text = json.dumps(put(pristine, (*steps, "mark"), MARK))
            twice = text.replace(f'"mark": "{MARK}"', f'"{name}": {json.dumps(value[name])}')
            assert f"field {name!r} stands twice" in refusal(twice.encode())


def test_escaped_spelling_of_a_key_counts_as_the_same_key(refusal: Refusal, pristine: Document) -> None:
    text = json.dumps(pristine).replace('"schema_version"', r'"schema_version": 1, "schema_\u0076ersion"')
    assert "field 'schema_version' stands twice" in refusal(text.encode())


@pytest.mark.parametrize(
    ("steps", "value", "message"),
    [
        (("layers", 0, "k", "bits"), 5, "layers[0].k.bits: must be 2, 3, 4, 8 or 16, not 5"),
        (("layers", 3, "v", "bits"), 0, "layers[3].v.bits: must be 2, 3, 4, 8 or 16, not 0"),
        (("layers", 0, "layer"), 1, "layer 1 stands where layer 0 belongs"),
        (("layers", 4, "layer"), 5, "layer 5 stands where layer 4 belongs"),
        (("layers", 2, "layer"), 1, "layer 1 stands where layer 2 belongs"),
        (("layers",), [], "layers: Tuple should have at least 1 item"),
        (("geometry", "num_layers"), 6, "geometry has num_layers 6, but layers holds 5"),
        (("geometry", "num_layers"), 4, "geometry has num_layers 4, but layers holds 5"),
        (("geometry", "num_layers"), 10**9, "geometry.num_layers: must be less than or equal to 1024"),
        (("geometry", "head_dim"), 1025, "geometry.head_dim: must be less than or equal to 1024, not 1025"),
        (("geometry", "num_kv_heads"), 4, "num_attention_heads 6 is no multiple of num_kv_heads 4"),
        (("geometry", "num_kv_heads"), 2, "layers[1].k.mu: shape must be [num_kv_heads, head_dim] = [2, 48]"),
        (("geometry", "head_dim"), 24, "layers[1].k.mu: shape must be [num_kv_heads, head_dim] = [3, 24]"),
        (("geometry", "head_dim"), 49, "layers[0].k: head_dim 49 cannot be packed at 8 bits"),
        (("defaults", "k", "group_size"), 16, "layers[0].k: group_size 16 must divide head_dim 48 and be"),
        (("defaults", "v", "group_size"), 4, "layers[0].v: group_size 4 must divide head_dim 32 and be"),
        (
            ("defaults", "k", "granularity"),
            "per_channel",
            "defaults.k: per_channel keys need a group_size of (16, 32, 64, 128) tokens, not 24",
        ),
        (("defaults", "v", "granularity"), "per_head", "must be 'per_token', not 'per_head'"),
        (
            ("defaults", "v", "granularity"),
            "per_channel",
            "defaults.v.granularity: must be 'per_token', not 'per_channel'",
        ),
        (("defaults", "k", "granularity"), "per_head", "must be 'per_token' or 'per_channel', not 'per_head'"),
        (("defaults", "k", "transform"), "hadamard+centered", "defaults.k.transform: must be 'none', 'hadamard'"),
        (("defaults", "v", "transform"), "balanced", "defaults.v.transform: must be 'none' or 'hadamard'"),
        (("layers", 0, "v", "transform"), "centered", "layers[0].v.transform: must be 'none' or 'hadamard'"),
        (("layers", 2, "k", "transform"), "none", "layers[2].k: 16 bits are stored as they are"),
        (("layers", 3, "k", "transform"), "balanced", "layers[3].k.lambda: transform 'balanced' needs it"),
        (("layers", 3, "k", "transform"), "centered", "layers[3].k.mu: transform 'centered' needs it"),
        (("layers", 1, "k", "transform"), "hadamard", "layers[1].k.mu: transform 'hadamard' has none"),
        (("layers", 1, "k", "bits"), 16, "layers[1].k: 16 bits are stored as they are"),
        (("budget", "tp_size"), 2, "budget: tp_size 2 does not divide num_kv_heads 3"),
        (("budget", "pp_size"), 6, "budget: pp_size 6 does not fit 5 layers"),
        (("budget", "mean_bits"), 9.00001, "budget.mean_bits: is 9.00001, but the layers give"),
        (("budget", "effective_bits"), 4.0, "budget.effective_bits: is 4.0, but the layers give"),
        (("budget", "bytes_per_token"), 1, "budget.bytes_per_token: is 1, but the layers give"),
        (("budget", "asked"), "4bit ", "budget.asked: must be printable, without spaces around it, not '4bit '"),
        (("model", "id"), "/home/me/model", "model.id: must be a name, not a path of one machine"),
        (("model", "id"), "C:\\models\\tiny", "model.id: must be a name, not a path of one machine"),
        (("model", "id"), "owner/../../etc", "model.id: must be a name, not a path of one machine"),
        (("model", "id"), "models/owner/tiny", "model.id: must be a hub id (owner/name) or a base name"),
        (("model", "config_sha256"), "sha256:" + "0" * 63, "model.config_sha256: String should match pattern"),
        (("model", "config_sha256"), "sha256:" + "0" * 64 + "\n", "String should match pattern"),
        (("model", "dtype"), "int8", "model.dtype: must be 'bfloat16', 'float16' or 'float32', not 'int8'"),
        (("provenance", "calibration", "corpus"), "~/data.jsonl", "corpus: must be a name, not a path"),
        (("provenance", "calibration", "position_range"), [9, 1], "position_range must ascend, but is [9, 1]"),
        (("provenance", "calibration", "position_range"), [0, 1, 2], "position_range: Tuple should have at most 2"),
        (("quality", "measured_kl", "low"), 0.5, "low must not exceed high, but 0.5 > 0.014"),
        (("quality", "top1_agreement"), 1.5, "top1_agreement: must be less than or equal to 1"),
        (("quality", "read_plan"), "prefill", "must be 'decode', 'hit' or 'cache', not 'prefill'"),
    ],
)
def test_broken_rule_is_named_with_its_place_and_value(
    put: Put, refusal: Refusal, document: Document, reseal: Seal, steps: Steps, value: Any, message: str
) -> None:
    forged = reseal(put(document, steps, value))
    assert message in refusal(encode(forged))


def test_a_range_may_be_one_number(put: Put, pristine: Document) -> None:
    one = put(pristine, ("provenance", "calibration", "position_range"), [9, 9])
    one = put(one, ("quality", "measured_kl"), {"mean": 0.5, "low": 0.5, "high": 0.5})
    assert load_profile(encode(one)).digest == pristine["digest"]


def test_layers_out_of_order_missing_and_twice_are_refused(refusal: Refusal, document: Document, reseal: Seal) -> None:
    layers = document["layers"]
    for wrong, message in (
        (layers[::-1], "layer 4 stands where layer 0 belongs"),
        (layers[:2] + layers[3:], "layer 3 stands where layer 2 belongs"),
        (layers[:4], "num_layers 5, but layers holds 4"),
        ([*layers[:3], layers[2], *layers[3:]], "layer 2 stands where layer 3 belongs"),
        (layers * 300, "a list must have at most 1024 items, not 1500"),
    ):
        assert message in refusal(encode(reseal({**document, "layers": wrong})))


@pytest.mark.parametrize(
    ("field", "array", "message"),
    [
        ("lambda", {"data": fp16(*[1.0] * 143, 0.0)}, "must lie within [1/64, 64], but holds 0;"),
        ("lambda", {"data": fp16(*[1.0] * 143, 64.0625)}, "must lie within [1/64, 64], but holds 64.0625;"),
        ("lambda", {"data": fp16(*[1.0] * 143, 0.015617)}, "must lie within [1/64, 64], but holds 0.0156"),
        ("lambda", {"data": fp16(*[1.0] * 143, -1.0)}, "must lie within [1/64, 64], but holds -1;"),
        ("lambda", {"data": fp16(*[1.0] * 143, float("nan"))}, "must be finite, but holds NaN or infinity"),
        ("mu", {"data": fp16(*[1.0] * 143, float("-inf"))}, "must be finite, but holds NaN or infinity"),
        ("mu", {"shape": [2, 72]}, "shape must be [num_kv_heads, head_dim] = [3, 48], not [2, 72]"),
        ("mu", {"shape": [144]}, "layers[1].k.mu.shape[1]: the field is missing"),
        ("mu", {"shape": [3, 48, 1]}, "layers[1].k.mu.shape: Tuple should have at most 2 items"),
        ("mu", {"shape": [3, 47]}, "data of shape [3, 47] needs 376 characters, not 384"),
        ("mu", {"shape": [0, 48]}, "layers[1].k.mu.shape[0]: must be greater than or equal to 1, not 0"),
        ("mu", {"shape": [1024, 1025]}, "layers[1].k.mu.shape[1]: must be less than or equal to 1024"),
        ("mu", {"shape": [True, 48]}, "layers[1].k.mu.shape[0]: must be a valid integer, not True"),
        ("mu", {"dtype": "float32"}, "layers[1].k.mu.dtype: must be 'float16', not 'float32'"),
        ("mu", {"data": fp16(*[1.0] * 143)}, "canonical base64 of 288 bytes, but decodes to 286"),
        ("mu", {"data": "!" * 384}, "layers[1].k.mu: data must be"),
        ("mu", {"data": "\u00e4" * 384}, "layers[1].k.mu: data must be"),
        ("mu", {"data": "=" * 384}, "layers[1].k.mu: data must be"),
        ("mu", {"data": "A" * 383 + "\n"}, "layers[1].k.mu: data must be"),
        ("mu", {"data": "A" * 382 + "=="}, "layers[1].k.mu: data must be canonical base64 of 288 bytes"),
        ("mu", {"data": "A" * 379 + "=AAAA"}, "layers[1].k.mu: data must be"),
        ("mu", {"data": "A" * 3_000_000}, "layers[1].k.mu.data: String should have at most"),
    ],
)
def test_broken_constants_are_refused(
    refusal: Refusal, document: Document, reseal: Seal, field: str, array: dict[str, Any], message: str
) -> None:
    document["layers"][1]["k"][field] |= array
    assert message in refusal(encode(reseal(document)))


def test_base64_with_stray_bits_after_the_last_byte_is_refused(
    refusal: Refusal, document: Document, reseal: Seal
) -> None:
    document["geometry"] |= {"head_dim": 16, "num_kv_heads": 1}
    document["defaults"]["k"]["group_size"] = 16
    ones = {"dtype": "float16", "shape": [1, 16], "data": fp16(*[1.0] * 16)}
    assert ones["data"].endswith("PAA8ADw=")
    document["layers"][1]["k"] |= {"mu": ones, "lambda": {**ones, "data": ones["data"][:-2] + "x="}}
    assert "layers[1].k.lambda: data must be canonical base64" in refusal(encode(reseal(document)))
