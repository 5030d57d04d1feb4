"""What a search said besides its configuration, as named lines. Knows nothing of tables or pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtuner.report.formatting import number, percent

if TYPE_CHECKING:
    from kvtuner.report.search_data import ReportData


def findings(data: ReportData) -> list[tuple[str, str]]:
    """Lines by name, in ASCII; only what there is."""
    rows = []
    if data.uniform_winner is not None:
        rows.append(("winner", f"uniform {data.uniform_winner}: better than the searched one on the report split"))
    if data.gain is not None:
        gain = f"{number(data.gain)} nats per token below the exact solution, select split"
        rows.append(("refinement", gain))
    if (pairs := data.pair_additivity) is not None:
        spread = f"{percent(pairs.median)} in the median, {percent(pairs.maximum)} at most"
        rows.append(("K/V pairs", f"e_o differs from the sum of its sides by {spread}"))
    return rows
