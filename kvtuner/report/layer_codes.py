"""Every layer of a profile as a few characters: widths and transforms. Knows nothing of terminals or pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtuner.precision import NATIVE_BITS
from kvtuner.transforms import TRANSFORMS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtuner.exported_configs.profile.profile import Profile

BIT_CODES: Final = {2: "2", 4: "4", 8: "8", 16: "F"}
PER_CHANNEL: Final = "per channel"
KIND_CODES: Final = {**{name: kind.letter for name, kind in TRANSFORMS.items()}, PER_CHANNEL: "p"}


@dataclass(frozen=True, slots=True)
class LayerCode:
    """How one layer is stored.

    Attributes:
        layer: its global id.
        k_bits: width of keys.
        v_bits: width of values.
        k_kind: a name of `KIND_CODES`: the transform of keys, or `PER_CHANNEL`, which has none.
        v_kind: the transform of values.
    """

    layer: int
    k_bits: int
    v_bits: int
    k_kind: str
    v_kind: str

    def words(self) -> str:
        """The same for those who do not see it."""
        return f"keys {_side(self.k_bits, self.k_kind)}, values {_side(self.v_bits, self.v_kind)}"


def layer_codes(profile: Profile) -> tuple[LayerCode, ...]:
    """All layers, in order."""
    is_per_channel = profile.defaults.k.granularity == "per_channel"
    return tuple(
        LayerCode(
            layer,
            pair.k_bits,
            pair.v_bits,
            PER_CHANNEL if is_per_channel and pair.k_bits != NATIVE_BITS else str(profile.transform_name(layer, "k")),
            str(profile.transform_name(layer, "v")),
        )
        for layer, pair in enumerate(profile.pairs)
    )


def kinds_used(codes: Iterable[LayerCode]) -> list[tuple[str, str]]:
    """(code, name) of the kinds that occur, in one order for all profiles."""
    used = {kind for code in codes for kind in (code.k_kind, code.v_kind)}
    return [(code, name) for name, code in KIND_CODES.items() if name in used]


def bits_used(codes: Iterable[LayerCode]) -> list[tuple[str, int]]:
    """(code, bits) of the widths that occur, ascending."""
    used = {bits for code in codes for bits in (code.k_bits, code.v_bits)}
    return [(code, bits) for bits, code in BIT_CODES.items() if bits in used]


def _side(bits: int, kind: str) -> str:
    return f"{bits} bits" if kind == "none" else f"{bits} bits {kind}"
