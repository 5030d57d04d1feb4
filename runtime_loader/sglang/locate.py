"""From what a launcher was told to the profile's file on this machine. Imports nothing heavy until it is told."""

from __future__ import annotations

import logging
import os
from typing import Final

AUTO: Final = "auto"

logger: Final = logging.getLogger("kvtuner")


def is_auto(name: str) -> bool:
    """Whether the catalogue is to be asked which profile serves the model: ``auto``, or ``auto:BUDGET``."""
    return name == AUTO or name.startswith(f"{AUTO}:")


def budget_of(name: str) -> str | None:
    """The budget of ``auto:BUDGET``; None of plain ``auto``."""
    return name.partition(":")[2] or None


def locate(name: str) -> str:
    """The absolute path of the profile that is named, fetched from the hub if need be; ``auto`` stays as it is.

    Every process that this one starts reads the file at that path, whatever becomes of a branch meanwhile.

    Raises:
        KVTunerError: there is none, it is wrong, or it is not the one that was pinned.
    """
    if is_auto(name):
        return name
    from kvtuner.exported_configs.find import find_profile

    found = find_profile(name)
    for note in found.notes:
        logger.warning("kvtuner: %s", note)
    return os.path.abspath(found.path)
