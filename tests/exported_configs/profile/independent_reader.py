"""Profiles and their rows, read as docs/profiles.md says and by nothing else; knows no kvtuner.

A profile takes forty lines, a row twenty more and the hash of a checkpoint twelve. Refused, with any exception, is
what rows and addresses depend on; the rest of the format is not looked at.
"""

import base64
import hashlib
import json
import zlib

import numpy as np

STEPS, COUNTS = ("centered", "balanced", "hadamard"), "num_layers num_attention_heads num_kv_heads head_dim v_head_dim"
KINDS = ("k", 3, STEPS), ("v", 4, STEPS[2:])
WINDOW = {"residual_length": 1024, "sinks": 64}
CANONICAL = {"sort_keys": True, "separators": (",", ":"), "ensure_ascii": False}


def once(pairs):
    assert len(dict(pairs)) == len(pairs), "a field stands twice"
    return dict(pairs)


def constant(node, shape):
    numbers = np.frombuffer(base64.b64decode(node["data"], validate=True), "<f2").reshape(shape).astype("f4")
    assert (node["dtype"], node["shape"]) == ("float16", shape) and np.isfinite(numbers).all(), "fp16 H x D, finite"
    return numbers


def read_side(side, defaults, heads, dim, steps):
    given = {name: value for name, value in side.items() if value is not None}
    if given == {"bits": 16} and type(given["bits"]) is int:
        return {"stored": given, "bits": 16, "transform": "none", "bytes": heads * dim * 2}
    full = {"mu": None, "lambda": None, **defaults, **given}
    bits, kind, group = full["bits"], full["transform"], full["group_size"]
    parts = [step for step in steps if step in kind.split("+")]
    assert set(side) <= {"bits", "transform", "mu", "lambda"} and kind == ("+".join(parts) or "none"), "transform"
    assert type(bits) is type(group) is int and bits in (2, 3, 4, 8) and dim * bits % 16 == 0 < group, "whole units"
    is_per_channel, unit = full["granularity"] == "per_channel" and len(steps) == 3, dim // {3: 8}.get(bits, 16 // bits)
    fits = group in (16, 32, 64, 128) and not parts if is_per_channel else dim % group == group % unit == 0
    assert fits and (is_per_channel or full["granularity"] == "per_token"), "a group that fits"
    assert [full[name] is not None for name in ("mu", "lambda")] == [step in parts for step in STEPS[:2]], "constants"
    mu, lam = (0 if full[name] is None else constant(full[name], [heads, dim]) for name in ("mu", "lambda"))
    assert np.ndim(lam) == 0 or (lam.min() >= 1 / 64 and lam.max() <= 64), "lambda within 1/64 and 64"
    size = -(-(heads * dim * bits // 8 - (-4 * heads * dim // group)) // 16) * 16
    found = {"stored": {**defaults, **given}, "bits": bits, "transform": kind, "bytes": size}
    return {**found, "group": group, "mu": mu, "lambda": lam, "shape": (heads, dim)}


def read(data):
    top = json.loads(data.decode(), object_pairs_hook=once)
    shape, layers, version = top["geometry"], top["layers"], top["schema_version"]
    defaults = {k: {name: x for name, x in top["defaults"][k].items() if (name, x) != ("fit", None)} for k in "kv"}
    window = {name: top[name] for name in WINDOW if top.get(name)}
    assert all(type(n) is int and 0 < n <= WINDOW[name] for name, n in window.items()) and (version == 2 or not window)
    counts = [shape[name] for name in COUNTS.split()]
    assert type(version) is int and version in (1, 2) and {"fit" in defaults[k] for k in "kv"} == {version == 2}, "fit"
    assert top["layout"] == "halfword-sliced-v1" and all(type(n) is int and 0 < n <= 1024 for n in counts), "geometry"
    assert [entry["layer"] for entry in layers] == list(range(counts[0])) and counts[1] % counts[2] == 0, "order, heads"
    sides = [{k: read_side(x[k], defaults[k], counts[2], counts[n], steps) for k, n, steps in KINDS} for x in layers]
    stored = [{"layer": number, **{k: side[k]["stored"] for k in "kv"}} for number, side in enumerate(sides)]
    text = json.dumps({"geometry": shape, "layers": stored, "layout": top["layout"], **window}, **CANONICAL)
    assert top["digest"] == "sha256:" + hashlib.sha256(text.encode()).hexdigest(), "digest"
    return text, top["digest"], sides


def checkpoint(files):
    tensors = {}
    for data in files:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            sample = data[start:end] if end - start <= 4096 else data[start : start + 4096] + data[end - 4096 : end]
            tensors[name] = [entry["dtype"], entry["shape"], zlib.crc32(sample)]
    text = json.dumps(tensors, **CANONICAL)
    return text, "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def rotate(x):
    n = x.shape[-1] & -x.shape[-1]
    for h in (2**step for step in range(n.bit_length() - 1)):
        a, b = np.moveaxis(x.reshape(-1, 2, h), 1, 0)
        x = np.stack((a + b, a - b), axis=1).reshape(x.shape)
    return x * np.float32(n**-0.5)


def read_row(row, side):
    (heads, dim), bits, group = side["shape"], side["bits"], side["group"]
    size = heads * dim * bits // 8
    units = np.frombuffer(row, "<u2", heads * dim // 8 if bits == 3 else size // 2).reshape(heads, 1, -1)
    if bits == 3:
        thirds = np.frombuffer(row, "u1", heads * dim // 8, heads * dim // 4).reshape(heads, -1, 2)
        units, size = units + (thirds.swapaxes(1, 2).reshape(units.shape).astype(int) << 16), size + -size % 4
    codes = (units >> np.arange(0, 24 if bits == 3 else 16, bits)[:, None] & 2**bits - 1).reshape(heads, dim)
    words = np.frombuffer(row, "<f2", 2 * heads * dim // group, size).reshape(heads, -1, 2)
    scale, minimum = np.moveaxis(words.astype("f4").repeat(group, axis=1), 2, 0)
    x = codes.astype("f4") * scale + minimum
    x = rotate(x) if "hadamard" in side["transform"] else x
    return (x if np.ndim(side["lambda"]) == 0 else x * side["lambda"]) + side["mu"]
