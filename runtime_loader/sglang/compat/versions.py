"""Which releases of SGLang the seams fit."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from kvtuner.errors import ServingError

TESTED: Final = ("0.5.23",)
FIRST, BEYOND = (0, 5, 22), (0, 5, 24)


def check_version() -> None:
    """Refuse an SGLang whose seams were never looked at.

    Raises:
        ServingError: names the version found and those that work.
    """
    found = version("sglang")
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:3] if part.isdigit())
    if not FIRST <= numbers < BEYOND:
        raise ServingError(
            f"this kvtuner serves with sglang >=0.5.22,<0.5.24 (tested: {', '.join(TESTED)}), but {found} is installed;"
            " install one of those, or a newer kvtuner"
        )
