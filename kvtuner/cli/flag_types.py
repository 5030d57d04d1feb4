"""What the texts of flags mean: a function of the text for each kind of value."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvtuner.pipeline.options import MAX_SEED, MIN_REPORT_SEQUENCES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def positive(text: str) -> int:
    """A count of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def several(text: str) -> int:
    """A count of at least 2, which an interval needs."""
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"intervals need at least 2, not {value}")
    return value


def endpoint(text: str) -> tuple[str, str]:
    """A scheme and the URL of its server; the profile where no scheme is named."""
    scheme, is_named, url = text.partition("=")
    if not is_named or "://" in scheme:
        scheme, url = "profile", text
    if not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"an endpoint is http://HOST:PORT, or SCHEME=http://HOST:PORT, not {text!r}")
    return scheme, url


def counts(text: str) -> tuple[int, ...]:
    """Counts between commas, ascending, each once."""
    return tuple(sorted({positive(part) for part in text.split(",")}))


def words(known: Sequence[str] = ()) -> Callable[[str], tuple[str, ...]]:
    """A function that reads words between commas, each of them known where any are."""

    def parse(text: str) -> tuple[str, ...]:
        parts = tuple(part.strip() for part in text.split(",") if part.strip())
        if not parts:
            raise argparse.ArgumentTypeError("name one at least")
        for part in parts:
            if known and part not in known:
                raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(known)}")
        return parts

    return parse


def seed(text: str) -> int:
    """A seed that every generator takes."""
    value = int(text)
    if not 0 <= value < MAX_SEED:
        raise argparse.ArgumentTypeError(f"must be within 0..{MAX_SEED - 1}, not {value}")
    return value


def sequences(text: str) -> tuple[int, int, int]:
    """Counts of the three splits; one count is all three."""
    splits = [positive(part) for part in str(text).split(",")]
    if len(splits) == 1:
        splits *= 3
    if len(splits) != 3:
        raise argparse.ArgumentTypeError(f"one count or three (calibrate,select,report), not {text!r}")
    if splits[2] < MIN_REPORT_SEQUENCES:
        raise argparse.ArgumentTypeError("the report split needs at least 2 sequences for its intervals")
    return splits[0], splits[1], splits[2]
