"""Progress for a person: the one place that writes to stderr, so that stdout stays the result's."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write one line to stderr."""
    print(text, file=sys.stderr, flush=True)
