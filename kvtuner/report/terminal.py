"""The width and the colours of a terminal. Knows nothing of what is shown."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping

MIN_WIDTH: Final = 20


@dataclass(frozen=True, slots=True)
class Terminal:
    """The columns of the terminal that text goes to, and whether colours may be written."""

    width: int = 80
    has_colour: bool = False

    @classmethod
    def of_stdout(cls) -> Terminal:
        """The terminal that stdout goes to; 80 columns, or those of the variable COLUMNS, where it goes elsewhere."""
        return cls(max(MIN_WIDTH, shutil.get_terminal_size().columns), wants_colour(sys.stdout, os.environ))


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """NO_COLOR forbids it, else FORCE_COLOR demands it, else colour is for terminals that are not ``TERM=dumb``."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return environment.get("TERM") != "dumb" and stream.isatty()
