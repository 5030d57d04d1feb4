"""The one table of every report, as text, Markdown and, by ``templates/parts.html``, HTML; and that of notebooks."""

from __future__ import annotations

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
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    wrap: bool = False
    left: tuple[int, ...] = (0,)
    has_winner: bool = False

    @classmethod
    def of_facts(cls, rows: Sequence[tuple[str, str]]) -> Table:
        """Names and what they stand for, without headers."""
        return cls(("", ""), rows, wrap=True, left=(0, 1))

    def lines(self) -> list[str]:
        """Lines for a terminal, in columns of even width."""
        rows = [self.headers, *self.rows] if any(self.headers) else self.rows
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            "  ".join(
                cell.ljust(width) if index in self.left else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]

    def markdown(self) -> list[str]:
        """Lines of Markdown."""
        rule = "|" + " --- |" * len(self.headers)
        first, *others = ("| " + " | ".join(map(markdown_text, row)) + " |" for row in (self.headers, *self.rows))
        return [first, rule, *others]


def markdown_text(text: str) -> str:
    """Text on one line, without what Markdown or HTML would take for its own."""
    return "".join(f"\\{c}" if c in _MARKDOWN_SYNTAX else c for c in " ".join(text.split()))


def record_table(records: Iterable[dict[str, Any]]) -> RecordTable:
    """A table for a notebook with a column for each key: a data frame where pandas is installed, else a list."""
    rows = list(records)
    return import_module("pandas").DataFrame(rows) if find_spec("pandas") else rows
