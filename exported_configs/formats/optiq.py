"""mlx-optiq's ``kv_config.json``: bits and groups of some layers, keys and values alike."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from kvtuner.errors import PrecisionError, ProfileError
from kvtuner.exported_configs.formats.conversion import (
    Exported,
    Imported,
    ImportOptions,
    LostFeature,
    Storage,
    uneven_layers,
)
from kvtuner.exported_configs.formats.foreign_file import read_json
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import NATIVE_BITS, SEARCHED_BITS, PrecisionPair, ScaleLayout, bytes_per_token

DEFAULT_GROUP: Final = 64
FULL_PRECISION: Final = 0
MLX_GROUPS: Final = (32, 64, 128)
"""The groups of MLX's affine quantization."""
_FIELDS: Final = ("layer_idx", "bits", "group_size")


def read(data: bytes, geometry: ModelGeometry, options: ImportOptions) -> Imported:
    """Read a file; layers that it does not name are not quantized."""
    entries = _entries(read_json(data))
    groups = {group: layer for layer, (bits, group) in reversed(entries.items()) if bits != FULL_PRECISION}
    if options.group_size is None and len(groups) > 1:
        (one, first), (other, second), *_ = groups.items()
        raise ProfileError(
            f"a profile has one group size, but layer {first} has {one} and layer {second} has {other};"
            " give --group-size"
        )
    notes: tuple[str, ...] = ()
    storage = options.storage(geometry)
    if options.group_size is None and groups:
        (group,) = groups
        storage = Storage(ScaleLayout(group), ScaleLayout(group))
    elif groups and set(groups) != {options.group_size}:
        notes = (f"groups of {options.group_size} channels as --group-size says, not those of the file",)
    widths = {layer: bits or NATIVE_BITS for layer, (bits, _) in entries.items()}
    return Imported({layer: PrecisionPair(bits, bits) for layer, bits in widths.items()}, storage, notes)


def write(profile: Profile) -> Exported:
    """Write the quantized layers: its reader quantizes every layer that is named, and leaves the others alone."""
    group = profile.defaults.k.group_size
    storage = Storage(ScaleLayout(group), ScaleLayout(group))
    lost = sorted(uneven_layers(profile) + storage.lost_features(profile))
    entries = [
        {"layer_idx": layer, "bits": pair.k_bits, "group_size": group}
        for layer, pair in enumerate(profile.pairs)
        if pair.k_bits != NATIVE_BITS
    ]
    if entries and not lost and group not in MLX_GROUPS:
        what = f"keys are in groups of {group}, but MLX has groups of {_words(MLX_GROUPS)} alone"
        lost = [LostFeature(entries[0]["layer_idx"], what, _way_out(profile))]
    return Exported(json.dumps(entries, indent=1) + "\n", lost=tuple(lost))


def _way_out(profile: Profile) -> str:
    """The groups of MLX that rows of the model can have."""
    fit = []
    for group in MLX_GROUPS:
        with suppress(PrecisionError):
            bytes_per_token(
                profile.pairs, replace(profile.row_shape(), k_layout=ScaleLayout(group), v_layout=ScaleLayout(group))
            )
            fit.append(group)
    if not fit:
        return "rows of this model can have none of them: keep the profile's own file"
    return (
        f"make it with groups of {_words(fit)} (--k-group-size and --v-group-size of a search, --group-size of an"
        " import)"
    )


def _words(groups: Sequence[int]) -> str:
    *others, last = map(str, groups)
    return f"{', '.join(others)} or {last}" if others else last


def _entries(document: Any) -> dict[int, tuple[int, int]]:
    if not isinstance(document, list):
        raise ProfileError("must be a JSON list of layer_idx, bits and group_size; this is no kv_config.json of optiq")
    by_layer: dict[int, tuple[int, int]] = {}
    for place, entry in enumerate(document):
        if not isinstance(entry, dict) or not {"layer_idx", "bits"} <= set(entry) <= set(_FIELDS):
            raise ProfileError(f"entry {place} must have layer_idx, bits and perhaps group_size, and nothing else")
        if not all(type(value) is int for value in entry.values()):
            raise ProfileError(f"entry {place}: layer_idx, bits and group_size must be integers")
        layer, bits, group = entry["layer_idx"], entry["bits"], entry.get("group_size", DEFAULT_GROUP)
        if layer in by_layer:
            raise ProfileError(f"entry {place}: layer {layer} stands twice; remove one")
        if bits not in (FULL_PRECISION, *SEARCHED_BITS):
            raise ProfileError(f"layer {layer}: bits must be 0 (not quantized), 2, 4 or 8, not {bits}")
        by_layer[layer] = bits, group
    return by_layer
