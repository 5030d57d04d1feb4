"""The paper's presets, ``{layer: {nbits_key, nbits_value}}``; their scheme stands in the file's name alone."""

import re
from typing import Any, Final

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats import PRESETS
from kvtuner.exported_configs.formats.conversion import Exported, Imported, ImportOptions, Storage
from kvtuner.exported_configs.formats.foreign_file import read_text, read_yaml
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import KIVI_TOKENS, NATIVE_BITS, SEARCHED_BITS, ExactWindow, PrecisionPair, ScaleLayout

KIVI_GROUP: Final = 32
"""The channels that share a scale of values in KIVI."""
_KIVI_KEYS: Final = ScaleLayout(KIVI_TOKENS, granularity="per_channel")
_KIVI_WINDOW: Final = ExactWindow(KIVI_TOKENS)
_SIDES: Final = ("nbits_key", "nbits_value")
_KIVI_NOTE: Final = (
    "keys are per channel in groups of 32 tokens, and the newest 32 tokens are also kept exactly: a server needs"
    " --page-size 32 or a multiple, and no GPU reads such keys yet"
)
_KIVI_WAY_OUT: Final = (
    f"KIVI has keys in groups of {KIVI_TOKENS} tokens, values in groups of {KIVI_GROUP} channels and {_KIVI_WINDOW}:"
    " --lossy writes its preset, which is read and served so"
)
_FILE_NAME: Final = re.compile(r"(.{1,200})_(kivi|pertoken)_KVTuner[46]_[01]\.ya?ml", re.ASCII)


def read(data: bytes, geometry: ModelGeometry, options: ImportOptions) -> Imported:
    """Read a preset."""
    pairs = _pairs(read_yaml(read_text(data)))
    scheme, notes = _scheme(options)
    storage = options.storage(geometry)
    if scheme == "kivi":
        storage = Storage(_KIVI_KEYS, ScaleLayout(options.group_size or KIVI_GROUP), window=_KIVI_WINDOW)
        notes.append(_KIVI_NOTE)
    if options.group_size is not None:
        notes.append(f"groups of {options.group_size} channels as --group-size says, not those of the preset")
    return Imported(pairs, storage, tuple(notes), rest=None)


def write(profile: Profile) -> Exported:
    """Write a preset; its storage is that of one of the two schemes."""
    schemes = {
        "pertoken": Storage.of_heads(profile.to_geometry()),
        "kivi": Storage(_KIVI_KEYS, ScaleLayout(KIVI_GROUP), window=_KIVI_WINDOW),
    }
    lost = {scheme: storage.lost_features(profile) for scheme, storage in schemes.items()}
    lost["kivi"] = [feature._replace(way_out=_KIVI_WAY_OUT) for feature in lost["kivi"]]
    nearest = "kivi" if profile.has_per_channel_keys else "pertoken"
    scheme = next((scheme for scheme in PRESETS if not lost[scheme]), nearest)
    lines = [
        f"{layer}:\n  nbits_key: {pair.k_bits}\n  nbits_value: {pair.v_bits}\n"
        for layer, pair in enumerate(profile.pairs)
    ]
    note = f"the file does not say its scheme or model: name it NAME_{scheme}_KVTuner4_0.yaml, or read it with --scheme"
    return Exported("".join(lines), (f"{note} {scheme}",), tuple(lost[scheme]))


def _pairs(document: Any) -> dict[int, PrecisionPair]:
    if not isinstance(document, dict):
        raise ProfileError("must map every layer to nbits_key and nbits_value; this is no preset of KVTuner")
    for layer, sides in document.items():
        if type(layer) is not int:
            raise ProfileError(f"layers are integers, not {str(layer)[:60]!a}; this is no preset of KVTuner")
        if not isinstance(sides, dict) or set(sides) != set(_SIDES):
            raise ProfileError(f"layer {layer} must have nbits_key and nbits_value, and nothing else")
        for name in _SIDES:
            if type(sides[name]) is not int or sides[name] not in (*SEARCHED_BITS, NATIVE_BITS):
                raise ProfileError(f"layer {layer}: {name} must be 2, 4, 8 or 16, not {str(sides[name])[:20]!a}")
    return {layer: PrecisionPair(sides["nbits_key"], sides["nbits_value"]) for layer, sides in document.items()}


def _scheme(options: ImportOptions) -> tuple[str, list[str]]:
    """The scheme that the user asks for, else that of the file's name; and notes where the two differ."""
    match = _FILE_NAME.fullmatch(options.file_name)
    if options.scheme is None and match is None:
        raise ProfileError(
            "a preset says its scheme in its name alone, MODEL_pertoken_KVTuner4_0.yaml, and this one is called"
            f" {options.file_name[:80]!a}; give --scheme pertoken or --scheme kivi"
        )
    if match is None:
        assert options.scheme is not None
        return options.scheme, []
    notes = []
    model, scheme = match[1], match[2]
    if _plain(model) != _plain(options.model):
        notes.append(f"the file's name says {model!a}, but it is imported for {options.model!a}")
    if options.scheme not in (None, scheme):
        notes.append(f"the file's name says {scheme}, but --scheme {options.scheme} was given and is taken")
    return options.scheme or scheme, notes


def _plain(model: str) -> str:
    return re.sub(r"[^a-z0-9]", "", model.rpartition("/")[2].lower())
