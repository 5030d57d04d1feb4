"""Profiles and their rows, read as docs/profiles.md and format.md say and by nothing else; knows no kvtuner.

A profile takes forty lines, geometry by layer forty-eight more, a side file twenty-five, a row twenty-five and the hash
of a checkpoint twelve. Refused, with any exception, is what rows and addresses depend on; the rest of the format is not
looked at.
"""

import base64
import hashlib
import json
import re
import zlib

import numpy as np

STEPS = ("centered", "balanced", "hadamard")
COUNTS = ["num_attention_heads", "num_kv_heads", "head_dim", "v_head_dim", "rope_dim", "index_dim"]
BESIDE = {"kind": "full", "rope_dim": 0, "index_dim": 0}
SIDE = {"bits", "transform", "group_size", "mu", "lambda"}
KINDS = ("k", 2, STEPS), ("v", 3, STEPS[2:])
LAYER_KIND = re.compile("(full|latent|none)|(window|shared):(0|[1-9][0-9]{0,9})")
WINDOW = {"residual_length": 1024, "sinks": 64}
UNSAID = ("fit", None), ("word_bits", None), ("word_bits", 32)
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
    full = {"mu": None, "lambda": None, "word_bits": 32, **defaults, **given}
    bits, kind, group, word = (full[name] for name in ("bits", "transform", "group_size", "word_bits"))
    parts = [step for step in steps if step in kind.split("+")]
    assert set(side) <= SIDE and kind == ("+".join(parts) or "none"), "transform"
    assert type(bits) is type(group) is int and bits in (2, 3, 4, 8) and dim * bits % 16 == 0 < group, "whole units"
    is_per_channel, unit = full["granularity"] == "per_channel" and len(steps) == 3, dim // {3: 8}.get(bits, 16 // bits)
    fits = group in (16, 32, 64, 128) and not parts if is_per_channel else dim % group == group % unit == 0
    assert fits and full["granularity"] == ("per_channel" if is_per_channel and word == 32 else "per_token"), "group"
    assert [full[name] is not None for name in ("mu", "lambda")] == [step in parts for step in STEPS[:2]], "constants"
    mu, lam = (0 if full[name] is None else constant(full[name], [heads, dim]) for name in ("mu", "lambda"))
    assert np.ndim(lam) == 0 or (lam.min() >= 1 / 64 and lam.max() <= 64), "lambda within 1/64 and 64"
    size = -(-(heads * dim * bits // 8 - (-(word := 4 if bits == 8 else word // 8) * heads * dim // group)) // 16) * 16
    found = {"stored": {**defaults, **given}, "bits": bits, "transform": kind, "bytes": size, "word": word}
    return {**found, "group": group, "mu": mu, "lambda": lam, "shape": (heads, dim)}


def read_layer(entry, counts, defaults):
    given = {name: x for name, x in entry.items() if x is not None}
    own_groups = [given[k].get("group_size") for k in "kv" if k in given]
    assert set(given) == ({"layer", "k", "v"} if counts[3] else {"layer", "k"}), "sides"
    assert "fit" in defaults["k"] or own_groups == [None, None], "groups of a side's own"
    assert defaults["k"]["granularity"] == "per_token" or own_groups[0] is None, "of channels"
    return {k: read_side(given[k], defaults[k], counts[1], counts[n], steps) for k, n, steps in KINDS if counts[n]}


def check_counts(layer, earlier):
    """The counts of a layer that stores rows, else None."""
    match, counts = LAYER_KIND.fullmatch(layer["kind"]), [layer.get(name, 0) for name in COUNTS]
    kind, number = match[1] or match[2], int(match[3] or 0)
    assert kind != "window" or 0 < number < 2**31, "a window of some tokens"
    assert kind != "shared" or number in earlier, "an earlier layer with rows"
    if kind in ("none", "shared"):
        assert set(layer) == {"kind"}, "nothing stored"
        return None
    assert {*layer, "index_dim"} == {"kind", *COUNTS} and all(type(n) is int and 0 <= n <= 1024 for n in counts), "size"
    queries, heads, _, v_dim, *beside = counts
    assert all(counts[:3]) and queries % heads == 0, "heads"
    assert (heads == 1 and v_dim == 0) if kind == "latent" else (v_dim > 0 == sum(beside)), "a latent, or both sides"
    return counts


def read_geometry(shape, version):
    shape = {name: x for name, x in shape.items() if x is not None}
    exceptions, usual = shape.pop("exceptions", []), {**BESIDE, **shape}
    own, shared = usual.pop("num_layers"), usual.pop("num_shared_layers")
    assert all(type(n) is int and 0 <= n <= 1024 for n in (own, shared)), "counts"
    check_counts(usual, ())
    changed = {}
    for entry in exceptions:
        change = {name: x for name, x in entry.items() if name != "layers" and x is not None}
        assert change and all(usual[name] != x for name, x in change.items()), "fields that differ"
        assert entry["layers"] == sorted({*entry["layers"]} - {*changed}) != [], "ascending, none twice"
        has_rows = change.get("kind", "full").split(":")[0] not in ("none", "shared")
        changed |= dict.fromkeys(entry["layers"], {**usual, **change} if has_rows else change)
    names = [layer["kind"].split(":")[0] for layer in changed.values()]
    total = own + names.count("none") + names.count("shared")
    assert all(type(number) is int and 0 <= number < total for number in changed), "layers of the model"
    layers, owners = [], {}
    for number in range(total):
        layer = {name: x for name, x in changed.get(number, usual).items() if (name, x) != ("index_dim", 0)}
        layers.append(layer)
        counts = check_counts(layer, owners)
        owners |= {number: counts} if counts else {}
    assert len(owners) == own > 0 and (version == 2 or not ({*BESIDE} & {*shape} or exceptions))
    if exceptions or usual["kind"] != "full":
        assert names.count("shared") == shared, "shared layers are named"
        return {"layers": layers}, owners
    return {name: x for name, x in shape.items() if name not in BESIDE}, owners


def read_side_file(data, top):
    if top.get("constants_sha256") is None:
        return {}
    assert top["schema_version"] == 2, "a side file of version 2"
    assert top["constants_sha256"] == "sha256:" + hashlib.sha256(data).hexdigest(), "the side file"
    size, keys, end = int.from_bytes(data[:8], "little"), {entry["layer"]: entry["k"] for entry in top["layers"]}, 0
    content = data[8 + size :]
    assert not any(k.get(name) is not None for k in keys.values() for name in ("mu", "lambda")), "one place"
    for name, entry in json.loads(data[8 : 8 + size], object_pairs_hook=once).items():
        match, shape = re.fullmatch("layers[.](0|[1-9][0-9]*)[.]k[.](mu|lambda)", name), entry["shape"]
        start, end = end, end + 2 * shape[0] * shape[1]
        assert (entry["dtype"], entry["data_offsets"], len(shape)) == ("F16", [start, end], 2), "one after the other"
        text = base64.b64encode(content[start:end]).decode()
        keys[int(match[1])][match[2]] = {"dtype": "float16", "shape": shape, "data": text}
    assert end == len(content) > 0, "nothing else"
    return {"constants_sha256": top["constants_sha256"]}


def hashed(number, sides, extra):
    elsewhere = ("mu", "lambda") if extra else ()
    stored = {k: {name: x for name, x in side["stored"].items() if name not in elsewhere} for k, side in sides.items()}
    return {"layer": number, **stored}


def read(data, side_file=None):
    top = json.loads(data.decode(), object_pairs_hook=once)
    layers, version, extra = top["layers"], top["schema_version"], read_side_file(side_file, top)
    geometry, owners = read_geometry(top["geometry"], version)
    defaults = {k: {name: x for name, x in top["defaults"][k].items() if (name, x) not in UNSAID} for k in "kv"}
    window = {name: top[name] for name in WINDOW if top.get(name)}
    assert all(type(n) is int and 0 < n <= WINDOW[name] for name, n in window.items()) and (version == 2 or not window)
    assert all(repr(top["defaults"][k].get("word_bits")) in ("None", "16", "32")[: 2 * version - 1] for k in "kv")
    assert type(version) is int and version in (1, 2) and {"fit" in defaults[k] for k in "kv"} == {version == 2}, "fit"
    assert top["layout"] == "halfword-sliced-v1" and [entry["layer"] for entry in layers] == list(owners), "order"
    sides = [read_layer(entry, owners[entry["layer"]], defaults) for entry in layers]
    stored = [hashed(number, side, extra) for number, side in zip(owners, sides, strict=True)]
    text = json.dumps({"geometry": geometry, "layers": stored, "layout": top["layout"], **window, **extra}, **CANONICAL)
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
        units, size = (
            units + (thirds.swapaxes(1, 2).reshape(units.shape).astype(int) << 16),
            size + -size % side["word"],
        )
    codes = (units >> np.arange(0, 24 if bits == 3 else 16, bits)[:, None] & 2**bits - 1).reshape(heads, dim)
    if side["word"] == 4:
        words = np.frombuffer(row, "<f2", 2 * heads * dim // group, size).reshape(heads, -1, 2).astype("f4")
    else:
        short = np.frombuffer(row, "<u2", heads * dim // group, size).reshape(heads, -1)
        scale = (short >> 5 << 4).view("<f2").astype("f4")
        words = np.stack((scale, (short & 31) * np.float32(-(2.0 ** (bits - 5))) * scale), axis=2)
    scale, minimum = np.moveaxis(words.repeat(group, axis=1), 2, 0)
    x = codes.astype("f4") * scale + minimum
    x = rotate(x) if "hadamard" in side["transform"] else x
    return (x if np.ndim(side["lambda"]) == 0 else x * side["lambda"]) + side["mu"]
