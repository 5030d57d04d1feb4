"""Every layer of a profile as a few characters, in a strip for a terminal or a page. Knows nothing of files."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

from kvtuner.precision import NATIVE_BITS
from kvtuner.transforms import TRANSFORMS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.report.terminal import Terminal

BIT_CODES: Final = {2: "2", 4: "4", 8: "8", 16: "F"}
PER_CHANNEL: Final = "per channel"
KIND_CODES: Final = {**{name: kind.letter for name, kind in TRANSFORMS.items()}, PER_CHANNEL: "p"}
# Of the 256 colours: ink on paper. Darker is wider, far enough apart that lightness alone tells them.
COLOURS: Final = {"2": (16, 222), "4": (16, 73), "8": (231, 24), "F": (231, 17)}
BAND: Final = 10  # layers that stay side by side on the narrowest screen


@dataclass(frozen=True, slots=True)
class LayerCode:
    """How one layer is stored.

    Attributes:
        layer: The global id of the layer.
        k_bits: The width of keys.
        v_bits: The width of values.
        k_kind: A name of `KIND_CODES`: the transform of keys, or `PER_CHANNEL`, which has none.
        v_kind: The transform of values.
    """

    layer: int
    k_bits: int
    v_bits: int
    k_kind: str
    v_kind: str

    def text(self) -> str:
        """A sentence for those who do not see the strip."""
        keys, values = (
            f"{bits} bits" if kind == "none" else f"{bits} bits {kind}"
            for bits, kind in ((self.k_bits, self.k_kind), (self.v_bits, self.v_kind))
        )
        return f"keys {keys}, values {values}"


def layer_codes(profile: Profile) -> tuple[LayerCode, ...]:
    """The codes of all layers, in order."""
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


@dataclass(frozen=True, slots=True)
class Track:
    """One row of a strip.

    Attributes:
        name: The name before the row.
        cells: The characters, one for each layer.
        is_bits: Whether the characters are widths, which have colours.
    """

    name: str
    cells: str
    is_bits: bool = False


def tracks(codes: Sequence[LayerCode], prefix: str = "") -> list[Track]:
    """Widths of keys and values, and how they are transformed."""
    return [
        Track(f"{prefix}K bits", "".join(BIT_CODES[code.k_bits] for code in codes), is_bits=True),
        Track(f"{prefix}V bits", "".join(BIT_CODES[code.v_bits] for code in codes), is_bits=True),
        Track(f"{prefix}K kind", "".join(KIND_CODES[code.k_kind] for code in codes)),
        Track(f"{prefix}V kind", "".join(KIND_CODES[code.v_kind] for code in codes)),
    ]


def profile_strip(profile: Profile, terminal: Terminal) -> list[str]:
    """The strip of a profile with its legend, as lines for a terminal."""
    codes = layer_codes(profile)
    return [*strip_lines(tracks(codes), terminal), *legend(codes, terminal)]


def strip_lines(rows: Sequence[Track], terminal: Terminal) -> list[str]:
    """Rows of one length under a ruler, in bands as wide as the terminal allows; a bar stands at every tenth layer."""
    indent = max(len(row.name) for row in rows) + 1
    size = max(BAND, (terminal.width - indent) // BAND * BAND)
    total, lines = len(rows[0].cells), []
    for first in range(0, total, size):
        band = range(first, min(first + size, total))
        ruler = "".join(f"|{layer}".ljust(BAND) for layer in band[::BAND])
        lines += [""] * bool(first) + [("layer".ljust(indent) + ruler).rstrip()]
        lines += [(row.name.ljust(indent) + _cells(row, band, terminal)).rstrip() for row in rows]
    return lines


def legend(codes: Sequence[LayerCode], terminal: Terminal) -> list[str]:
    """What the characters of a strip mean, as far as they occur."""
    bits = "  ".join(
        _painted(code, terminal) + (f"={bits}" if code != str(bits) else "") for code, bits in bits_used(codes)
    )
    kinds = "  ".join(f"{code}={name.replace('+', ' + ')}" for code, name in kinds_used(codes))
    return ["", f"bits   {bits}", *indented("kind", kinds, terminal)]


def indented(name: str, text: str, terminal: Terminal) -> list[str]:
    """A named line of text, wrapped."""
    return textwrap.wrap(text, terminal.width, initial_indent=f"{name:<7}", subsequent_indent=" " * 7)


def _cells(row: Track, band: range, terminal: Terminal) -> str:
    cells = row.cells[band.start : band.stop]
    return "".join(_painted("".join(run), terminal) for _, run in groupby(cells)) if row.is_bits else cells


def _painted(run: str, terminal: Terminal) -> str:
    """Equal widths in their colour."""
    if not terminal.has_colour:
        return run
    ink, paper = COLOURS[run[0]]
    return f"\x1b[38;5;{ink};48;5;{paper}m{run}\x1b[0m"


@dataclass(frozen=True, slots=True)
class StripColumn:
    """One layer of a strip on a page.

    Attributes:
        text: The sentence for those who do not see the cells.
        cells: The text and the CSS class of each cell, from above.
    """

    text: str
    cells: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class PageStrip:
    """A strip on a page; ``templates/parts.html`` shows it.

    Attributes:
        names: The names of the cells of a column, from above.
        bands: The columns, in bands that fit the narrowest screen.
    """

    names: tuple[str, ...]
    bands: tuple[tuple[StripColumn, ...], ...]


def page_strip(*profiles: Sequence[LayerCode], changed: Mapping[int, str] | None = None) -> PageStrip:
    """One column for each layer: its number, then widths and kinds of every profile.

    Args:
        *profiles: The layers of each profile; all have as many.
        changed: What differs, by layer; None draws no marks.
    """
    prefixes = [""] if len(profiles) == 1 else [f"{number}: " for number in range(1, len(profiles) + 1)]
    names = [f"{prefix}{name}" for prefix in prefixes for name in ("K", "V", "K kind", "V kind")]
    columns = [_column(codes, changed) for codes in zip(*profiles, strict=True)]
    bands = tuple(tuple(columns[first : first + BAND]) for first in range(0, len(columns), BAND))
    return PageStrip(("layer", *names, *([] if changed is None else ["changed"])), bands)


def _column(codes: Sequence[LayerCode], changed: Mapping[int, str] | None) -> StripColumn:
    layer = codes[0].layer
    text = f"layer {layer}: " + "; then ".join(code.text() for code in codes)
    cells = [(str(layer), "number")]
    for code in codes:
        cells += [(str(bits), f"cell b{bits}") for bits in (code.k_bits, code.v_bits)]
        cells += [(KIND_CODES[kind], "cell kind") for kind in (code.k_kind, code.v_kind)]
    if changed is not None:
        change = changed.get(layer)
        text += f"; changed: {change}" if change else "; not changed"
        cells.append((" " if change is None else "~" if change == "constants" else "^", "mark"))
    return StripColumn(text, tuple(cells))
