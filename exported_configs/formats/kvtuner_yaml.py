"""The paper's presets, ``{layer: {nbits_key, nbits_value}}``; their scheme stands in the file's name alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats.export_requirements import Exported, Storage, differences, refusal
from kvtuner.exported_configs.formats.import_result import Imported, ImportOptions, check_layer_id
from kvtuner.precision import ALL_BITS, PrecisionPair

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.geometry import ModelGeometry

SCHEMES: Final = ("pertoken", "kivi")
KIVI_GROUP: Final = 32
_SIDES: Final = ("nbits_key", "nbits_value")
_KIVI_NOTE: Final = (
    "keys are per channel in groups of 32 tokens: the profile loads and shows, but no host serves it yet, and it does"
    " not hold that KIVI leaves the newest 32 tokens unquantized"
)
_FILE_NAME: Final = re.compile(r"(.{1,200})_(kivi|pertoken)_KVTuner[46]_[01]\.ya?ml", re.ASCII)


def read(data: bytes, geometry: ModelGeometry, options: ImportOptions) -> Imported:
    """Read a preset.

    Raises:
        ProfileError: a file that is no preset of this model, or one whose scheme nobody says.
    """
    from kvtuner.exported_configs.formats.yaml_source import read_yaml  # PyYAML is for files of YAML alone

    pairs = _layers(read_yaml(data), geometry)
    scheme, notes = _scheme(options)
    k_group, v_group = options.group_sizes(geometry)
    if scheme == "kivi":
        k_group, v_group = KIVI_GROUP, options.group_size or KIVI_GROUP
        notes.append(_KIVI_NOTE)
    if options.group_size is not None:
        notes.append(f"groups of {options.group_size} channels as --group-size says, not those of the preset")
    return Imported(
        layers=pairs,
        k_group_size=k_group,
        v_group_size=v_group,
        symmetric=False,
        k_granularity="per_channel" if scheme == "kivi" else "per_token",
        notes=tuple(notes),
    )


def write(profile: Profile) -> Exported:
    """Write a preset.

    Raises:
        ProfileError: storage that neither scheme has.
    """
    geometry = profile.geometry
    schemes = {
        "pertoken": Storage(geometry.head_dim, geometry.v_head_dim, symmetric=False),
        "kivi": Storage(KIVI_GROUP, KIVI_GROUP, symmetric=False, k_granularity="per_channel"),
    }
    lost = {scheme: differences(profile, storage) for scheme, storage in schemes.items()}
    scheme = next((scheme for scheme in SCHEMES if not lost[scheme]), None)
    if scheme is None:
        raise refusal("kvtuner-yaml", lost["kivi" if profile.has_per_channel_keys else "pertoken"])
    lines = [
        f"{layer}:\n  nbits_key: {pair.k_bits}\n  nbits_value: {pair.v_bits}\n"
        for layer, pair in enumerate(profile.pairs)
    ]
    note = f"the file does not say its scheme or model: name it NAME_{scheme}_KVTuner4_0.yaml, or read it with --scheme"
    return Exported("".join(lines), (f"{note} {scheme}",))


def _layers(document: Any, geometry: ModelGeometry) -> tuple[PrecisionPair, ...]:
    if not isinstance(document, dict):
        raise ProfileError("must map every layer to nbits_key and nbits_value; this is no preset of KVTuner")
    for layer, sides in document.items():
        if type(layer) is not int:
            raise ProfileError(f"layers are integers, not {str(layer)[:60]!a}; this is no preset of KVTuner")
        check_layer_id(layer, geometry)
        if not isinstance(sides, dict) or set(sides) != set(_SIDES):
            raise ProfileError(f"layer {layer} must have nbits_key and nbits_value, and nothing else")
        for name in _SIDES:
            if type(sides[name]) is not int or sides[name] not in ALL_BITS:
                raise ProfileError(f"layer {layer}: {name} must be 2, 4, 8 or 16, not {str(sides[name])[:20]!a}")
    missing = [layer for layer in range(geometry.num_layers) if layer not in document]
    if missing:
        raise ProfileError(
            f"every layer needs its bits, but layer {missing[0]} of 0-{geometry.num_layers - 1} has none;"
            " give the file's own model"
        )
    return tuple(PrecisionPair(*(document[layer][name] for name in _SIDES)) for layer in range(geometry.num_layers))


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
