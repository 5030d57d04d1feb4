"""What only the second version of a profile has, and the first version that can hold one. Knows nothing of digests."""

from collections.abc import Sequence
from typing import Final

from kvtuner.exported_configs.profile.geometry_record import GeometryRecord
from kvtuner.exported_configs.profile.layer_storage import Defaults, LayerRecord
from kvtuner.precision import THREE_BITS

SCHEMA_VERSIONS: Final = (1, 2)
"""The versions that are read; a profile is written in the first that can hold it."""
SECOND_VERSION: Final = 2
"""The version with fits, short scale words, 3 bits, an exact window, layers that differ, and a side file."""
SECOND_VERSION_QUALITY: Final = ("best_uniform", "larger_budgets")
"""The fields of a quality that only the second version has; a profile of the first is written without them."""


def first_version(
    geometry: GeometryRecord, defaults: Defaults, layers: Sequence[LayerRecord], **own: object
) -> tuple[int, Defaults]:
    """The first version that can hold a profile, and its defaults as that version states them.

    `own` are the fields of the profile itself that only the second version has.
    """
    least = _with_fits(defaults, {side: None if fit == "minmax" else fit for side, fit in _fits(defaults).items()})
    if why_second_version(geometry, least, layers, **own):
        return SECOND_VERSION, _with_fits(defaults, _fits(defaults))
    return SCHEMA_VERSIONS[0], least


def why_second_version(
    geometry: GeometryRecord, defaults: Defaults, layers: Sequence[LayerRecord], **own: object
) -> list[str]:
    """What the first version cannot hold, as a refusal says it; nothing where it holds all."""
    parts: list[tuple[str, object, tuple[str, ...]]] = [
        ("geometry.", geometry, ("kind", "rope_dim", "index_dim", "exceptions")),
        ("defaults.k.", defaults.k, ("word_bits", "fit")),
        ("defaults.v.", defaults.v, ("word_bits", "fit")),
    ]
    for entry in layers:
        parts += [
            (f"layers[{entry.layer}].{side}.", record, ("group_size",)) for side, record, _ in entry.sides(defaults)
        ]
    fields = own | {place + name: getattr(part, name) for place, part, names in parts for name in names}
    reasons = [f"{place}: schema_version 1 has none" for place, value in fields.items() if value is not None]
    if any(THREE_BITS in (entry.pair.k_bits, entry.pair.v_bits) for entry in layers):
        reasons.append(f"schema_version 1 has no layers of {THREE_BITS} bits, version {SECOND_VERSION} has")
    return reasons


def _fits(defaults: Defaults) -> dict[str, str | None]:
    return {"k": defaults.k.grid_fit, "v": defaults.v.grid_fit}


def _with_fits(defaults: Defaults, fits: dict[str, str | None]) -> Defaults:
    sides = {side: getattr(defaults, side).model_copy(update={"fit": fit}) for side, fit in fits.items()}
    return defaults.model_copy(update=sides)
