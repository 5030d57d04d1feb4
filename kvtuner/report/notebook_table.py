"""Tables of a result for a notebook: a pandas data frame where pandas is installed, else a list of dicts."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtuner.report.search_data import OffsetQuality, QualityRow

RecordTable: TypeAlias = Any
"""A `pandas.DataFrame`, or `list[dict[str, Any]]`: pandas is no dependency, so that no type can name it."""


def record_table(records: Iterable[dict[str, Any]]) -> RecordTable:
    """A table with a column for each key."""
    rows = list(records)
    return import_module("pandas").DataFrame(rows) if find_spec("pandas") else rows


def quality_record(offsets: OffsetQuality, row: QualityRow) -> dict[str, Any]:
    """A row of quality with its interval in columns."""
    return {
        "offsets": offsets.offsets,
        "name": row.label,
        "mean_bits": row.mean_bits,
        "effective_bits": row.effective_bits,
        "bytes_per_token": row.bytes_per_token,
        "kl": None if row.kl is None else row.kl.mean,
        "kl_low": None if row.kl is None else row.kl.low,
        "kl_high": None if row.kl is None else row.kl.high,
        "top1": row.top1,
        "perplexity": row.perplexity,
        "fits_budget": row.fits_budget,
    }
