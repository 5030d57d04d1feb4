"""The report's pictures, by name. Knows nothing of pages."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvtuner.report.plots.grid_plots import chosen_bits, sensitivity_heatmap, uniform_kl_table
from kvtuner.report.plots.scatter_plots import optimization_history, pareto_front

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtuner.report.search_data import ReportData

PICTURES: Final[Mapping[str, Callable[[ReportData], bytes]]] = MappingProxyType(
    {
        "chosen-bits": chosen_bits,
        "pareto-front": pareto_front,
        "sensitivity": sensitivity_heatmap,
        "uniform-kl": uniform_kl_table,
        "history": optimization_history,
    }
)

__all__ = [
    "PICTURES",
    "chosen_bits",
    "optimization_history",
    "pareto_front",
    "sensitivity_heatmap",
    "uniform_kl_table",
]
