"""Readers of the numbers that flags take, which refuse others by an `OptionError`. Imports nothing heavy."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final, Literal

from kvtuner.errors import OptionError
from kvtuner.precision import MAX_RESIDUAL_LENGTH
from kvtuner.search_spaces.amounts import amount_of_bytes, amount_of_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_SEED: Final = 2**31
MIN_REPORT_SEQUENCES: Final = 2
"""The sequences that an interval needs."""
_SECONDS: Final = {None: 1, "s": 1, "min": 60, "h": 3600}


def whole_number(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"must be a whole number, not {text!r}") from None


def positive(text: str) -> int:
    """A count of at least 1."""
    return _at_least(1, whole_number(text))


def from_zero(text: str) -> int:
    """A count of at least 0."""
    return _at_least(0, whole_number(text))


def several(text: str) -> int:
    """A count of at least 2, which an interval needs."""
    value = whole_number(text)
    if value < 2:
        raise OptionError(f"intervals need at least 2, not {value}")
    return value


def token_count(text: str) -> int:
    """A count of tokens of at least 1; ``32k`` is 32 * 1024."""
    return _at_least(1, tokens_from_zero(text))


def tokens_from_zero(text: str) -> int:
    """A count of tokens, or 0."""
    value = amount_of_tokens(text)
    if value is None:
        raise OptionError(f"must be a whole number of tokens, such as 32768 or 32k, not {text!r}")
    return value


def port_number(text: str) -> int:
    """A TCP port, or 0."""
    value = whole_number(text)
    if not 0 <= value < 2**16:
        raise OptionError(f"a port is within 0..65535, not {value}")
    return value


def byte_count(text: str) -> int:
    """A number of bytes of at least 1, with or without a unit of budgets."""
    value = int(amount_of_bytes(text) or 0)
    if value < 1:
        raise OptionError(f"bytes are written 512MiB or 40GiB, not {text!r}")
    return value


def finite_number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise OptionError(f"must be a number, not {text!r}")
    return value


def bytes_per_second(text: str) -> float:
    """A bandwidth in bytes per second, of a text in GB/s."""
    value = finite_number(text)
    if value <= 0:
        raise OptionError(f"must be above 0, not {text}")
    return value * 1e9


def second_count(text: str) -> int:
    """A time of at least one second, in whole seconds; ``10min`` is 600."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)\s*(s|min|h)?", text.strip().lower(), re.ASCII)
    value = int(float(match[1]) * _SECONDS[match[2]]) if match else 0
    if value < 1:
        raise OptionError(f"a time is written 90s, 10min or 1.5h, not {text!r}")
    return value


def window_length(text: str) -> int | Literal["auto"]:
    """A count of the last tokens, or ``auto``."""
    if text == "auto":
        return "auto"
    if amount_of_tokens(text.removeprefix("-")) is None:
        raise OptionError(f"must be a whole number of tokens, or auto, not {text!r}")
    return tokens_up_to(MAX_RESIDUAL_LENGTH)(text)


def tokens_up_to(most: int) -> Callable[[str], int]:
    """A reader of a count of tokens from 0 to `most`."""

    def read(text: str) -> int:
        value = amount_of_tokens(text)
        if value is None or value > most:
            raise OptionError(f"must be within 0..{most} tokens, not {text}")
        return value

    return read


def seed(text: str) -> int:
    """A seed that every generator takes."""
    value = whole_number(text)
    if not 0 <= value < MAX_SEED:
        raise OptionError(f"must be within 0..{MAX_SEED - 1}, not {value}")
    return value


def sequences(text: str) -> tuple[int, int, int]:
    """Counts of the three splits; one count is all three."""
    splits = [positive(part) for part in text.split(",")]
    if len(splits) == 1:
        splits *= 3
    if len(splits) != 3:
        raise OptionError(f"must be one count or three (calibrate,select,report), not {text!r}")
    if splits[2] < MIN_REPORT_SEQUENCES:
        raise OptionError(
            f"must have at least {MIN_REPORT_SEQUENCES} to report on, which intervals need, not {splits[2]}"
        )
    return splits[0], splits[1], splits[2]


def counts(text: str) -> tuple[int, ...]:
    """Counts between commas, ascending, each once."""
    return tuple(sorted({positive(part) for part in text.split(",")}))


def token_counts(text: str) -> tuple[int, ...]:
    """Counts of tokens between commas, ascending, each once."""
    return tuple(sorted({token_count(part) for part in text.split(",")}))


def _at_least(least: int, value: int) -> int:
    if value < least:
        raise OptionError(f"must be at least {least}, not {value}")
    return value
