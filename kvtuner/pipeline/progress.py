"""What a command says to a person, a line at a time, on stderr: stdout is the result's."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write one line to stderr, above bars that are there."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr, flush=True)


def say_loading() -> None:
    """Say that a command has begun: what it imports next takes seconds."""
    say("loading libraries ...")
