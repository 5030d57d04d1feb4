"""Numbers, names and tables as every report writes them. Knows nothing of what they mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.evaluation.statistics import Interval
    from kvtuner.exported_configs.profile.evaluation_record import CellResult, PairedDifference
    from kvtuner.exported_configs.profile.evidence import IntervalRecord, ModelIdentity

NOT_MEASURED: Final = "-"
_MARKDOWN_SYNTAX: Final = "\\|<>[]*_`#"


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits, with an exponent below 0.001: ``0.0490``, ``4.10e-5``, ``0``."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    text = f"{value:#.{digits}g}"
    return f"{value:.0f}" if "e" in text else text.removesuffix(".")


def interval(value: Interval | IntervalRecord | CellResult | PairedDifference | None) -> str:
    """``mean [low, high]``."""
    return NOT_MEASURED if value is None else f"{number(value.mean)} [{number(value.low)}, {number(value.high)}]"


def fixed(value: float | None, decimals: int = 2) -> str:
    """A fixed number of decimals; with an exponent from ten million on, as a broken model's perplexity may need."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    return f"{value:,.{decimals}f}" if abs(value) < 1e7 else f"{value:.2e}"


def count(value: int | None) -> str:
    """A count with commas."""
    return NOT_MEASURED if value is None else f"{value:,}"


def percent(share: float | None) -> str:
    """A share in [0, 1] as a percentage of one decimal."""
    return NOT_MEASURED if share is None or not math.isfinite(share) else f"{100 * share:.1f}%"


def printable(text: str) -> str:
    """Text without control characters: a profile may come from anybody."""
    return "".join(c if c.isprintable() else "?" for c in text)


def ascii_text(text: str) -> str:
    """Printable text in letters that every terminal and every font has."""
    return printable(text.encode("ascii", "replace").decode())


def model_name(model: ModelIdentity) -> str:
    """The id of a model, with its revision where there is one."""
    return f"{model.id}@{model.revision}" if model.revision else model.id


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headers, for a terminal and for Markdown; ``templates/parts.html`` shows it on a page.

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
