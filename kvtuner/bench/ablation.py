"""The ablation's groups: which schemes `kvtuner bench --ablation` puts side by side."""

from __future__ import annotations

from typing import Final

from kvtuner.evaluation.scheme import FP8, PER_CHANNEL, REFERENCE, SYMMETRIC

GROUPS: Final = {
    "A": REFERENCE,
    "B": "K8V8",
    "C": "K4V4",
    "D": "K2V2",
    "E": "K8V4",
    "F": PER_CHANNEL,
    "G": f"K4V4{SYMMETRIC}",
}
"""Names of schemes by the letters of their groups; each differs in one thing from C, per token and asymmetric."""
ABLATION: Final = (*GROUPS.values(), FP8)


def group_of(name: str) -> str | None:
    """The letter of a scheme's group; None of a scheme without one."""
    return next((letter for letter, member in GROUPS.items() if member == name), None)
