"""NVIDIA ModelOpt's map of layers, schema version 1, as it stands in ``hf_quant_config.json`` or ``config.json``."""

import json
import re
from typing import Any, Final

from kvtuner import __version__
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats.conversion import NATIVE, Exported, Imported, ImportOptions, LostFeature, Storage
from kvtuner.exported_configs.formats.foreign_file import read_json
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair

MODELOPT_VERSION: Final = 1
INT8: Final = PrecisionPair(8, 8)
MIXED: Final = "MIXED_PRECISION"

_ALGO, _LAYERS, _VERSION = "kv_cache_quant_algo", "kv_cache_quantized_layers", "kv_cache_schema_version"
_MODULE: Final = re.compile(r"(.*\.)?layers\.(\d{1,4})\.(self_attn|attn|attention|mixer)", re.ASCII)
_MAX_NAME: Final = 256
_INT8_NOTE: Final = (
    "ModelOpt's INT8 has one calibrated scale per tensor; here scales are made while serving, per token and head"
)


def read(data: bytes, geometry: ModelGeometry, options: ImportOptions) -> Imported:
    """Read ModelOpt's map; layers that it does not name are not quantized."""
    algorithms = _algorithms(_section(read_json(data)), geometry)
    pairs = {layer: options.words.get(name.upper()) for layer, name in algorithms.items()}
    kept = sorted(layer for layer, pair in pairs.items() if pair is None)
    for layer in kept:
        if algorithms[layer] != "INT8":
            raise ProfileError(
                f"layer {layer} is {algorithms[layer][:40]!a}, and a profile holds integers; to store integers in its"
                " place say so, such as --map FP8=8,NVFP4=4"
            )
    symmetric = _is_symmetric(kept, pairs, options)
    notes = (_INT8_NOTE,) * bool(kept)
    if kept and not symmetric:
        notes += ("ModelOpt's INT8 is symmetric; here it is asymmetric",)
    notes += options.map_notes(algorithms.values())
    stored = {layer: pair or INT8 for layer, pair in pairs.items()}
    return Imported(stored, options.storage(geometry, symmetric=symmetric), notes)


def write(profile: Profile) -> Exported:
    """Write ``hf_quant_config.json``, which has 8-bit symmetric layers and unquantized ones."""
    lost = [
        LostFeature(layer, f"{pair} is neither INT8 nor unquantized")
        for layer, pair in enumerate(profile.pairs)
        if pair not in (INT8, NATIVE)
    ]
    lost += Storage.of_heads(profile.to_geometry(), symmetric=True).lost_features(profile)
    layers = [layer for layer, pair in enumerate(profile.pairs) if pair == INT8]
    is_whole = len(layers) == len(profile.pairs)
    document = {
        "producer": {"name": "kvtuner", "version": __version__},
        "quantization": {
            "quant_algo": None,
            _ALGO: "INT8" if is_whole else MIXED if layers else None,
            _LAYERS: {f"model.layers.{layer}.self_attn": {"quant_algo": "INT8"} for layer in layers},
            _VERSION: MODELOPT_VERSION,
        },
    }
    return Exported(json.dumps(document, indent=1) + "\n", (_INT8_NOTE,) * bool(layers), tuple(sorted(lost)))


def _is_symmetric(kept: list[int], pairs: dict[int, PrecisionPair | None], options: ImportOptions) -> bool:
    """Whether grids lie around zero: INT8's do, those of mapped layers as the user says, and a profile has one kind."""
    mapped = sorted(layer for layer, pair in pairs.items() if pair not in (None, NATIVE))
    if not kept or not mapped:
        if kept and options.symmetric is False:
            raise ProfileError(f"layer {kept[0]}: INT8 is symmetric; leave --asymmetric out, or say --map INT8=8")
        return bool(kept) or bool(options.symmetric)
    if options.symmetric is None:
        raise ProfileError(
            f"layer {kept[0]} is INT8, which is symmetric, layer {mapped[0]} is what --map says, and a profile has one"
            " kind of grid for both; say --symmetric or --asymmetric"
        )
    return options.symmetric


def _section(document: Any) -> dict[str, Any]:
    """The one object that speaks of the KV cache."""
    if not isinstance(document, dict):
        raise ProfileError("must be a JSON object; give hf_quant_config.json or config.json")
    places = [document, *(document.get(name) for name in ("quantization", "quantization_config"))]
    sections = [place for place in places if isinstance(place, dict) and {_ALGO, _LAYERS, _VERSION} & set(place)]
    if len(sections) != 1:
        what = "no" if not sections else "more than one"
        raise ProfileError(f"has {what} {_ALGO} or {_LAYERS}; give ModelOpt's hf_quant_config.json or config.json")
    return sections[0]


def _algorithms(section: dict[str, Any], geometry: ModelGeometry) -> dict[int, str]:
    algorithm, layers = section.get(_ALGO), section.get(_LAYERS)
    if algorithm is not None and not isinstance(algorithm, str):
        raise ProfileError(f"{_ALGO} must be a name, not {type(algorithm).__name__}")
    version = section.get(_VERSION)
    is_known = type(version) is int and version == MODELOPT_VERSION
    if not is_known and (layers is not None or version is not None):
        raise ProfileError(f"{_VERSION} must be {MODELOPT_VERSION}, not {str(version)[:20]!a}; upgrade kvtuner")
    if layers is not None:
        named = _named_layers(layers)
        _check_agreement(algorithm, named)
        return named
    if algorithm is None:
        raise ProfileError(f"{_ALGO} is null and there is no {_LAYERS}: its KV cache is not quantized")
    if algorithm == MIXED:
        raise ProfileError(f"{_ALGO} is {MIXED}, but {_LAYERS} is missing; export the checkpoint again")
    return dict.fromkeys(range(geometry.num_layers), algorithm)


def _named_layers(layers: Any) -> dict[int, str]:
    if not isinstance(layers, dict):
        raise ProfileError(f"{_LAYERS} must be an object, not {type(layers).__name__}")
    algorithms: dict[int, str] = {}
    prefixes = set()
    for name, entry in layers.items():
        match = _MODULE.fullmatch(name) if len(name) <= _MAX_NAME else None
        if match is None:
            raise ProfileError(f"{_LAYERS}: {name[:80]!a} is no attention module like model.layers.0.self_attn")
        layer = int(match[2])
        prefixes.add(match[1])
        if layer in algorithms or len(prefixes) > 1:
            raise ProfileError(f"{_LAYERS}: {name!a} is a second module of layer {layer}, or of another model")
        if not isinstance(entry, dict) or set(entry) != {"quant_algo"}:
            raise ProfileError(f"{_LAYERS}: {name!a} must have quant_algo and nothing else")
        algorithm = entry["quant_algo"]
        if not isinstance(algorithm, str):
            raise ProfileError(f"{_LAYERS}: quant_algo of {name!a} must be a name, not {type(algorithm).__name__}")
        algorithms[layer] = algorithm
    return algorithms


def _check_agreement(algorithm: str | None, algorithms: dict[int, str]) -> None:
    names = set(algorithms.values())
    if algorithm == MIXED or names == {algorithm} or (algorithm is None and not names):
        return
    stated = "null" if algorithm is None else ascii(algorithm[:40])
    named = ", ".join(sorted(ascii(name[:40]) for name in names)[:3]) or "no layer"
    raise ProfileError(f"{_ALGO} is {stated}, but {_LAYERS} has {named}; export the checkpoint again")
