"""The progress bar of every loop: a bar on a terminal, a plain line now and then elsewhere. Writes to stderr alone."""

from __future__ import annotations

import sys
from typing import Any, Final

from tqdm import tqdm

LINE_INTERVAL_S: Final = 30.0
"""The least seconds between two lines of one bar where stderr is no terminal, and before its first."""
_LINE: Final = "{desc}: {n_fmt} of {total_fmt} ({percentage:.0f} %), about {remaining} left"


class ProgressBar(tqdm):  # type: ignore[misc]  # tqdm is not typed
    """A bar of tqdm, with its options; where stderr is no terminal, lines in place of it that a log can hold."""

    def __init__(self, *iterable: Any, **options: Any) -> None:
        self._is_plain = not sys.stderr.isatty()
        if self._is_plain:
            intervals = dict.fromkeys(("mininterval", "maxinterval", "delay"), LINE_INTERVAL_S)
            options = {**options, **intervals, "miniters": 1, "bar_format": _LINE}
        super().__init__(*iterable, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Show the bar, or write its line."""
        if not self._is_plain:
            return super().display(msg, pos)
        sys.stderr.write(f"{self}\n")
        sys.stderr.flush()
        return True

    def close(self) -> None:
        """End the bar; a line needs no end."""
        if not self._is_plain:
            super().close()
        elif not self.disable:
            self.disable: bool = True
            self._decr_instances(self)
