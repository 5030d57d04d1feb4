"""Seam of SGLang's metrics: values of this process on the server's /metrics."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_observability

if TYPE_CHECKING:
    from collections.abc import Mapping


def set_gauge(name: str, what: str, labels: Mapping[str, str], value: float) -> None:
    """Show a value under a name and labels, where the server was started with --enable-metrics."""
    if get_observability().enable_metrics:
        _gauge(name, what, tuple(labels)).labels(**labels).set(value)


@cache
def _gauge(name: str, what: str, labels: tuple[str, ...]) -> Any:
    # Imported late: SGLang must have set prometheus' folder for several processes before.
    from prometheus_client import Gauge

    return Gauge(name, what, labels, multiprocess_mode="max")
