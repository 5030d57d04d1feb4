"""The files that a reader of profiles must refuse, made of valid ones; make_vectors.py writes them."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from vectors_by_layer import hashed_geometry, invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Document = dict[str, Any]
    Tensors = dict[str, tuple[str, list[int], bytes]]


def reseal(document: Document) -> Document:
    """A document with the digest that its layers have, as whoever forges a profile would; a reader refuses it."""

    def expand(side: Document, defaults: Document) -> Document:
        stated = {name: value for name, value in side.items() if value is not None}
        unsaid = (("fit", None), ("word_bits", None), ("word_bits", 32))
        shared = {name: value for name, value in defaults.items() if (name, value) not in unsaid}
        return {"bits": 16} if side["bits"] == 16 else {**shared, **stated}

    defaults = document["defaults"]
    layers = [
        {"layer": entry["layer"], **{side: expand(entry[side], defaults[side]) for side in "kv" if side in entry}}
        for entry in document["layers"]
    ]
    window = {name: document[name] for name in ("residual_length", "sinks") if document.get(name)}
    geometry = hashed_geometry(document["geometry"])
    side_file = {name: document[name] for name in ("constants_sha256",) if document.get(name)}
    content = {"layout": document["layout"], "geometry": geometry, "layers": layers, **window, **side_file}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {**document, "digest": "sha256:" + hashlib.sha256(text.encode()).hexdigest()}


def changed(base: Document, path: str, value: Any, *, sealed: bool = True) -> Document:
    """A copy with one place replaced; `...` removes it."""
    document = copy.deepcopy(base)
    node: Any = document
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        node = node[step]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return reseal(document) if sealed else document


def matrix(*rows: list[float]) -> Document:
    data = np.array(rows, dtype="<f2").tobytes()
    return {"dtype": "float16", "shape": [len(rows), len(rows[0])], "data": base64.b64encode(data).decode()}


def broken(valid: Mapping[str, bytes]) -> Iterator[tuple[str, bool, bytes]]:
    """Break rules one by one: the rule's name, whether rows or addresses depend on it, and the file.

    Args:
        valid: The valid files, by name.
    """
    names = ("example", "transforms", "per-channel", "symmetric", "fitted", "window", "three-bits", "short-words")
    base, kinds, channel, plain, fitted, window, three, short = (json.loads(valid[name]) for name in names)
    evidence, beside = (json.loads(valid[name]) for name in ("evidence", "evidence-beside-the-uniform"))
    rival = {**beside["quality"]["best_uniform"], "name": "K4V4"}
    without_fit = {side: {**shared, "fit": None} for side, shared in three["defaults"].items()}
    text = valid["example"].decode()
    ones = [1.0] * 16
    yield "byte-order-mark", False, b"\xef\xbb\xbf" + text.encode()
    yield "not-utf-8", False, text.replace("by hand", "f\u00fcr uns").encode("latin-1")
    yield "not-json", True, text[:-9].encode()
    yield "not-an-object", True, b"[" + text.encode() + b"]"
    yield "field-twice", True, text.replace('"bits": 4', '"bits": 2,\n    "bits": 4', 1).encode()
    yield "not-a-number", False, text.replace('"pp_size": 1', '"pp_size": NaN').encode()
    yield "nested-too-deep", False, text.replace('"by hand"', "[" * 16 + "]" * 16).encode()
    yield "integer-too-long", False, text.replace('"layer": 1', '"layer": 1' + "0" * 20).encode()
    yield "list-too-long", False, json.dumps({**base, "layers": [0] * 1025}).encode()
    edits: list[tuple[str, bool, Document]] = [
        ("schema-version-newer", True, changed(base, "schema_version", 3)),
        ("schema-version-without-its-fit", False, changed(base, "schema_version", 2)),
        ("fit-before-its-version", False, changed(base, "defaults.k.fit", "minmax")),
        ("fit-absent-of-one-side", False, changed(fitted, "defaults.v.fit", ...)),
        ("residual-length-before-its-version", True, changed(base, "residual_length", 32)),
        ("residual-length-too-long", True, changed(window, "residual_length", 1025)),
        ("residual-length-not-an-integer", True, changed(window, "residual_length", 32.0)),
        ("sinks-before-their-version", True, changed(base, "sinks", 4)),
        ("sinks-too-many", True, changed(window, "sinks", 65)),
        ("sinks-true", True, changed(window, "sinks", True)),
        ("three-bits-before-their-version", False, changed({**three, "schema_version": 1}, "defaults", without_fit)),
        ("three-bits-with-a-group-that-cuts-a-slot", True, changed(three, "defaults.k.group_size", 16)),
        ("three-bits-of-a-head-that-is-no-whole-unit", True, changed(three, "geometry.v_head_dim", 72)),
        ("word-bits-before-their-version", True, changed(base, "defaults.k.word_bits", 16)),
        ("word-bits-outside-the-set", True, changed(short, "defaults.v.word_bits", 8)),
        ("word-bits-not-an-integer", True, changed(short, "defaults.k.word_bits", 16.0)),
        (
            "word-bits-per-channel",
            True,
            changed(
                {**channel, "schema_version": 2},
                "defaults",
                {side: {**grid, "fit": "minmax", "word_bits": 16} for side, grid in channel["defaults"].items()},
            ),
        ),
        ("best-uniform-before-its-version", False, changed(evidence, "quality.best_uniform", rival)),
        ("larger-budgets-before-their-version", False, changed(evidence, "quality.larger_budgets", [])),
        ("best-uniform-that-is-no-baseline", False, changed(beside, "quality.best_uniform.name", "K8V4")),
        ("best-uniform-with-another-difference", False, changed(beside, "quality.measured_kl.mean", 3.0)),
        ("best-uniform-that-is-no-pair", False, changed(beside, "quality.best_uniform.name", "fp8")),
        ("fit-unknown", False, changed(fitted, "defaults.v.fit", "best")),
        (
            "fit-per-channel",
            False,
            changed(
                {**channel, "schema_version": 2},
                "defaults",
                {side: {**grid, "fit": "least_squares"} for side, grid in channel["defaults"].items()},
            ),
        ),
        ("schema-version-absent", True, changed(base, "schema_version", ...)),
        ("layout-unknown", True, changed(base, "layout", "halfword-sliced-v2")),
        ("digest-differs", True, changed(base, "layers.0.k.transform", "none", sealed=False)),
        ("digest-malformed", True, changed(base, "digest", base["digest"].upper(), sealed=False)),
        ("digest-absent", True, changed(base, "digest", ..., sealed=False)),
        ("field-unknown", True, changed(base, "layers.0.k.residual", 64)),
        ("field-unknown-on-top", False, changed(base, "comment", "none")),
        ("field-absent", True, changed(base, "geometry.v_head_dim", ...)),
        ("integer-as-float", True, changed(base, "layers.0.k.bits", 4.0)),
        ("integer-as-boolean", True, changed(base, "geometry.num_kv_heads", True)),
        ("integer-as-text", True, changed(base, "defaults.k.group_size", "16")),
        ("boolean-as-integer", False, changed(base, "defaults.k.symmetric", 0)),
        ("null-where-a-field-must-be", True, changed(base, "layers.0.k.bits", None, sealed=False)),
        ("null-transform-of-the-defaults", True, changed(base, "defaults.v.transform", None)),
        ("null-in-an-array", True, changed(base, "layers.1.k.mu.shape", None)),
        ("nullable-field-absent", False, changed(base, "model.revision", ...)),
        ("count-zero", True, changed(base, "geometry.num_kv_heads", 0)),
        ("count-too-large", True, changed(base, "geometry.head_dim", 2048)),
        ("bits-outside-the-set", True, changed(base, "layers.0.v.bits", 5)),
        ("heads-do-not-divide", True, changed(kinds, "geometry.num_attention_heads", 3)),
        ("layer-missing", True, changed(base, "layers", base["layers"][:1])),
        ("layers-out-of-order", True, changed(base, "layers", base["layers"][::-1])),
        ("layer-twice", True, changed(base, "layers.1.layer", 0)),
        ("group-does-not-divide", True, changed(base, "defaults.v.group_size", 12)),
        ("group-cuts-a-unit", True, changed(base, "defaults.k.group_size", 4)),
        ("units-not-whole", True, changed(changed(plain, "geometry.head_dim", 36), "defaults.k.group_size", 36)),
        ("native-with-transform", True, changed(base, "layers.1.v.transform", "none")),
        ("native-with-mean", True, changed(base, "layers.1.k", {"bits": 16, "mu": matrix(ones)})),
        ("transform-unknown", True, changed(base, "layers.0.k.transform", "hadamard+centered")),
        ("transform-not-for-values", True, changed(base, "defaults.v.transform", "centered")),
        ("mean-absent", True, changed(base, "layers.1.k.mu", ...)),
        ("mean-superfluous", True, changed(base, "layers.0.k.mu", matrix(ones))),
        ("lambda-absent", True, changed(kinds, "layers.2.k.lambda", ...)),
        ("lambda-zero", True, changed(kinds, "layers.2.k.lambda", matrix([0.0] * 32, [0.0] * 32))),
        ("lambda-too-large", True, changed(kinds, "layers.2.k.lambda", matrix([1.0] * 32, [64.0625] * 32))),
        ("array-of-another-shape", True, changed(base, "layers.1.k.mu", matrix([1.0] * 8, [1.0] * 8))),
        ("array-too-short", True, changed(base, "layers.1.k.mu.data", matrix([1.0] * 8)["data"])),
        ("array-not-finite", True, changed(base, "layers.1.k.mu", matrix([float("inf"), *ones[1:]]))),
        ("array-of-another-type", True, changed(base, "layers.1.k.mu.dtype", "bfloat16")),
        ("array-not-canonical", False, changed(base, "layers.1.k.mu.data", matrix(ones)["data"][:-2] + "B=")),
        ("values-per-channel", True, changed(base, "defaults.v.granularity", "per_channel")),
        ("channel-group-not-of-tokens", True, changed(channel, "defaults.k.group_size", 48)),
        ("channel-with-transform", True, changed(channel, "layers.0.k.transform", "hadamard")),
        ("bytes-differ", False, changed(base, "budget.bytes_per_token", 65)),
        ("mean-bits-differ", False, changed(base, "budget.mean_bits", 4.0)),
        ("ranks-do-not-divide", False, changed(kinds, "budget.tp_size", 3)),
        ("more-stages-than-layers", False, changed(base, "budget.pp_size", 3)),
        ("model-is-a-path", False, changed(base, "model.id", "/home/me/model")),
        ("text-not-printable", False, changed(base, "budget.asked", "4bit\u001b[2J")),
        ("text-too-long", False, changed(base, "budget.asked", "4" * 257)),
    ]
    documents = {name: json.loads(data) for name, data in valid.items()}
    for name, is_safety, document in (*edits, *invalid(documents, changed)):
        yield name, is_safety, json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n"


def safetensors(tensors: Tensors, **header: Any) -> bytes:
    """A safetensors file of tensors by name, each a dtype, a shape and bytes, and more entries of the header."""
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return with_header(json.dumps(header, separators=(",", ":")), data)


def with_header(text: str, data: bytes) -> bytes:
    """A safetensors file of a header's text, which is padded, and bytes."""
    padded = text.encode() + b" " * (-len(text.encode()) % 8)
    return len(padded).to_bytes(8, "little") + padded + data


