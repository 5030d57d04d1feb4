"""What a profile says that a format may be unable to say. Knows no format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtuner.errors import ProfileError
from kvtuner.precision import NATIVE_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.precision import Granularity, PrecisionPair, Side

_SIDES: Final[tuple[Side, Side]] = ("k", "v")
_NAMES: Final = {"k": "keys", "v": "values"}


@dataclass(frozen=True, slots=True)
class Storage:
    """How the readers of a format store every quantized layer, whatever its bits: without transforms.

    Attributes:
        k_group_size: as in a profile.
        v_group_size: as in a profile.
        symmetric: grids around zero.
        k_granularity: of the keys.
    """

    k_group_size: int
    v_group_size: int
    symmetric: bool
    k_granularity: Granularity = "per_token"


@dataclass(frozen=True, slots=True, order=True)
class LostFeature:
    """Something of the profile that would be lost, and the first layer that has it."""

    layer: int
    what: str

    def __str__(self) -> str:
        return f"layer {self.layer}: {self.what}"


@dataclass(frozen=True, slots=True)
class Exported:
    """Another tool's file.

    Attributes:
        text: what is in it.
        notes: what the user should know, one line each.
        lost: what it does not say of the profile.
    """

    text: str
    notes: tuple[str, ...] = ()
    lost: tuple[LostFeature, ...] = ()


def differences(profile: Profile, storage: Storage) -> list[LostFeature]:
    """What quantized layers have and the readers' storage has not, by the first layer of each; 16 bits lose nothing."""
    found = []
    for side in _SIDES:
        packed = [layer for layer, pair in enumerate(profile.pairs) if _bits(pair, side) != NATIVE_BITS]
        if not packed:
            continue
        found += [LostFeature(packed[0], text) for text in _of_defaults(profile, storage, side)]
        names = ((layer, profile.transform_name(layer, side)) for layer in packed)
        found += [LostFeature(layer, f"{_NAMES[side]} are {name}") for layer, name in names if name != "none"][:1]
    return sorted(found)


def uneven_layers(profile: Profile) -> list[LostFeature]:
    """Layers that a format with one width for keys and values cannot say."""
    return [
        LostFeature(layer, f"{pair} has other bits for keys than for values")
        for layer, pair in enumerate(profile.pairs)
        if pair.k_bits != pair.v_bits
    ]


def refusal(name: str, found: Sequence[LostFeature], way_out: str = "keep the profile's own file") -> ProfileError:
    """The error for a format that cannot say all: names the first layer and what would be lost."""
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return ProfileError(f"{name} cannot say all of the profile: {found[0]}{more}; {way_out}")


def _of_defaults(profile: Profile, storage: Storage, side: Side) -> list[str]:
    defaults = profile.defaults.k if side == "k" else profile.defaults.v
    group, granularity = (
        (storage.k_group_size, storage.k_granularity) if side == "k" else (storage.v_group_size, "per_token")
    )
    texts = []
    if defaults.granularity != granularity:
        texts.append(f"{_NAMES[side]} are {defaults.granularity.replace('_', ' ')}")
    elif defaults.group_size != group:
        texts.append(f"{_NAMES[side]} are in groups of {defaults.group_size}, not {group}")
    if defaults.symmetric != storage.symmetric:
        texts.append(f"{_NAMES[side]} are {'symmetric' if defaults.symmetric else 'asymmetric'}")
    return texts


def _bits(pair: PrecisionPair, side: Side) -> int:
    return pair.k_bits if side == "k" else pair.v_bits
