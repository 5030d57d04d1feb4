"""Counts of what moves below the device, on the server's /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtuner.runtime_loader.host_tier.stored_page import FAULTS
from kvtuner.runtime_loader.sglang.compat.metrics import add_to_counter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtuner.runtime_loader.host_tier.stopwatch import Work
    from kvtuner.runtime_loader.host_tier.stored_page import Fault

_TRANSFERS: Final = "kvtuner_hicache_seconds", "Seconds of transfers between device and host, quantizing included."
WORK_SECONDS: Final[dict[Work, tuple[str, str, dict[str, str]]]] = {
    "backup": (*_TRANSFERS, {"direction": "backup"}),
    "load": (*_TRANSFERS, {"direction": "load"}),
    "quantize": ("kvtuner_hicache_quantize_seconds", "Seconds of quantizing within backups.", {}),
    "dequantize": ("kvtuner_hicache_dequantize_seconds", "Seconds of dequantizing within loads.", {}),
}
"""The name, help and labels of the counter of each kind of work."""


class TierMetrics:
    """Counters of one rank's host tier.

    Args:
        labels: The labels of this rank.
        page_size: The tokens of a page.
        token_bytes: The bytes of one token below the device.
        unquantized_bytes: The bytes of one token in the served dtype.
    """

    def __init__(self, labels: Mapping[str, str], page_size: int, token_bytes: int, unquantized_bytes: int) -> None:
        self.labels, self._page_size = dict(labels), page_size
        self._token_bytes, self._unquantized_bytes = token_bytes, unquantized_bytes
        for direction in ("backup", "load"):
            self.moved(direction, 0)
        for work in WORK_SECONDS:
            self.took(work, 0.0)
        for fault in FAULTS:
            self.refused(fault, 0)

    def moved(self, direction: str, num_tokens: int) -> None:
        """Count pages that were moved down (backup) or up (load)."""
        labels = {**self.labels, "direction": direction}
        pages, num_bytes = num_tokens // self._page_size, num_tokens * self._token_bytes
        saved = max(num_tokens * self._unquantized_bytes - num_bytes, 0)
        add_to_counter("kvtuner_hicache_pages", "Pages moved between device and host.", labels, pages)
        add_to_counter("kvtuner_hicache_bytes", "Bytes moved between device and host.", labels, num_bytes)
        add_to_counter(
            "kvtuner_hicache_bytes_saved", "Bytes that the served dtype would have moved more.", labels, saved
        )

    def took(self, work: Work, seconds: float) -> None:
        """Count the seconds of a transfer, or of quantizing within it."""
        name, what, own = WORK_SECONDS[work]
        add_to_counter(name, what, {**self.labels, **own}, seconds)

    def refused(self, fault: Fault, count: int) -> None:
        """Count stored pages that were not what they should be."""
        labels = {**self.labels, "fault": fault}
        add_to_counter("kvtuner_hicache_pages_refused", "Stored pages that were read and not believed.", labels, count)
