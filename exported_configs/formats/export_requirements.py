"""The features of a profile that a format may be unable to say. Knows no format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtuner.errors import ProfileError
from kvtuner.precision import NATIVE_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.layer_storage import KeyDefaults, ValueDefaults
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.precision import Granularity, Side


@dataclass(frozen=True, slots=True)
class Storage:
    """The one way in which the readers of a format store every quantized layer, without transforms.

    Attributes:
        k_group_size: The group size of the keys, as in a profile.
        v_group_size: The group size of the values, as in a profile.
        symmetric: Whether grids lie around zero.
        k_granularity: The granularity of the keys.
    """

    k_group_size: int
    v_group_size: int
    symmetric: bool
    k_granularity: Granularity = "per_token"


@dataclass(frozen=True, slots=True, order=True)
class LostFeature:
    """A feature of the profile that a file does not have, and the first layer that has it."""

    layer: int
    what: str

    def __str__(self) -> str:
        return f"layer {self.layer}: {self.what}"


@dataclass(frozen=True, slots=True)
class Exported:
    """Another tool's file.

    Attributes:
        text: The content of the file.
        notes: Advice to the user, one line each.
        lost: The features of the profile that the file does not have.
    """

    text: str
    notes: tuple[str, ...] = ()
    lost: tuple[LostFeature, ...] = ()


def differences(profile: Profile, storage: Storage) -> list[LostFeature]:
    """The features that the readers' storage lacks, by the first layer of each; layers of 16 bits lose nothing."""
    lost = []
    sides: tuple[tuple[Side, str, KeyDefaults | ValueDefaults, int, Granularity], ...] = (
        ("k", "keys", profile.defaults.k, storage.k_group_size, storage.k_granularity),
        ("v", "values", profile.defaults.v, storage.v_group_size, "per_token"),
    )
    for side, noun, defaults, group_size, granularity in sides:
        bits = [pair.k_bits if side == "k" else pair.v_bits for pair in profile.pairs]
        packed = [layer for layer, width in enumerate(bits) if width != NATIVE_BITS]
        if not packed:
            continue
        if defaults.granularity != granularity:
            lost.append(LostFeature(packed[0], f"{noun} are {defaults.granularity.replace('_', ' ')}"))
        elif defaults.group_size != group_size:
            lost.append(LostFeature(packed[0], f"{noun} are in groups of {defaults.group_size}, not {group_size}"))
        if defaults.symmetric != storage.symmetric:
            lost.append(LostFeature(packed[0], f"{noun} are {'symmetric' if defaults.symmetric else 'asymmetric'}"))
        names = ((layer, profile.transform_name(layer, side)) for layer in packed)
        lost += [LostFeature(layer, f"{noun} are {name}") for layer, name in names if name != "none"][:1]
    return sorted(lost)


def uneven_layers(profile: Profile) -> list[LostFeature]:
    """Layers that a format with one width for keys and values cannot say."""
    return [
        LostFeature(layer, f"{pair} has other bits for keys than for values")
        for layer, pair in enumerate(profile.pairs)
        if pair.k_bits != pair.v_bits
    ]


def refusal(name: str, lost: Sequence[LostFeature], way_out: str = "keep the profile's own file") -> ProfileError:
    """The error for a format that cannot say all: names the first layer and what would be lost."""
    more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    return ProfileError(f"{name} cannot say all of the profile: {lost[0]}{more}; {way_out}")
