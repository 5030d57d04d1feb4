"""Layers as a strip of characters under a ruler, wrapped and coloured for a terminal. Knows nothing of files."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

from kvtuner.report.layer_codes import BIT_CODES, KIND_CODES, bits_used, kinds_used, layer_codes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.report.layer_codes import LayerCode
    from kvtuner.report.terminal import Terminal

TEN: Final = 10
# Of the 256 colours: ink on paper. Darker is wider, far enough apart that lightness alone tells them.
COLOURS: Final = {"2": (16, 222), "4": (16, 73), "8": (231, 24), "F": (231, 17)}


@dataclass(frozen=True, slots=True)
class Track:
    """One row of a strip.

    Attributes:
        name: before it.
        cells: one character for each layer.
        is_bits: whether they are widths, which have colours.
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
    """A profile's strip with its legend."""
    codes = layer_codes(profile)
    return [*strip_lines(tracks(codes), terminal), *legend(codes, terminal)]


def strip_lines(rows: Sequence[Track], terminal: Terminal) -> list[str]:
    """Rows of one length under a ruler, in bands as wide as the terminal allows; a bar stands at every tenth layer."""
    indent = max(len(row.name) for row in rows) + 1
    size = max(TEN, (terminal.width - indent) // TEN * TEN)
    total, lines = len(rows[0].cells), []
    for first in range(0, total, size):
        if first:
            lines.append("")
        band = range(first, min(first + size, total))
        lines.append(("layer".ljust(indent) + _ruler(band)).rstrip())
        lines += [(row.name.ljust(indent) + _cells(row, band, terminal)).rstrip() for row in rows]
    return lines


def legend(codes: Iterable[LayerCode], terminal: Terminal) -> list[str]:
    """What the characters of a strip mean, as far as they occur."""
    codes = tuple(codes)
    bits = "  ".join(
        _painted(code, terminal) + (f"={bits}" if code != str(bits) else "") for code, bits in bits_used(codes)
    )
    kinds = "  ".join(f"{code}={name.replace('+', ' + ')}" for code, name in kinds_used(codes))
    return ["", f"bits   {bits}", *indented("kind", kinds, terminal)]


def indented(name: str, text: str, terminal: Terminal) -> list[str]:
    """A named line of words, wrapped."""
    blank = " " * 7
    return textwrap.wrap(text, terminal.width, initial_indent=f"{name:<7}", subsequent_indent=blank)


def _ruler(band: range) -> str:
    return "".join(f"|{layer}".ljust(TEN) for layer in band[::TEN])


def _cells(row: Track, band: range, terminal: Terminal) -> str:
    cells = row.cells[band.start : band.stop]
    if not row.is_bits:
        return cells
    return "".join(_painted("".join(run), terminal) for _, run in groupby(cells))


def _painted(run: str, terminal: Terminal) -> str:
    """Equal widths in their colour."""
    if not terminal.has_colour:
        return run
    ink, paper = COLOURS[run[0]]
    return f"\x1b[38;5;{ink};48;5;{paper}m{run}\x1b[0m"
