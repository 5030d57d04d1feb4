"""The conversion of profiles from and to other tools' files: options, results, and what a format cannot say.

Knows formats by the rows of `FORMATS` alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, Final, NamedTuple, Self

from kvtuner.errors import PrecisionError, ProfileError
from kvtuner.exported_configs import formats
from kvtuner.exported_configs.profile.build import AskedBudget, LayerQuantization, build_profile
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.exported_configs.profile.records import ModelIdentity
from kvtuner.geometry import ModelGeometry
from kvtuner.layer_ranges import write_layers
from kvtuner.precision import (
    FITTED_BITS,
    NATIVE_BITS,
    NO_WINDOW,
    SHORT_WORD_BITS,
    THREE_BITS,
    ExactWindow,
    PrecisionPair,
    ScaleLayout,
    Side,
    used_word_bits,
)

EXPORTABLE: Final = "--transforms none --fit minmax --word-bits 32 --no-three-bits --residual-length 0"
"""The flags of a search whose profiles have nothing that other tools lack, but for their own limits."""
WIDER_BITS: Final = 4
"""The bits that a file has for 3, which no other tool stores."""
NATIVE: Final = PrecisionPair(NATIVE_BITS, NATIVE_BITS)
_OWN_MODEL: Final = "give the file's own model"
_EVEN_WAY_OUT: Final = f"keep the profile's own file, or measure equal bits, such as --layers 0-3:K4V4 {EXPORTABLE}"


class LostFeature(NamedTuple):
    """A feature of the profile that a file does not have, the first layer that has it, and its own way out if any."""

    layer: int
    what: str
    way_out: str = ""

    def __str__(self) -> str:
        return f"layer {self.layer}: {self.what}"


@dataclass(frozen=True, slots=True)
class Storage:
    """The one way in which every quantized layer is stored, without transforms; the fields are a profile's defaults."""

    k_layout: ScaleLayout
    v_layout: ScaleLayout
    symmetric: bool = False
    window: ExactWindow = NO_WINDOW

    @classmethod
    def of_heads(cls, geometry: ModelGeometry, *, symmetric: bool = False) -> Self:
        """One group for each head of a model."""
        layout = ScaleLayout()
        return cls(layout.of_head(geometry.head_dim), layout.of_head(geometry.v_head_dim), symmetric)

    def lost_features(self, profile: Profile) -> list[LostFeature]:
        """The features of a profile that the storage lacks, by the first layer of each; 16 bits lose nothing."""
        lost = lost_window(profile, self.window)
        return sorted([*self._lost_of(profile, "k"), *self._lost_of(profile, "v"), *lost])

    def _lost_of(self, profile: Profile, side: Side) -> Iterator[LostFeature]:
        is_key = side == "k"
        noun, defaults = ("keys", profile.defaults.k) if is_key else ("values", profile.defaults.v)
        layout = self.k_layout if is_key else self.v_layout
        bits = [pair.k_bits if is_key else pair.v_bits for pair in profile.pairs]
        packed = [layer for layer, width in enumerate(bits) if width != NATIVE_BITS]
        if not packed:
            return
        if defaults.granularity != layout.granularity:
            yield LostFeature(packed[0], f"{noun} are {defaults.granularity.replace('_', ' ')}")
        elif defaults.group_size != layout.group_size:
            yield LostFeature(packed[0], f"{noun} are in groups of {defaults.group_size}, not {layout.group_size}")
        fitted = [layer for layer in packed if bits[layer] in FITTED_BITS]
        if fitted and defaults.grid_fit == "least_squares":
            yield LostFeature(fitted[0], f"{noun} are fitted by least squares")
        short = [layer for layer in packed if used_word_bits(bits[layer], defaults.grid_word_bits) == SHORT_WORD_BITS]
        if short:
            yield LostFeature(short[0], f"{noun} have 16 bits for scale and minimum")
        if defaults.symmetric != self.symmetric:
            yield LostFeature(packed[0], f"{noun} are {'symmetric' if defaults.symmetric else 'asymmetric'}")
        names = ((layer, profile.transform_name(layer, side)) for layer in packed)
        yield from [LostFeature(layer, f"{noun} are {name}") for layer, name in names if name != "none"][:1]


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """The options that the user adds to the file.

    Attributes:
        file_name: The last part of the file's path, which some formats read.
        model: The name of the model, to be compared with what the file says.
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

    def storage(self, geometry: ModelGeometry, *, symmetric: bool = False) -> Storage:
        """The storage of a format that has no groups of its own: one group per head."""
        layout = ScaleLayout(self.group_size)
        return Storage(layout.of_head(geometry.head_dim), layout.of_head(geometry.v_head_dim), symmetric)

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


def read(
    data: bytes, name: str, geometry: ModelGeometry, model: ModelIdentity, options: ImportOptions
) -> tuple[Profile, tuple[str, ...]]:
    """Read the content of another tool's file for a model, by the name of its format.

    The profile has no transforms and measurements, and the notes say what the file left open. A file that is wrong, or
    an option that means nothing to the format, is a `ProfileError`.
    """
    if geometry.layer_ids is not None:
        raise ProfileError(
            f"only layers {write_layers(geometry.layer_ids)} of this model read all tokens, which {name} files do not"
            " say: search it instead"
        )
    if geometry.is_latent:
        raise ProfileError(f"this model caches latents, and {name} files are of keys and values: search it instead")
    for option in fields(options):
        flag, is_set = option.metadata.get("flag"), getattr(options, option.name) not in (None, {})
        if flag and is_set and option.name not in (formats.FORMATS[name].options or ()):
            raise ProfileError(f"{name} files say that themselves, or do not have it; leave {flag} out")
    imported: Imported = _module(name).read(data, geometry, options)
    pairs = imported.all_pairs(geometry.num_layers)
    _check_groups(pairs, imported.storage, geometry)
    profile = build_profile(
        geometry=geometry,
        layers=[LayerQuantization(pair.k_bits, pair.v_bits) for pair in pairs],
        k_layout=imported.storage.k_layout,
        v_layout=imported.storage.v_layout,
        symmetric=imported.storage.symmetric,
        window=imported.storage.window,
        model=model,
        budget=AskedBudget(f"imported from {name}"),
    )
    return profile, imported.notes


def write(profile: Profile, name: str, *, lossy: bool = False) -> Exported:
    """Write a profile as another tool's file; `ProfileError` for what it cannot say, unless `lossy` drops it."""
    if lossy and not formats.FORMATS[name].can_lose:
        raise ProfileError(f"{name} is never written with a loss; leave --lossy out")
    profile.to_geometry()
    profile.check_one_shape()  # as no other tool's file has layers of several
    widened = [
        LostFeature(layer, f"{THREE_BITS} bits, for which the file has {WIDER_BITS}")
        for layer, pair in enumerate(profile.pairs)
        if THREE_BITS in (pair.k_bits, pair.v_bits)
    ][:1]
    exported = _without_three_bits(profile, name) if widened else _written(profile, name)
    if (lost := (*widened, *exported.lost)) and not lossy:
        raise _strict_refusal(name, lost)
    changes = (("widened", widened), ("dropped", exported.lost))
    notes = (f"{verb}, from layer {layer} on: {what}" for verb, features in changes for layer, what, _ in features)
    return replace(exported, notes=(*exported.notes, *notes))


