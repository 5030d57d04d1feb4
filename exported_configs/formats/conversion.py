"""The options and results of readers and writers, and what a format cannot say. Knows no format."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtuner.errors import PrecisionError, ProfileError
from kvtuner.precision import NATIVE_BITS, PrecisionPair

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from kvtuner.exported_configs.profile.layer_storage import SideDefaults
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.geometry import ModelGeometry
    from kvtuner.precision import Granularity, Side

NATIVE: Final = PrecisionPair(NATIVE_BITS, NATIVE_BITS)
_OWN_MODEL: Final = "give the file's own model"


class LostFeature(NamedTuple):
    """A feature of the profile that a file does not have, the first layer that has it, and a way out."""

    layer: int
    what: str
    way_out: str = "keep the profile's own file"

    def __str__(self) -> str:
        return f"layer {self.layer}: {self.what}"


@dataclass(frozen=True, slots=True)
class Storage:
    """The one way in which every quantized layer is stored, without transforms; the fields are a profile's defaults."""

    k_group_size: int
    v_group_size: int
    symmetric: bool = False
    k_granularity: Granularity = "per_token"

    def lost_features(self, profile: Profile) -> list[LostFeature]:
        """The features of a profile that the storage lacks, by the first layer of each; 16 bits lose nothing."""
        lost = []
        sides: tuple[tuple[Side, str, SideDefaults, int, Granularity], ...] = (
            ("k", "keys", profile.defaults.k, self.k_group_size, self.k_granularity),
            ("v", "values", profile.defaults.v, self.v_group_size, "per_token"),
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
            if defaults.symmetric != self.symmetric:
                lost.append(LostFeature(packed[0], f"{noun} are {'symmetric' if defaults.symmetric else 'asymmetric'}"))
            names = ((layer, profile.transform_name(layer, side)) for layer in packed)
            lost += [LostFeature(layer, f"{noun} are {name}") for layer, name in names if name != "none"][:1]
        return sorted(lost)


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """The options that the user adds to the file.

    Attributes:
        file_name: The last part of the file's path, which some formats read.
        model: The name of the model, to be compared with what the file says.
        scheme: The scheme of a preset, pertoken or kivi.
        words: The widths that stand for words, in capitals, which the format has and a profile has not.
        group_size: The channels per scale, in place of the format's.
        default_word: The word of layers that the file does not name.
        symmetric: Whether grids lie around zero, where the format does not say.
    """

    file_name: str = ""
    model: str = ""
    scheme: str | None = field(default=None, metadata={"flag": "--scheme"})
    words: Mapping[str, PrecisionPair] = field(default_factory=dict, metadata={"flag": "--map"})
    group_size: int | None = field(default=None, metadata={"flag": "--group-size"})
    default_word: str | None = field(default=None, metadata={"flag": "--default-dtype"})
    symmetric: bool | None = field(default=None, metadata={"flag": "--symmetric or --asymmetric"})

    def __post_init__(self) -> None:
        if self.group_size is not None and self.group_size < 1:
            raise ProfileError(f"--group-size must be at least 1 channel, not {str(self.group_size)[:20]}")

    def flags_beyond(self, names: Collection[str]) -> Iterator[str]:
        """The flags that the user set and that belong to no field of `names`."""
        for option in fields(self):
            if "flag" in option.metadata and option.name not in names and getattr(self, option.name) not in (None, {}):
                yield option.metadata["flag"]

    def storage(self, geometry: ModelGeometry, *, symmetric: bool = False) -> Storage:
        """The storage of a format that has no groups of its own: one group per head."""
        return Storage(self.group_size or geometry.head_dim, self.group_size or geometry.v_head_dim, symmetric)

    def map_notes(self, names: Iterable[str]) -> tuple[str, ...]:
        """One note for each mapped word: what stands in its place, or that no layer has it."""
        used = {name.upper() for name in names}
        return tuple(
            f"{word} is stored as {pair}: integers with scales made while serving, another format than {word}"
            if word in used
            else f"--map {word}={pair} was not needed: no layer has {word}"
            for word, pair in self.words.items()
        )


@dataclass(frozen=True, slots=True)
class Imported:
    """The widths of the layers that a file names, their storage, and notes to the user, one line each.

    A layer need not be one of the model; `rest` is the widths of all others, None where every layer must be named;
    `missing_advice` says then what to do about one that is not.
    """

    pairs: Mapping[int, PrecisionPair]
    storage: Storage
    notes: tuple[str, ...] = ()
    rest: PrecisionPair | None = NATIVE
    missing_advice: str = _OWN_MODEL

    def all_pairs(self, num_layers: int) -> list[PrecisionPair]:
        """The widths of every layer of a model; `ProfileError` for a layer that it has not, or that must be named."""
        last = num_layers - 1
        for layer in self.pairs:
            if not 0 <= layer < num_layers:
                raise ProfileError(
                    f"the model has layers 0-{last}, but the file names layer {str(layer)[:20]}; {_OWN_MODEL}"
                )
        missing = [layer for layer in range(num_layers) if layer not in self.pairs]
        if missing and self.rest is None:
            raise ProfileError(f"layer {missing[0]} of 0-{last} is not named; {self.missing_advice}")
        return [self.pairs.get(layer) or self.rest or NATIVE for layer in range(num_layers)]


@dataclass(frozen=True, slots=True)
class Exported:
    """The text of another tool's file, notes to the user, and the features of the profile that the file lacks."""

    text: str
    notes: tuple[str, ...] = ()
    lost: tuple[LostFeature, ...] = ()


def parse_map(text: str) -> dict[str, PrecisionPair]:
    """Read ``FP8=8,FP8_K_NVFP4_V=K8V4``, words in capitals; `ProfileError` for a bad entry or a word that is twice."""
    words: dict[str, PrecisionPair] = {}
    for entry in text.split(","):
        name, _, meaning = (part.strip() for part in entry.partition("="))
        if not name.isascii() or not name.isprintable() or not name or not meaning:
            raise ProfileError(f"--map is written FP8=8,NVFP4=K8V4, and {entry.strip()[:60]!a} is no such entry")
        if name.upper() in words:
            raise ProfileError(f"--map: {name.upper()} may stand once, but is twice in {text[:60]!a}")
        try:
            words[name.upper()] = PrecisionPair.parse(meaning)
        except PrecisionError as error:
            raise ProfileError(f"--map {entry.strip()[:60]!a}: {error}") from error
    return words


def uneven_layers(profile: Profile) -> list[LostFeature]:
    """The layers that a format with one width for keys and values cannot say."""
    return [
        LostFeature(layer, f"{pair} has other bits for keys than for values")
        for layer, pair in enumerate(profile.pairs)
        if pair.k_bits != pair.v_bits
    ]


def refusal(name: str, lost: Sequence[LostFeature]) -> ProfileError:
    """The error for a format that cannot say all: names the first layer and what would be lost."""
    more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    return ProfileError(f"{name} cannot say all of the profile: {lost[0]}{more}; {lost[0].way_out}")
