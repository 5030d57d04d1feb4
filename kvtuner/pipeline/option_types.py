"""Readers of an option's text, a function for each kind of value. Knows nothing of flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtuner.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_SEED: Final = 2**31
MIN_REPORT_SEQUENCES: Final = 2
"""The sequences that an interval needs."""


def positive(text: str) -> int:
    """A count of at least 1."""
    value = int(text)
    if value < 1:
        raise OptionError(f"must be at least 1, not {value}")
    return value


def several(text: str) -> int:
    """A count of at least 2, which an interval needs."""
    value = int(text)
    if value < 2:
        raise OptionError(f"intervals need at least 2, not {value}")
    return value


def seed(text: str) -> int:
    """A seed that every generator takes."""
    value = int(text)
    if not 0 <= value < MAX_SEED:
        raise OptionError(f"must be within 0..{MAX_SEED - 1}, not {value}")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Counts between commas, ascending, each once."""
    return tuple(sorted({positive(part) for part in text.split(",")}))


def sequences(text: str) -> tuple[int, int, int]:
    """Counts of the three splits; one count is all three."""
    splits = [positive(part) for part in text.split(",")]
    if len(splits) == 1:
        splits *= 3
    if len(splits) != 3:
        raise OptionError(f"one count or three (calibrate,select,report), not {text!r}")
    if splits[2] < MIN_REPORT_SEQUENCES:
        raise OptionError("the report split needs at least 2 sequences for its intervals")
    return splits[0], splits[1], splits[2]


def names(choices: Sequence[str] = ()) -> Callable[[str], tuple[str, ...]]:
    """A function that reads names between commas, each of them one of the choices where there are any."""

    def parse(text: str) -> tuple[str, ...]:
        parts = tuple(part.strip() for part in text.split(",") if part.strip())
        if not parts:
            raise OptionError("name one at least")
        for part in parts:
            if choices and part not in choices:
                raise OptionError(f"{part!r} is none of {', '.join(choices)}")
        return parts

    return parse


def endpoint(text: str) -> tuple[str, str]:
    """A scheme and the URL of its server; the profile where no scheme is named."""
    scheme, is_named, url = text.partition("=")
    if not is_named or "://" in scheme:
        scheme, url = "profile", text
    if not url.startswith(("http://", "https://")):
        raise OptionError(f"an endpoint is http://HOST:PORT, or SCHEME=http://HOST:PORT, not {text!r}")
    return scheme, url
