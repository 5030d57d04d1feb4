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
from kvtuner.precision import NATIVE_BITS, NO_WINDOW, WIDE_WORD_BITS, ExactWindow


def hashed_content(
    layout: str,
    geometry: GeometryRecord,
    defaults: Defaults,
    layers: Sequence[LayerRecord],
    window: ExactWindow = NO_WINDOW,
    constants_sha256: str | None = None,
) -> dict[str, Any]:
    """The content that the digest hashes, with every default written out.

    A 16-bit side is ``{"bits":16}`` alone, since it has no group, grid or transform. Counts of the exact window that
    are 0, and words of 32 bits, are left out. There are no floats. Constants in a side file are covered by its hash
    alone.
    """
    names = {"mu", "lambda"} if constants_sha256 else set[str]()
    expanded = [
        {
            "layer": entry.layer,
            **{side: _expand_side(record, shared, names) for side, record, shared in entry.sides(defaults)},
        }
        for entry in layers
    ]
    counts = {"residual_length": window.residual_length, "sinks": window.sinks}
    kept: dict[str, Any] = {name: tokens for name, tokens in counts.items() if tokens}
    if constants_sha256:
        kept["constants_sha256"] = constants_sha256
    return {"layout": layout, "geometry": geometry.hashed(), "layers": expanded, **kept}


def _expand_side(record: SideRecord, defaults: SideDefaults, elsewhere: set[str]) -> dict[str, Any]:
    if record.bits == NATIVE_BITS:
        return {"bits": NATIVE_BITS}
    transform = resolve_transform(record, defaults)
    own = {name: value for name, value in record.model_dump(by_alias=True).items() if name not in elsewhere}
    shared = defaults.model_dump()
    if defaults.grid_word_bits == WIDE_WORD_BITS:
        shared.pop("word_bits", None)
    return {**shared, **own, "transform": transform}
