"""The layers that two profiles store differently. Knows nothing of sizes, quality or how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtuner.precision import NATIVE_BITS
from kvtuner.report.layer_strip import PER_CHANNEL

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile

CONSTANTS: Final = ("constants",)
"""What changed of a layer whose constants alone are others."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer of a compared profile: 16-bit keys have no granularity; constants are the base64 of mu and lambda.

    Group sizes are the layer's own, None for those of the defaults.
    """

    pair: str
    k_transform: str
    v_transform: str
    k_granularity: str | None
    k_group_size: int | None
    v_group_size: int | None
    constants: tuple[str | None, str | None]

    @classmethod
    def of(cls, profile: Profile, layer: int) -> LayerState:
        """The state of a layer of a profile."""
        (entry,) = (entry for entry in profile.layers if entry.layer == layer)
        keys = entry.k
        return cls(
            str(entry.pair),
            str(profile.transform_name(layer, "k")),
            str(profile.transform_name(layer, "v")),
            None if keys.bits == NATIVE_BITS else profile.defaults.k.granularity,
            keys.group_size,
            entry.v.group_size if entry.v else None,
            (keys.mu.data if keys.mu else None, keys.lam.data if keys.lam else None),
        )

    def __str__(self) -> str:
        keys = PER_CHANNEL if self.k_granularity == "per_channel" else self.k_transform
        groups = (self.k_group_size, self.v_group_size)
        own = f" groups {'/'.join(str(size or '-') for size in groups)}" if any(groups) else ""
        return f"{self.pair} {keys}/{self.v_transform}{own}"


@dataclass(frozen=True, slots=True)
class LayerChange:
    """A layer that the two profiles store differently.

    Attributes:
        changed: Some of ``bits``, ``granularity`` of keys that are quantized in both, ``group_size`` of the layer's
            own, ``transform``, and ``constants`` of one and the same transform.
    """

    layer: int
    first: LayerState
    second: LayerState
    changed: tuple[str, ...]


def compare_layers(first: Profile, second: Profile, *, with_constants: bool) -> tuple[LayerChange, ...]:
    """The layers that are stored differently, of two profiles of the same layer ids; constants count only if asked."""
    changes = []
    for layer in (entry.layer for entry in first.layers):
        before, after = LayerState.of(first, layer), LayerState.of(second, layer)
        granularities = (before.k_granularity, after.k_granularity)
        same_kind = before.k_transform == after.k_transform
        differs = {
            "bits": before.pair != after.pair,
            "granularity": None not in granularities and granularities[0] != granularities[1],
            "group_size": (before.k_group_size, before.v_group_size) != (after.k_group_size, after.v_group_size),
            "transform": not same_kind or before.v_transform != after.v_transform,
            "constants": with_constants and same_kind and before.constants != after.constants,
        }
        if changed := tuple(name for name, is_so in differs.items() if is_so):
            changes.append(LayerChange(layer, before, after, changed))
    return tuple(changes)
