"""The options of an import beside the file, and its result. Knows no format."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from kvtuner.errors import PrecisionError, ProfileError
from kvtuner.precision import PrecisionPair

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from kvtuner.geometry import ModelGeometry
    from kvtuner.precision import Granularity


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """The options that the user adds to the file.

    Attributes:
        file_name: The last part of the file's path, which some formats read.
        model: The name of the model, to be compared with what the file says.
        scheme: pertoken or kivi.
        words: The widths that stand for words which the format has and a profile has not.
        group_size: The channels per scale, in place of the format's.
        default_word: The precision of layers that the file does not name.
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

    def group_sizes(self, geometry: ModelGeometry) -> tuple[int, int]:
        """The channels per scale of keys and of values where the format has none of its own: one group per head."""
        return self.group_size or geometry.head_dim, self.group_size or geometry.v_head_dim


@dataclass(frozen=True, slots=True)
class Imported:
    """The layers of a model as a file stores them.

    Attributes:
        layers: The widths of every layer, in order.
        k_group_size: The channels per scale of keys, or the tokens where keys are per channel.
        v_group_size: The channels per scale of values.
        symmetric: Whether grids lie around zero.
        k_granularity: The granularity of the keys.
        notes: Advice to the user, one line each.
    """

    layers: tuple[PrecisionPair, ...]
    k_group_size: int
    v_group_size: int
    symmetric: bool
    k_granularity: Granularity = "per_token"
    notes: tuple[str, ...] = ()


class Vocabulary:
    """The words that the user maps to widths, and which of them the file has."""

    def __init__(self, words: Mapping[str, PrecisionPair]) -> None:
        """Start with no word used; capitals make no difference."""
        self._words = {word.upper(): pair for word, pair in words.items()}
        self._used: set[str] = set()

    def mapped(self, word: str) -> PrecisionPair | None:
        """The widths that the user maps a word to; None for other words."""
        pair = self._words.get(word.upper())
        if pair is not None:
            self._used.add(word.upper())
        return pair

    def notes(self) -> tuple[str, ...]:
        """One note for each word: what stands in its place, or that no layer has it."""
        return tuple(
            f"{word} is stored as {pair}: integers with scales made while serving, another format than {word}"
            if word in self._used
            else f"--map {word}={pair} was not needed: no layer has {word}"
            for word, pair in self._words.items()
        )


def parse_map(text: str) -> dict[str, PrecisionPair]:
    """Read ``FP8=8,FP8_K_NVFP4_V=K8V4``.

    Raises:
        ProfileError: an entry that cannot be read, or a word that stands twice.
    """
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


def check_layer_id(layer: int, geometry: ModelGeometry) -> None:
    """Check that the model has a layer with a cache of its own.

    Raises:
        ProfileError: the model has no such layer.
    """
    if not 0 <= layer < geometry.num_layers:
        raise ProfileError(
            f"the model has layers 0-{geometry.num_layers - 1}, but the file names layer {str(layer)[:20]};"
            " give the file's own model"
        )
