"""The files of exported_configs/vectors/: ``python tests/exported_configs/profile/make_vectors.py`` writes them.

Profiles that every reader of the format must accept, with what they mean, and files that it must refuse, each of
which breaks one rule. They are made by this repository's own code: an independent reader agrees in
test_profile_vectors.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

import vectors_by_layer as by_layer
from broken_profiles import broken, broken_side_files

from kvtuner.exported_configs.identity.checkpoint_hash import checkpoint_sha256
from kvtuner.exported_configs.profile.build import (
    AskedBudget,
    LayerQuantization,
    build_profile,
    dump_constants,
    dump_profile,
    place_constants,
)
from kvtuner.exported_configs.profile.constants_file import constants_name
from kvtuner.exported_configs.profile.digest import hashed_content
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.profile.records import ModelIdentity, Provenance, QualityRecord
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import ExactWindow, ScaleLayout
from kvtuner.quant import Transform
from kvtuner.row_packing import pack_rows
from kvtuner.run_folder import canonical_json
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.layer_storage import LayerRecord
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.precision import Side

    Document = dict[str, Any]

FOLDER = Path(__file__).resolve().parents[3] / "exported_configs" / "vectors"
HASH = "sha256:" + "0123456789abcdef" * 4
NETWORK = {"config_sha256": HASH, "architecture": "TinyForCausalLM", "dtype": "bfloat16"}
MODEL = {"id": "owner/model", "revision": None, **NETWORK}
LIBRARIES = {"torch": "2.13.0", "transformers": "5.0.0", "optuna": "none"}
HAND_MADE = {"kvtuner_version": "0.1.0", "calibration": None, "search": None, "libraries": LIBRARIES}
SEARCHED = {
    "kvtuner_version": "0.1.0",
    "calibration": {
        "corpus": "owner/corpus@main",
        "token_ids_sha256": {"calibrate": HASH, "select": HASH, "report": HASH},
        "num_sequences": {"calibrate": 8, "select": 4, "report": 16},
        **{"sequence_length": 512, "position_range": [0, 8191], "seed": 7, "score": "kl"},
    },
    "search": {"sampler": "nsga2", "trials": 100, "seed": 7},
    "libraries": LIBRARIES,
}
QUALITY: dict[str, Any] = {
    "metric": "kl_nats_per_token",
    "read_plan": "decode",
    "split_tokens": 4096,
    "predicted_kl": 0.0123457,
    "measured_kl": {"mean": 0.0125, "low": 0.011, "high": 0.014},
    **{"kl_p99": 0.2, "top1_agreement": 0.97, "perplexity": 12.5, "reference_perplexity": 12.25},
    "baselines": [
        {"name": "K4V4", "mean_bits": 4.0, "effective_bits": 4.25, "kl_mean": 0.05, "kl_low": 0.04, "kl_high": 0.06}
    ],
}
COMPARED_QUALITY = {
    **QUALITY,
    "baselines": [{**QUALITY["baselines"][0], "name": "K4V4 + transforms"}, *QUALITY["baselines"]],
    "best_uniform": {"name": "K4V4 + transforms", "difference": {"mean": -0.0375, "low": -0.045, "high": -0.03}},
    "larger_budgets": [
        {"mean_bits": 5.0, "effective_bits": 5.25, "predicted_kl": 0.006},
        {"mean_bits": 6.0, "effective_bits": 6.25, "predicted_kl": 0.0025},
    ],
}
# Those of schema version 1's first release: a later transform leaves published vectors as they are.
KEY_KINDS = ("none", "hadamard", "balanced", "balanced+hadamard", "centered", "centered+hadamard",
             "centered+balanced", "centered+balanced+hadamard")  # fmt: skip


WITH_ROWS = ("transforms", "symmetric", "fitted", "three-bits", "short-words", "short-words-of-keys", "groups",
             "unequal-head-dims")  # fmt: skip
WITH_SPECIAL_ROWS = ("symmetric", "fitted", "three-bits", "short-words")


def ramp(heads: int, head_dim: int, scale: float = 1.0) -> torch.Tensor:
    """Numbers of both signs and many sizes, the same on every machine: multiples of 1/64 within 8 times `scale`."""
    numbers = np.arange(heads * head_dim, dtype=np.int64)
    return torch.from_numpy((((numbers * 389 + 57) % 1024 - 512) / 64 * scale).astype(np.float32).reshape(heads, -1))


def transform(kind_name: str, heads: int, head_dim: int) -> Transform:
    """A transform by its name: mu is a ramp, lambda runs through the allowed powers of two and what lies between."""
    kind = TransformKind.parse(kind_name)
    mu = ramp(heads, head_dim, 0.125).to(torch.float16)
    steps = torch.from_numpy((np.arange(heads * head_dim) * 5 % 13 - 6).astype(np.float32)).reshape(heads, -1)
    lam = torch.exp2(steps).to(torch.float16)
    lam[:, 1::2] = torch.where(lam[:, 1::2] < 64, lam[:, 1::2] * 1.25, lam[:, 1::2])
    return Transform(kind, mu if kind.centered else None, lam if kind.balanced else None)


def make(geometry: ModelGeometry, layers: list[LayerQuantization], **changes: Any) -> Profile:
    """A profile of hand-written layers; `changes` are arguments of `build_profile`."""
    arguments: dict[str, Any] = {
        "symmetric": False,
        "model": ModelIdentity.model_validate(MODEL),
        "budget": AskedBudget("by hand"),
        "quality": None,
        "provenance": Provenance.model_validate(HAND_MADE),
    }
    return build_profile(geometry=geometry, layers=layers, **{**arguments, **changes})


def example() -> Profile:
    """The worked example of docs/profiles.md."""
    layers = [
        LayerQuantization(4, 4, transform("hadamard", 1, 16)),
        LayerQuantization(8, 16, transform("centered", 1, 16)),
    ]
    return make(ModelGeometry(2, 2, 1, 16, 16), layers)


def profiles() -> dict[str, Profile]:
    """The valid ones, by name."""
    small, wide = ModelGeometry(2, 4, 2, 32, 32), ModelGeometry(3, 6, 3, 48, 32)
    rotated = transform("hadamard", 2, 32)
    kinds = [LayerQuantization(4, 2, transform(name, 2, 32), rotated if n % 2 else Transform()) for n, name in
             enumerate(KEY_KINDS)]  # fmt: skip
    unequal = [LayerQuantization(4, 2, transform(name, 3, 48), transform("hadamard", 3, 32)) for name in
               ("hadamard", "balanced+hadamard", "centered+balanced+hadamard")]  # fmt: skip
    hashes = {"rope_sha256": HASH, "tokenizer_sha256": HASH, "checkpoint_sha256": HASH}
    named = {**MODEL, **hashes, "id": "modèle-日本語", "weight_quantization": "awq", "max_positions": 32768}
    return {
        "example": example(),
        "uniform": make(small, [LayerQuantization(4, 4)] * 2),
        "mixed": make(
            ModelGeometry(5, 4, 2, 32, 32),
            [
                LayerQuantization(8, 4),
                LayerQuantization(2, 8),
                LayerQuantization(16, 2),
                LayerQuantization(4, 16),
                LayerQuantization(16, 16),
            ],
        ),
        "transforms": make(ModelGeometry(8, 4, 2, 32, 32), kinds),
        "symmetric": make(small, [LayerQuantization(8, 4), LayerQuantization(2, 2, rotated, rotated)], symmetric=True),
        "fitted": make(
            ModelGeometry(2, 2, 1, 64, 64),
            [LayerQuantization(4, 2), LayerQuantization(2, 4, transform("hadamard", 1, 64))],
            fit="least_squares",
        ),
        "window": make(small, [LayerQuantization(4, 2), LayerQuantization(16, 4)], window=ExactWindow(32, 4)),
        "three-bits": make(
            ModelGeometry(3, 3, 3, 80, 48),
            [
                LayerQuantization(3, 3),
                LayerQuantization(3, 4, transform("centered+hadamard", 3, 80)),
                LayerQuantization(16, 3, Transform(), transform("hadamard", 3, 48)),
            ],
            k_layout=ScaleLayout(40),
            v_layout=ScaleLayout(12),
        ),
        "short-words": make(
            ModelGeometry(4, 3, 3, 80, 48),
            [
                LayerQuantization(2, 4, transform("centered+hadamard", 3, 80)),
                LayerQuantization(3, 3),
                LayerQuantization(4, 2, transform("hadamard", 3, 80)),
                LayerQuantization(8, 16),
            ],
            k_layout=ScaleLayout(40, word_bits=16),
            v_layout=ScaleLayout(48, word_bits=16),
            fit="least_squares",
        ),
        "short-words-of-keys": make(
            small,
            [LayerQuantization(4, 2), LayerQuantization(2, 4)],
            k_layout=ScaleLayout(16, word_bits=16),
            symmetric=True,
        ),
        "groups": make(
            ModelGeometry(2, 8, 2, 64, 64),
            [LayerQuantization(4, 2), LayerQuantization(2, 4)],
            k_layout=ScaleLayout(16),
            v_layout=ScaleLayout(32),
        ),
        "native": make(small, [LayerQuantization(16, 16)] * 2),
        "unequal-head-dims": make(wide, unequal, k_layout=ScaleLayout(24), v_layout=ScaleLayout(16)),
        "shared-layers": make(
            ModelGeometry(4, 8, 2, 32, 32, 2),
            [LayerQuantization(4, 4)] * 4,
            budget=AskedBudget("4bit", tp_size=4, pp_size=3),
        ),
        "per-channel": make(
            small,
            [LayerQuantization(2, 2), LayerQuantization(16, 4)],
            k_layout=ScaleLayout(32, granularity="per_channel"),
        ),
        "names": make(
            small,
            [LayerQuantization(4, 4)] * 2,
            model=ModelIdentity.model_validate(named),
            budget=AskedBudget('4bit \u2264 \U0001f600 [{"\\'),
        ),
        "evidence": make(
            small,
            [LayerQuantization(4, 4)] * 2,
            quality=QualityRecord.model_validate(QUALITY),
            provenance=Provenance.model_validate({**SEARCHED, "command": "kvtuner search --model owner/model"}),
        ),
        "evidence-beside-the-uniform": make(
            small,
            [LayerQuantization(4, 4), LayerQuantization(8, 2)],
            fit="least_squares",
            quality=QualityRecord.model_validate(COMPARED_QUALITY),
            provenance=Provenance.model_validate(SEARCHED),
        ),
        **by_layer.profiles(make, transform),
    }


def shuffled(profile: Profile) -> bytes:
    """A profile as somebody else might write it: fields in another order, spaces, escapes, absent options."""
    document = json.loads(dump_profile(profile))

    def turned(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: turned(node[name]) for name in sorted(node, reverse=True)}
        return [turned(item) for item in node] if isinstance(node, list) else node

    document["layers"][0]["v"]["transform"] = None
    document["layers"][1]["k"].update({"mu": None, "lambda": None})
    return (
        json.dumps(turned(document), indent="\t", separators=(" ,", " : ")).replace("K", "\\u004b").encode() + b"\r\n"
    )


def with_nulls(profile: Profile) -> bytes:
    """A copy of a profile with a null in every place of a field that may be absent."""
    document = json.loads(dump_profile(profile))
    optional = ("rope_sha256", "tokenizer_sha256", "checkpoint_sha256", "weight_quantization", "max_positions")
    document["model"] = {**dict.fromkeys(optional), **document["model"]}
    document["provenance"] = {"command": None, **document["provenance"]}
    if document["quality"] is not None:
        document["quality"] = {"best_uniform": None, "larger_budgets": None, **document["quality"]}
    document |= {"residual_length": None, "sinks": None, "constants_sha256": None}
    document["defaults"] = {
        side: {"fit": None, "word_bits": None, **shared} for side, shared in document["defaults"].items()
    }
    unsaid = dict.fromkeys(("kind", "rope_dim", "index_dim", "exceptions"))
    document["geometry"] = {**unsaid, **document["geometry"]}
    for exception in document["geometry"]["exceptions"] or ():
        exception |= {name: exception.get(name) for name in ("kind", *by_layer.COUNTS)}
    for layer in document["layers"]:
        layer["k"] = {"transform": None, "group_size": None, "mu": None, "lambda": None, **layer["k"]}
        layer["v"] = {"transform": None, "group_size": None, **layer["v"]} if "v" in layer else None
    return json.dumps(document, indent=1).encode() + b"\n"


def checkpoint() -> bytes:
    """A safetensors file with tensors of several types, one empty, in an order that is not that of their names."""
    header, data = dict[str, Any](__metadata__={"format": "pt"}), b""
    for name, dtype, shape, size in (
        ("model.norm.weight", "BF16", [9], 18),
        ("lm_head.weight", "F32", [4, 8], 128),
        ("model.größe", "F16", [], 2),
        ("model.empty", "I64", [0, 3], 0),
    ):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
        data += bytes((7 * number + len(name)) % 256 for number in range(size))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def fraction(value: Any) -> str:
    return f"{value.numerator}/{value.denominator}"


def expectation(profile: Profile) -> Document:
    """What a reader must find."""
    owners = profile.geometry.owners()

    def size(layer: LayerRecord, side: Side, bits: int) -> int:
        shape = profile.defaults.layer_shape(owners[layer.layer], layer)
        return shape.k_bytes(bits) if side == "k" else shape.v_bytes(bits)

    return {
        "canonical": canonical_json(
            hashed_content(
                *(profile.layout, profile.geometry, profile.defaults, profile.layers),
                *(profile.window, profile.constants_sha256),
            )
        ),
        "digest": profile.digest,
        "layers": [
            {
                side: {
                    "bits": record.bits,
                    "transform": profile.transform_name(layer.layer, side),
                    "bytes": size(layer, side, record.bits),
                }
                for side, record, _ in layer.sides(profile.defaults)
            }
            for layer in profile.layers
        ],
        "bytes_per_token": profile.bytes_per_token(),
        "mean_bits": fraction(profile.mean_bits),
        "effective_bits": fraction(profile.effective_bits),
    }


def row(profile: Profile, layer: int, side: Side, x: torch.Tensor) -> Document:
    """A token's row and what it reads back as, in model space."""
    spec = profile.quant_spec(layer, side)
    assert spec is not None
    quantized = spec.quantize(x)
    return {
        "layer": layer,
        "side": side,
        "input": numbers_of(x),
        "row": bytes(pack_rows(quantized).tolist()).hex(),
        "output": numbers_of(spec.transform.invert(quantized.dequantize())),
    }