def _strict_refusal(name: str, lost: Sequence[LostFeature]) -> ProfileError:
    """The error for a loss that nobody accepted; names the flag that does, where the format has one."""
    if not formats.FORMATS[name].can_lose:
        return refusal(name, lost)
    return refusal(name, lost, f"--lossy accepts that; a search with {EXPORTABLE} has nothing to lose")


def _written(profile: Profile, name: str) -> Exported:
    exported: Exported = _module(name).write(profile)
    return exported


def _without_three_bits(profile: Profile, name: str) -> Exported:
    """The file with 4 bits wherever the profile has 3; the copy that is written has a stale digest."""
    wider: list[dict[str, Any]] = [
        {
            side: record.model_copy(update={"bits": WIDER_BITS})
            for side, record, _ in entry.sides(profile.defaults)
            if record.bits == THREE_BITS
        }
        for entry in profile.layers
    ]
    layers = (entry.model_copy(update=sides) for entry, sides in zip(profile.layers, wider, strict=True))
    try:
        return _written(profile.model_copy(update={"layers": tuple(layers)}), name)
    except ProfileError as error:
        raise ProfileError(f"with {WIDER_BITS} bits in place of {THREE_BITS}: {error}") from error


def _module(name: str) -> Any:
    return import_module(f"{formats.__name__}.{formats.FORMATS[name].module}")


def _check_groups(pairs: Sequence[PrecisionPair], storage: Storage, geometry: ModelGeometry) -> None:
    shape = geometry.row_shape(storage.k_layout, storage.v_layout)
    for layer, pair in enumerate(pairs):
        for noun, row_bytes, bits in (("keys", shape.k_bytes, pair.k_bits), ("values", shape.v_bytes, pair.v_bits)):
            try:
                row_bytes(bits)
            except PrecisionError as error:
                raise ProfileError(f"layer {layer}, {noun}: {error}; say so with --group-size") from error


def lost_window(profile: Profile, own: ExactWindow = NO_WINDOW) -> list[LostFeature]:
    """The exact window beside quantized layers, where it is not the file's own; most files have no exact copies."""
    packed = [layer for layer, pair in enumerate(profile.pairs) if pair != NATIVE]
    if not packed or profile.window == own:
        return []
    what = str(profile.window) if own == NO_WINDOW else f"{profile.window}, where the file has {own}"
    return [LostFeature(packed[0], what)]


def uneven_layers(profile: Profile) -> list[LostFeature]:
    """The layers that a format with one width for keys and values cannot say."""
    return [
        LostFeature(layer, f"{pair} has other bits for keys than for values", _EVEN_WAY_OUT)
        for layer, pair in enumerate(profile.pairs)
        if pair.k_bits != pair.v_bits
    ]


def refusal(
    name: str, lost: Sequence[LostFeature], way_out: str = f"keep the profile's own file, or search with {EXPORTABLE}"
) -> ProfileError:
    """The error for a format that cannot say all: the first layer, what would be lost, and its own way out or this."""
    more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    return ProfileError(f"{name} cannot say all of the profile: {lost[0]}{more}; {lost[0].way_out or way_out}")
