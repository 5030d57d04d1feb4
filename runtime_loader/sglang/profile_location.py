"""The way from a profile's name to its file on this machine. Imports nothing heavy until a name is looked up."""

from __future__ import annotations

import logging
import os
from typing import Final

AUTO: Final = "auto"
PIN: Final = "#"

logger: Final = logging.getLogger("kvtuner")


def is_auto(name: str) -> bool:
    """Whether the catalogue is to be asked which profile serves the model: ``auto``, or ``auto:BUDGET``, and a pin."""
    return name.partition(PIN)[0] == AUTO or name.startswith(f"{AUTO}:")


def budget_of(name: str) -> str | None:
    """The budget of ``auto:BUDGET``; None of plain ``auto``."""
    return name.partition(PIN)[0].partition(":")[2] or None


def pin_of(name: str) -> str | None:
    """The digest that ``auto#sha256:...`` pins.

    Raises:
        ProfileError: it is none.
    """
    from kvtuner.exported_configs.sharing.reference import parse_reference

    return parse_reference(name).digest


def locate(name: str) -> str:
    """The absolute path of the profile that is named, fetched from the hub if need be, and its digest as a pin.

    Every process that this one starts reads the file at that path, and refuses another profile in it. ``auto`` stays
    as it is until the model is known.

    Raises:
        KVTunerError: there is none, it is wrong, or it is not the one that was pinned.
    """
    if is_auto(name):
        return name
    from kvtuner.exported_configs.sharing.find import find_profile

    location = find_profile(name)
    for note in location.notes:
        logger.warning("kvtuner: %s", note)
    return pinned(os.path.abspath(location.path), location.profile.digest)


def pinned(path: str, digest: str) -> str:
    """A name that finds the same profile, or none."""
    return f"{path}{PIN}{digest}"
