"""The names of the read plans, which profiles record and commands take. Imports nothing heavy."""

from __future__ import annotations

from typing import Final, Literal, get_args

ReadPlanName = Literal["decode", "hit", "cache"]
"""The tokens that read quantized keys and values; `calibration.forward.read_plan.ReadPlan` says which."""
READ_PLANS: Final[tuple[ReadPlanName, ...]] = get_args(ReadPlanName)
