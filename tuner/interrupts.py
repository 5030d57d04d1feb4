"""Ctrl-C that waits while the study's storage is in use. Knows nothing of studies."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class InterruptGate:
    """Holds SIGINT back between two open stretches, so that no library is interrupted within a transaction.

    A second SIGINT is not held back. Outside the main thread, where Python delivers no signals, the gate does nothing.
    """

    def __init__(self) -> None:
        """Start without effect; `closed` gives it one."""
        self._previous: Any = None
        self._pending = False
        self._is_armed = False

    @contextlib.contextmanager
    def closed(self) -> Iterator[InterruptGate]:
        """Hold SIGINT back until the context ends or `opened` is entered; then it takes its usual course."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not callable(signal.getsignal(signal.SIGINT)):
            yield self
            return
        self._previous = signal.signal(signal.SIGINT, self._hold)
        self._is_armed = True
        try:
            yield self
        finally:
            self._is_armed = False
            signal.signal(signal.SIGINT, self._previous)
            self._deliver()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Let SIGINT through, one that was held back first."""
        if not self._is_armed:
            yield
            return
        signal.signal(signal.SIGINT, self._previous)
        try:
            self._deliver()
            yield
        finally:
            signal.signal(signal.SIGINT, self._hold)

    def _hold(self, number: int, frame: Any) -> None:
        if self._pending:  # the second one: whoever sends it does not want to wait
            self._pending = False
            self._previous(number, frame)
        self._pending = True

    def _deliver(self) -> None:
        if self._pending:
            self._pending = False
            signal.raise_signal(signal.SIGINT)
