"""The one table of every report, as text, Markdown and, by ``templates/parts.html``, HTML; and that of notebooks."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

RecordTable: TypeAlias = Any
"""A `pandas.DataFrame`, or `list[dict[str, Any]]`: pandas is no dependency, so that no type can name it."""
_MARKDOWN_SYNTAX: Final = "\\|<>[]*_`#"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headers.

    Attributes:
        headers: The headers of the columns; all empty where there are none to show.
        wrap: Whether a cell may take several lines on a page.
        left: The indices of the columns that stand to the left in a terminal; numbers stand to the right.
        has_winner: Whether a page marks the first row.
        failures: The texts of cells that a page marks as failures.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    wrap: bool = False
    left: tuple[int, ...] = (0,)
    has_winner: bool = False
    failures: tuple[str, ...] = ()

    @classmethod
    def of_facts(cls, rows: Sequence[tuple[str, str]]) -> Table:
        """Names and what they stand for, without headers."""
        return cls(("", ""), rows, wrap=True, left=(0, 1))

    def lines(self, width: int | None = None) -> list[str]:
        """Lines for a terminal, in columns of even width; none is wider than `width`, but for a longer cell.

        Columns that do not fit stand below, under their headers and beside the first column again. Without headers a
        row goes on in its next line; the text of facts is wrapped.
        """
        rows = [self.headers, *self.rows] if any(self.headers) else self.rows
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = [
            [
                cell.ljust(size) if index in self.left else cell.rjust(size)
                for index, (cell, size) in enumerate(zip(row, widths, strict=True))
            ]
            for row in rows
        ]
        if width is None or sum(widths) + 2 * (len(widths) - 1) <= width:
            return ["  ".join(row).rstrip() for row in padded]
        if any(self.headers):
            blocks = [["  ".join([row[0], *row[a:b]]).rstrip() for row in padded] for a, b in _spans(widths, width)]
            return [line for block in blocks for line in ("", *block)][1:]
        if len(widths) == 2:
            return [line for row in padded for line in _wrapped(row[0], row[1].split(), width)]
        return [line for row in padded for line in _continued(row, width)]

    def markdown(self) -> list[str]:
        """Lines of Markdown."""
        rule = "|" + " --- |" * len(self.headers)
        first, *others = ("| " + " | ".join(map(markdown_text, row)) + " |" for row in (self.headers, *self.rows))
        return [first, rule, *others]


def _spans(widths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """The first and the last column, exclusive, of each block that fits beside column 0; a block has one at least."""
    spans, first, used = [], 1, widths[0]
    for index, size in enumerate(widths[1:], 1):
        if index > first and used + 2 + size > width:
            spans.append((first, index))
            first, used = index, widths[0]
        used += 2 + size
    return [*spans, (first, len(widths))]


def _wrapped(name: str, words: Sequence[str], width: int) -> list[str]:
    """A name and the words of its text; a word that is too long beside names moves to the left, in its own line.

    One that is longer than a line is cut.
    """
    indent = len(name) + 2
    room = max(width - indent, 1)
    longest = max(width - 2, 1)
    pieces = [word[start : start + longest] for word in words for start in range(0, len(word), longest)]
    text = textwrap.wrap(" ".join(pieces), room, break_long_words=False, break_on_hyphens=False) or [""]
    starts = [min(indent, max(width - len(line), 2)) for line in text]
    first = f"{name}  {text[0]}" if starts[0] == indent else f"{name.rstrip()}\n{' ' * starts[0]}{text[0]}"
    rest = [" " * start + line for start, line in zip(starts[1:], text[1:], strict=True)]
    return [*first.rstrip().split("\n"), *rest]


def _continued(cells: Sequence[str], width: int) -> list[str]:
    """The padded cells of a row that go on in the next line, indented, where they do not fit; alike in every row."""
    lines = [cells[0]]
    for cell in cells[1:]:
        if len(lines[-1]) + 2 + len(cell) <= width:
            lines[-1] += f"  {cell}"
        else:
            lines.append(f"    {cell}")
    return [line.rstrip() for line in lines if line.strip()]


def markdown_text(text: str) -> str:
    """Text on one line, without what Markdown or HTML would take for its own."""
    return "".join(f"\\{c}" if c in _MARKDOWN_SYNTAX else c for c in " ".join(text.split()))


def record_table(records: Iterable[dict[str, Any]]) -> RecordTable:
    """A table for a notebook with a column for each key: a data frame where pandas is installed, else a list."""
    rows = list(records)
    return import_module("pandas").DataFrame(rows) if find_spec("pandas") else rows
