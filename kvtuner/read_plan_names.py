"""The names of the read plans, and of what a server's chunks read of themselves. Imports nothing heavy."""

from __future__ import annotations

from typing import Final, Literal, get_args

ReadPlanName = Literal["decode", "hit", "cache"]
"""The tokens that read quantized keys and values; `calibration.forward.read_plan.ReadPlan` says which."""
READ_PLANS: Final[tuple[ReadPlanName, ...]] = get_args(ReadPlanName)
Attend = Literal["fresh", "cache"]
"""What a chunk of new tokens reads of itself: keys and values as they came, or as they were stored."""
ATTENDS: Final[tuple[Attend, ...]] = get_args(Attend)
