"""SGLang's metrics: values and counts of this process on the server's /metrics."""

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


def add_to_counter(name: str, what: str, labels: Mapping[str, str], amount: float) -> None:
    """Add to a count under a name and labels, where the server was started with --enable-metrics."""
    if get_observability().enable_metrics:
        _counter(name, what, tuple(labels)).labels(**labels).inc(amount)


# A metric of a name can be made once in a process.
@cache
def _gauge(name: str, what: str, labels: tuple[str, ...]) -> Any:
    # Imported late: SGLang must have set prometheus' folder for several processes before.
    from prometheus_client import Gauge

    return Gauge(name, what, labels, multiprocess_mode="max")


@cache
def _counter(name: str, what: str, labels: tuple[str, ...]) -> Any:
    from prometheus_client import Counter

    return Counter(name, what, labels)