def numbers_of(x: torch.Tensor) -> list[list[float | None]]:
    """The numbers of each head; JSON has no NaN, for which null stands."""
    return [[None if number != number else number for number in head] for head in x.tolist()]


def special(heads: int, head_dim: int) -> list[torch.Tensor]:
    """Tokens whose groups are negative zeros, subnormal, or hold NaN, each beside a head of usual numbers if any."""
    tokens = [torch.full((heads, head_dim), -0.0), ramp(heads, head_dim, 2.0**-140), ramp(heads, head_dim)]
    tokens[2][0, 0] = torch.nan
    for token in tokens[:2]:
        token[1:] = ramp(heads, head_dim)[1:]
    return tokens


def rows(name: str, profile: Profile) -> list[Document]:
    """Rows of the vectors that have some."""
    dims = [(layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in profile.geometry.owners().values()]
    if name == "example":
        quarters = torch.arange(16, dtype=torch.float32).reshape(1, 16) / 4 - 1
        sides: list[tuple[int, Side]] = [(0, "k"), (0, "v"), (1, "k")]
        return [row(profile, layer, side, quarters) for layer, side in sides]
    if name in WITH_ROWS or name in by_layer.NAMES:
        places = [
            (entry.layer, side, heads, k_dim if side == "k" else v_dim)
            for entry, (heads, k_dim, v_dim) in zip(profile.layers, dims, strict=True)
            for side, record, _ in entry.sides(profile.defaults)
            if record.bits != 16
        ]
        tokens = [(place, ramp(*place[2:], 0.3125)) for place in places]
        if name in WITH_SPECIAL_ROWS:
            tokens += [(place, token) for place in places for token in special(*place[2:])]
        return [row(profile, layer, side, token) for (layer, side, *_), token in tokens]
    return []


def files() -> dict[str, bytes]:
    """Every file by its name below the folder."""
    profiles_by_name = profiles()
    valid = {name: dump_profile(profile) for name, profile in profiles_by_name.items()}
    files = {f"valid/{name}.json": data for name, data in valid.items()}
    with_side_file = place_constants(profiles_by_name["transforms"], "file")
    side_file = dump_constants(with_side_file)
    assert side_file is not None
    files["valid/side-file.json"] = dump_profile(with_side_file)
    files[constants_name("valid/side-file.json")] = side_file
    files["valid/order-and-space.json"] = shuffled(profiles_by_name["mixed"])
    files["valid/nulls.json"] = with_nulls(profiles_by_name["transforms"])
    files["valid/nulls-of-evidence.json"] = with_nulls(profiles_by_name["evidence"])
    files["valid/nulls-by-layer.json"] = with_nulls(profiles_by_name["latents"])
    expected: Document = {"valid": {}, "invalid": {}}
    for path in sorted(path for path in files if path.endswith(".json")):
        side_path = constants_name(path)
        name, profile = Path(path).stem, load_profile(files[path], read_constants=lambda side=side_path: files[side])
        expected["valid"][name] = {**expectation(profile), "rows": rows(name, profile)}
    for name, is_safety, data in broken(valid):
        files[f"invalid/{name}.json"] = data
        expected["invalid"][name] = {"rule": name.replace("-", " "), "safety": is_safety}
    documents = [json.loads(files[f"valid/{name}.json"]) for name in ("side-file", "example")]
    for name, is_safety, document, side in broken_side_files(documents[0], side_file, documents[1]):
        path = f"invalid/{name}.json"
        files[path] = json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n"
        if side is not None:
            files[constants_name(path)] = side
        expected["invalid"][name] = {"rule": name.replace("-", " "), "safety": is_safety}
    name = "checkpoint/model.safetensors"
    files[name] = checkpoint()
    with TemporaryDirectory() as folder:
        Path(folder, "model.safetensors").write_bytes(files[name])
        expected["checkpoint"] = {name: {"checkpoint_sha256": checkpoint_sha256(Path(folder))}}
    parts = [
        f'"{part}": {{\n' + ",\n".join(f'"{name}": {json.dumps(facts)}' for name, facts in entries.items()) + "\n}"
        for part, entries in expected.items()
    ]
    files["expected.json"] = ("{\n" + ",\n".join(parts) + "\n}\n").encode()
    return files


def main() -> None:
    """Write them."""
    for path, data in files().items():
        target = FOLDER / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    sys.stdout.write(f"{len(files())} files in {FOLDER.name}\n")


if __name__ == "__main__":
    main()
