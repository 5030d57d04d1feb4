"""A command of the command line. Its module imports heavy modules only when the command runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Command:
    """A command.

    Attributes:
        name: The name, as it is typed.
        summary: The line of help.
        add_flags: The function that adds the command's own flags to its parser.
        run: The function that runs it and returns the exit status.
    """

    name: str
    summary: str
    add_flags: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
