"""The releases of SGLang that the modules beside this one fit."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from kvtuner.errors import ServingError

TESTED: Final = "0.5.23"


def check_version() -> None:
    """Refuse a release of SGLang that was never tested.

    Raises:
        ServingError: Another version is installed; it and the one that works are named.
    """
    installed = version("sglang")
    if installed.partition("+")[0].partition(".post")[0] != TESTED:
        raise ServingError(
            f"this kvtuner serves with sglang {TESTED}, but {installed} is installed; install that one, or a"
            " newer kvtuner"
        )
