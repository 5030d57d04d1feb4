"""Every layer of a profile as a few characters, in a strip for a terminal or a page. Knows nothing of files."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final, TextIO

from kvtuner.precision import NATIVE_BITS
from kvtuner.report.table import Table
from kvtuner.transforms import TRANSFORMS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtuner.exported_configs.profile.profile import Profile

BIT_CODES: Final = {2: "2", 3: "3", 4: "4", 8: "8", 16: "F"}
PER_CHANNEL: Final = "per channel"
KIND_CODES: Final = {**{name: kind.letter for name, kind in TRANSFORMS.items()}, PER_CHANNEL: "p"}
# Of the 256 colours: ink on paper. Darker is wider, far enough apart that lightness alone tells them.
COLOURS: Final = {"2": (16, 229), "3": (16, 151), "4": (16, 73), "8": (231, 24), "F": (231, 17)}
UNKNOWN: Final = "?"
"""The mark of a transform that this release does not know."""
NO_ROWS: Final = "."
"""The mark of a layer that stores nothing, between others that do."""
BAND: Final = 10  # layers that stay side by side on the narrowest screen
MIN_WIDTH: Final = 24  # a band beside the names of a difference
_NO_BREAK: Final = "\N{NO-BREAK SPACE}"
_NAME_WIDTH: Final = 10


@dataclass(frozen=True, slots=True)
class Terminal:
    """The columns of the terminal that text goes to, and whether colours may be written."""

    width: int = 80
    has_colour: bool = False

    @classmethod
    def of_stdout(cls) -> Terminal:
        """The terminal that stdout goes to; 80 columns, or those of the variable COLUMNS, where it goes elsewhere."""
        return cls(max(MIN_WIDTH, shutil.get_terminal_size().columns), wants_colour(sys.stdout, os.environ))


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """NO_COLOR forbids it, else FORCE_COLOR demands it, else colour is for terminals that are not ``TERM=dumb``."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return environment.get("TERM") != "dumb" and stream.isatty()


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer as reports show it; keys per channel have `PER_CHANNEL` in place of a transform."""

    layer: int
    k_bits: int
    v_bits: int
    k_transform: str
    v_transform: str

    @property
    def pair(self) -> str:
        """The bits of keys and values, such as ``K8V4``."""
        return f"K{self.k_bits}V{self.v_bits}"

    @property
    def text(self) -> str:
        """A sentence for those who do not see the strip."""
        keys, values = (
            f"{bits} bits" if transform == "none" else f"{bits} bits {transform}"
            for bits, transform in ((self.k_bits, self.k_transform), (self.v_bits, self.v_transform))
        )
        return f"keys {keys}, values {values}"


def profile_layers(profile: Profile) -> tuple[LayerRow, ...]:
    """The rows of all layers that own a cache, in order."""
    is_per_channel = profile.defaults.k.granularity == "per_channel"
    return tuple(
        LayerRow(
            entry.layer,
            entry.pair.k_bits,
            entry.pair.v_bits,
            PER_CHANNEL if is_per_channel and entry.k.bits != NATIVE_BITS else profile.transform_name(entry.layer, "k"),
            profile.transform_name(entry.layer, "v"),
        )
        for entry in profile.layers
    )


def kinds_used(layers: Iterable[LayerRow]) -> list[tuple[str, str]]:
    """(code, name) of the transforms that occur, in one order for all profiles."""
    used = {name for row in layers for name in (row.k_transform, row.v_transform)}
    return [(code, name) for name, code in KIND_CODES.items() if name in used]


def bits_used(layers: Iterable[LayerRow]) -> list[int]:
    """The widths that occur, ascending."""
    return sorted({bits for row in layers for bits in (row.k_bits, row.v_bits)})


def layer_table(layers: Iterable[LayerRow], keys: str, values: str) -> Table:
    """The bits and transforms of every layer, under these headers."""
    rows = [(str(row.layer), row.pair, row.k_transform, row.v_transform) for row in layers]
    return Table(("layer", "bits", keys, values), rows)


def tracks(layers: Sequence[LayerRow], prefix: str = "") -> dict[str, str]:
    """The lines of a strip by name, a character for each layer: widths of keys and values, then their transforms."""
    lines = {
        "K bits": {row.layer: BIT_CODES[row.k_bits] for row in layers},
        "V bits": {row.layer: BIT_CODES[row.v_bits] for row in layers},
        "K transform": {row.layer: KIND_CODES.get(row.k_transform, UNKNOWN) for row in layers},
        "V transform": {row.layer: KIND_CODES.get(row.v_transform, UNKNOWN) for row in layers},
    }
    total = 1 + max(row.layer for row in layers)
    return {
        f"{prefix}{name}": "".join(codes.get(layer, NO_ROWS) for layer in range(total)) for name, codes in lines.items()
    }


def profile_strip(profile: Profile, terminal: Terminal) -> list[str]:
    """The strip of a profile with its legend, as lines for a terminal."""
    layers = profile_layers(profile)
    return [*strip_lines(tracks(layers), terminal), *legend((layers,), terminal)]


def strip_lines(rows: Mapping[str, str], terminal: Terminal) -> list[str]:
    """Tracks under a ruler, in bands as wide as the terminal allows; a bar stands at every tenth layer."""
    indent = max(map(len, rows)) + 1
    # Whole bands of ten, so that every line of the ruler begins at a round number.
    size = max(BAND, (terminal.width - indent) // BAND * BAND)
    total, lines = len(next(iter(rows.values()))), []
    for first in range(0, total, size):
        end = min(first + size, total)
        ruler = "".join(f"|{layer}".ljust(BAND) for layer in range(first, end, BAND))
        lines += [""] * bool(first) + [("layer".ljust(indent) + ruler).rstrip()]
        for name, codes in rows.items():
            cells = codes[first:end]
            if name.endswith("bits"):
                cells = "".join(_painted("".join(run), terminal) for _, run in groupby(cells))
            lines.append((name.ljust(indent) + cells).rstrip())
    return lines


def legend(strips: Sequence[Sequence[LayerRow]], terminal: Terminal) -> list[str]:
    """The meaning of the characters of strips, as far as they occur."""
    layers = [row for rows in strips for row in rows]
    codes = [(BIT_CODES[bits], str(bits)) for bits in bits_used(layers)]
    bits = " ".join(_painted(code, terminal) + (f"={name}" if code != name else "") for code, name in codes)
    kinds = "  ".join(f"{code}={name.replace('+', f'{_NO_BREAK}+{_NO_BREAK}')}" for code, name in kinds_used(layers))
    gap = f"  {NO_ROWS}=stores nothing" if any(rows[-1].layer >= len(rows) for rows in strips) else ""
    transforms = [line.replace(_NO_BREAK, " ") for line in indented("transform", f"before rounding: {kinds}", terminal)]
    return ["", f"{'bits':<{_NAME_WIDTH}}{bits}{gap}", *transforms]


def indented(name: str, text: str, terminal: Terminal) -> list[str]:
    """A named line of text, wrapped."""
    return textwrap.wrap(
        text, terminal.width, initial_indent=f"{name:<{_NAME_WIDTH}}", subsequent_indent=" " * _NAME_WIDTH
    )


def _painted(run: str, terminal: Terminal) -> str:
    if not terminal.has_colour or run[0] == NO_ROWS:
        return run
    ink, paper = COLOURS[run[0]]
    return f"\x1b[38;5;{ink};48;5;{paper}m{run}\x1b[0m"
