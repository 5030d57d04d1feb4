"""Dtypes of layers as SGLang #17530 and TensorRT-LLM #13695 propose them: ``0-1:bf16,62-63:bf16``, or the same in YAML.

The layers and ranges are `layer_ranges`'; what the words mean is read here.
"""

import re
from typing import Any, Final

from kvtuner.errors import PrecisionError, ProfileError
from kvtuner.exported_configs.formats.conversion import (
    Exported,
    Imported,
    ImportOptions,
    Storage,
    refusal,
    uneven_layers,
)
from kvtuner.exported_configs.formats.foreign_file import read_text, read_yaml
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.geometry import ModelGeometry
from kvtuner.layer_ranges import precisions_by_layer, read_layers, read_ranges, write_ranges
from kvtuner.precision import PrecisionPair

FIELD: Final = "kv_cache_per_layer_dtype"
WORDS: Final = {2: "int2", 4: "int4", 8: "int8", 16: "bf16"}
_BITS: Final = {word: bits for bits, word in WORDS.items()}
_MAX_WORD: Final = 40
_MISSING_ADVICE: Final = "give the dtype of such layers, SGLang's --kv-cache-dtype, as --default-dtype"
_FLOATS: Final = re.compile(r"(fp8|fp4|nvfp4|mxfp|float8|float4).*", re.IGNORECASE | re.DOTALL)


def read(data: bytes, geometry: ModelGeometry, options: ImportOptions) -> Imported:
    """Read the text, or the YAML file."""
    words, default = _words(data), options.default_word
    pairs = {layer: _pair(f"layer {layer}", word, options) for layer, word in words.items()}
    rest = None if default is None else _pair("--default-dtype", default, options)
    notes = options.map_notes([*words.values(), *filter(None, [default])])
    if default is not None and len(pairs) == geometry.num_layers:
        notes = ("--default-dtype was not needed: every layer is named", *notes)
    storage = options.storage(geometry, symmetric=bool(options.symmetric))
    return Imported(pairs, storage, notes, rest, missing_advice=_MISSING_ADVICE)


def write(profile: Profile) -> Exported:
    """Write the text, neighbours that are alike as one range."""
    if uneven := uneven_layers(profile):
        raise refusal("ranges", uneven)
    lost = Storage.of_heads(profile.to_geometry()).lost_features(profile)
    return Exported(write_ranges([WORDS[pair.k_bits] for pair in profile.pairs]) + "\n", lost=tuple(lost))


def _words(data: bytes) -> dict[int, str]:
    text = read_text(data)
    try:
        if text.strip()[:1].isdigit() and "\n" not in text.strip():
            return precisions_by_layer(read_ranges(text.strip()))
        return _of_yaml(read_yaml(text))
    except PrecisionError as error:
        raise ProfileError(str(error)) from error


def _of_yaml(document: Any) -> dict[int, str]:
    if not isinstance(document, dict) or set(document) != {FIELD}:
        raise ProfileError(f"must be ranges like 0-1:bf16,2-27:int8, or YAML with {FIELD} and nothing else")
    layers = document[FIELD]
    if isinstance(layers, str):
        return precisions_by_layer(read_ranges(layers))
    if not isinstance(layers, dict):
        raise ProfileError(f"{FIELD} must map layers to dtypes, or be ranges in quotes, not {type(layers).__name__}")
    for layer, word in layers.items():
        if type(layer) not in (int, str) or type(word) not in (int, str):
            raise ProfileError(f"{FIELD} maps layers to dtypes, such as 0: bf16, not {str(layer)[:20]!a}")
    return precisions_by_layer(read_layers(str(layer), str(word)) for layer, word in layers.items())


def _pair(place: str, word: str, options: ImportOptions) -> PrecisionPair:
    if len(word) > _MAX_WORD:
        raise ProfileError(f"{place}: a dtype has at most {_MAX_WORD} letters, not {len(word)}; this is none")
    if word.upper() in options.words:
        return options.words[word.upper()]
    if _FLOATS.fullmatch(word):
        raise ProfileError(
            f"{place} is {word!a}, and a profile holds integers; to store integers in its place say so, such as"
            f" --map {word}=8"
        )
    bits = _BITS.get(word.lower())
    try:
        return PrecisionPair.parse(word) if bits is None else PrecisionPair(bits, bits)
    except PrecisionError as error:
        raise ProfileError(f"{place}: {error}, nor one of {', '.join(_BITS)}") from error
