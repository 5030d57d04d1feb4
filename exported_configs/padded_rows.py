"""Rows that more bits would not lengthen, since rows are padded, and caches that use that. Knows nothing of quality."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from kvtuner.errors import PrecisionError
from kvtuner.precision import ALL_BITS, SIDES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.profile.records import BaselineRecord, BudgetRecord
    from kvtuner.precision import Side


def layers_with_room(profile: Profile) -> dict[Side, set[int]]:
    """The layers whose keys, or values, would take no more bytes of a rank with more bits."""
    owners, found = profile.geometry.owners(), {side: set[int]() for side in SIDES}
    for entry in profile.layers:
        shape = profile.defaults.layer_shape(owners[entry.layer], entry, profile.budget.tp_size)
        for side, record, _ in entry.sides(profile.defaults):
            if _has_room(shape.k_bytes if side == "k" else shape.v_bytes, record.bits):
                found[side].add(entry.layer)
    return found


def wider_in_no_more_bytes(budget: BudgetRecord, baselines: Iterable[BaselineRecord]) -> list[BaselineRecord]:
    """The baselines that a budget of bits left out for their bits, though they take no more bytes."""
    if not budget.counts_bits:
        return []
    return [
        baseline
        for baseline in baselines
        if baseline.mean_bits > budget.mean_bits and baseline.effective_bits <= budget.effective_bits
    ]


def _has_room(row_bytes: Callable[[int], int], bits: int) -> bool:
    for wider in ALL_BITS:
        with suppress(PrecisionError):  # heads that rows of such bits cannot hold
            if wider > bits and row_bytes(wider) == row_bytes(bits):
                return True
    return False
