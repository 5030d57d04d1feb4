"""Bytes and tokens as a user writes them, in budgets and in flags: ``40GiB``, ``64k``. Knows nothing of models."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

# Numbers of bounded length: exact arithmetic on any text that a user gives stays quick.
NUMBER: Final = r"(\d{1,12}(?:\.\d{1,15})?)"
BYTES: Final = rf"{NUMBER} ?([KMGT]I?B|B)"
TOKENS: Final = r"(\d{1,9})(K?)"
"""Patterns of texts in upper case: a number, one with a unit of bytes, and a count of tokens."""
_UNIT_BYTES: Final[dict[str, int]] = {"B": 1} | {
    prefix + suffix: base ** (1 + "KMGT".index(prefix))
    for prefix in "KMGT"
    for suffix, base in (("B", 1000), ("IB", 1024))
}


def bytes_of_unit(unit: str) -> int:
    """The bytes of a unit in upper case."""
    return _UNIT_BYTES[unit]


def count_of_tokens(number: str, thousands: str) -> int:
    """The tokens of the two parts of `TOKENS`; ``K`` is 1024."""
    return int(number) * (1024 if thousands else 1)


def amount_of_bytes(text: str) -> Fraction | None:
    """Bytes with or without a unit, in any case; None for any other text."""
    # Options that hold bytes are read once more, so that plain numbers have room for those of the largest unit.
    match = re.fullmatch(rf"{BYTES}|(?P<plain>\d{{1,18}}(?:\.\d{{1,15}})?)", text.strip().upper(), re.ASCII)
    if match is None:
        return None
    return Fraction(match["plain"]) if match["plain"] else Fraction(match[1]) * bytes_of_unit(match[2])


def amount_of_tokens(text: str) -> int | None:
    """A count of tokens, ``32768`` or ``32k``; None for any other text."""
    match = re.fullmatch(TOKENS, text.strip().upper(), re.ASCII)
    return None if match is None else count_of_tokens(*match.groups())
