"""The content that the digest of a profile covers: how layers are stored and read, with all defaults written out."""

from collections.abc import Sequence
from typing import Any

from kvtuner.exported_configs.profile.geometry_record import GeometryRecord
from kvtuner.exported_configs.profile.layer_storage import (
    Defaults,
    LayerRecord,
    SideDefaults,
    SideRecord,
    resolve_transform,
)
from kvtuner.precision import NATIVE_BITS, NO_WINDOW, ExactWindow


def hashed_content(
    layout: str,
    geometry: GeometryRecord,
    defaults: Defaults,
    layers: Sequence[LayerRecord],
    window: ExactWindow = NO_WINDOW,
) -> dict[str, Any]:
    """The content that the digest hashes, with every default written out.

    A 16-bit side is ``{"bits":16}`` alone, since it has no group, grid or transform. Counts of the exact window that
    are 0 are left out. There are no floats.
    """
    expanded = [
        {
            "layer": entry.layer,
            "k": _expand_side(entry.k, defaults.k),
            **({} if entry.v is None else {"v": _expand_side(entry.v, defaults.v)}),
        }
        for entry in layers
    ]
    counts = {"residual_length": window.residual_length, "sinks": window.sinks}
    kept = {name: tokens for name, tokens in counts.items() if tokens}
    return {"layout": layout, "geometry": geometry.hashed(), "layers": expanded, **kept}


def _expand_side(record: SideRecord, defaults: SideDefaults) -> dict[str, Any]:
    if record.bits == NATIVE_BITS:
        return {"bits": NATIVE_BITS}
    transform = resolve_transform(record, defaults)
    return {**defaults.model_dump(), **record.model_dump(by_alias=True), "transform": transform}