def fp16(*rows: list[float]) -> tuple[str, list[int], bytes]:
    return "F16", [len(rows), len(rows[0])], np.array(rows, dtype="<f2").tobytes()


def broken_side_files(
    document: Document, side: bytes, inline: Document
) -> Iterator[tuple[str, bool, Document, bytes | None]]:
    """Name of the broken rule, whether rows depend on it, the profile, and the file beside it, if any.

    Args:
        document: A profile with a side file, whose layer 1 is centered and 2 centered and balanced, with 2 heads of 32.
        side: The file.
        inline: A profile with constants of its own.
    """
    size = int.from_bytes(side[:8], "little")
    header = json.loads(side[8 : 8 + size])
    data = side[8 + size :]
    tensors: Tensors = {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in header.items()
    }
    first, last = min(tensors), max(tensors)
    names = {name.rsplit(".", 1)[1]: name for name in tensors}

    def sealed(file: bytes) -> tuple[Document, bytes]:
        return changed(document, "constants_sha256", "sha256:" + hashlib.sha256(file).hexdigest()), file

    def changed_tensors(**changes: Any) -> tuple[Document, bytes]:
        kept = {**tensors, **changes}
        return sealed(safetensors({name: kept[name] for name in sorted(kept) if kept[name] is not None}))

    yield "side-file-missing", True, document, None
    yield "side-file-altered", True, document, side[:-1] + bytes([side[-1] ^ 1])
    yield "side-file-cut", True, document, side[:-2]
    yield "side-file-longer", True, document, side + b"\0"
    yield "side-file-superfluous", False, inline, side
    yield "side-file-shorter-than-its-header", True, *sealed(side[: size // 2])
    yield "side-file-with-bytes-left", True, *sealed(side + b"\0\0")
    yield "side-file-with-bytes-missing", True, *sealed(side[:-2])
    yield "side-file-header-not-json", True, *sealed(with_header("{" * 8, data))
    yield "side-file-without-tensors", True, *sealed(with_header("{}", b""))
    yield "side-file-with-metadata", False, *sealed(safetensors(tensors, __metadata__={"format": "pt"}))
    yield "side-file-out-of-order", False, *sealed(safetensors(dict(reversed(tensors.items()))))
    yield "side-file-with-spaces", False, *sealed(with_header(json.dumps(header), data))
    yield "side-file-of-an-unknown-tensor", True, *changed_tensors(**{"layers.0.v.mu": tensors[first]})
    yield "side-file-of-a-layer-without-rows", True, *changed_tensors(**{"layers.9.k.mu": tensors[first]})
    yield "side-file-of-a-tensor-too-many", True, *changed_tensors(**{"layers.0.k.mu": tensors[first]})
    yield "side-file-without-a-tensor", True, *changed_tensors(**{last: None})
    yield "side-file-of-another-type", True, *changed_tensors(**{first: ("BF16", *tensors[first][1:])})
    yield "side-file-of-another-shape", True, *changed_tensors(**{first: ("F16", [1, 64], tensors[first][2])})
    yield "side-file-of-a-vector", True, *changed_tensors(**{first: ("F16", [64], tensors[first][2])})
    yield "side-file-not-finite", True, *changed_tensors(**{names["mu"]: fp16([float("nan")] * 32, [0.0] * 32)})
    yield "side-file-lambda-too-small", True, *changed_tensors(**{names["lambda"]: fp16([0.0] * 32, [1.0] * 32)})
    overlap = {**header, last: {**header[last], "data_offsets": header[first]["data_offsets"]}}
    yield "side-file-tensors-overlap", True, *sealed(with_header(json.dumps(overlap, separators=(",", ":")), data))
    twice = json.dumps(header, separators=(",", ":"))[:-1] + f',"{first}":' + json.dumps(header[first]) + "}"
    yield "side-file-tensor-twice", True, *sealed(with_header(twice, data))
    mu = inline["layers"][1]["k"]["mu"]
    yield "constants-in-both-files", True, changed(document, "layers.1.k.mu", mu), side
    yield "constants-hash-before-its-version", True, changed(inline, "constants_sha256", "sha256:" + "0" * 64), side
    yield (
        "constants-hash-malformed",
        True,
        changed(document, "constants_sha256", document["constants_sha256"][7:]),
        side,
    )
