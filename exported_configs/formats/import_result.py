"""What a reader is told beside the file, and what it finds in it. Knows no format."""

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
    """What the user says beside the file.

    Attributes:
        file_name: last part of its path; some formats say something in it.
        model: name of the model, to be compared with what the file says.
        scheme: pertoken or kivi.
        words: what words stand for that the format has and a profile has not.
        group_size: channels per scale, in place of the format's.
        default_word: precision of layers that the file does not name.
        symmetric: grids around zero, where the format does not say.
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
        """Flags that the user gave and that are not of these fields."""
        for each in fields(self):
            if "flag" in each.metadata and each.name not in names and getattr(self, each.name) not in (None, {}):
                yield each.metadata["flag"]

    def group_sizes(self, geometry: ModelGeometry) -> tuple[int, int]:
        """Channels per scale of keys and of values where the format has none of its own: one group per head."""
        return self.group_size or geometry.head_dim, self.group_size or geometry.v_head_dim


@dataclass(frozen=True, slots=True)
class Imported:
    """How a file stores a model's layers.

    Attributes:
        layers: widths of every layer, in order.
        k_group_size: as in a profile: channels, or tokens if keys are per channel.
        v_group_size: channels per scale.
        symmetric: grids around zero.
        k_granularity: of the keys.
        notes: what the user should know, one line each.
    """

    layers: tuple[PrecisionPair, ...]
    k_group_size: int
    v_group_size: int
    symmetric: bool
    k_granularity: Granularity = "per_token"
    notes: tuple[str, ...] = ()


class Vocabulary:
    """Words that the user gave a meaning, and which of them the file has."""

    def __init__(self, words: Mapping[str, PrecisionPair]) -> None:
        """Case makes no difference."""
        self._words = {word.upper(): pair for word, pair in words.items()}
        self._used: set[str] = set()

    def mapped(self, word: str) -> PrecisionPair | None:
        """What the user said that a word is; None of others."""
        pair = self._words.get(word.upper())
        if pair is not None:
            self._used.add(word.upper())
        return pair

    def notes(self) -> tuple[str, ...]:
        """What was put in place of what."""
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
        ProfileError: it has not.
    """
    if not 0 <= layer < geometry.num_layers:
        raise ProfileError(
            f"the model has layers 0-{geometry.num_layers - 1}, but the file names layer {str(layer)[:20]};"
            " give the file's own model"
        )
