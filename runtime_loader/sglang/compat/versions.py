"""Which releases of SGLang the seams fit."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from kvtuner.errors import ServingError

TESTED: Final = "0.5.23"


def check_version() -> None:
    """Refuse an SGLang whose seams were never looked at.

    Raises:
        ServingError: names the version found and those that work.
    """
    found = version("sglang")
    if found.partition("+")[0].partition(".post")[0] != TESTED:
        raise ServingError(
            f"this kvtuner serves with sglang {TESTED}, but {found} is installed; install that one, or a newer kvtuner"
        )
