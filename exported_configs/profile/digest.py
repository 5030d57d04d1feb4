"""The digest of a profile: how its cache is stored. Knows nothing of quality, budget or provenance."""

from collections.abc import Sequence
from typing import Any

from kvtuner.exported_configs.profile.layer_storage import (
    Defaults,
    GeometryRecord,
    KeyDefaults,
    KeyRecord,
    LayerRecord,
    ValueDefaults,
    ValueRecord,
    resolve_transform,
)
from kvtuner.precision import NATIVE_BITS
from kvtuner.run_folder import canonical_json, sha256_of


def canonical_text(layout: str, geometry: GeometryRecord, defaults: Defaults, layers: Sequence[LayerRecord]) -> str:
    """The text that is hashed: JSON with sorted keys, no spaces, UTF-8 and every default written out.

    A 16-bit side is ``{"bits":16}`` alone, since it has no group, grid or transform. There are no floats.
    """
    return canonical_json(_expand(layout, geometry, defaults, layers))


def digest_of(layout: str, geometry: GeometryRecord, defaults: Defaults, layers: Sequence[LayerRecord]) -> str:
    """``sha256:`` and the hex SHA-256 of `canonical_text`."""
    return sha256_of(_expand(layout, geometry, defaults, layers))


def _expand(layout: str, geometry: GeometryRecord, defaults: Defaults, layers: Sequence[LayerRecord]) -> dict[str, Any]:
    return {
        "layout": layout,
        "geometry": geometry.model_dump(),
        "layers": [
            {
                "layer": entry.layer,
                "k": _expand_side(entry.k, defaults.k),
                "v": _expand_side(entry.v, defaults.v),
            }
            for entry in layers
        ],
    }


def _expand_side(record: KeyRecord | ValueRecord, defaults: KeyDefaults | ValueDefaults) -> dict[str, Any]:
    if record.bits == NATIVE_BITS:
        return {"bits": NATIVE_BITS}
    return {
        **defaults.model_dump(),
        **record.model_dump(by_alias=True),
        "transform": resolve_transform(record, defaults),
    }
