"""The ablation's groups: which schemes `kvtuner bench --ablation` puts side by side."""

from __future__ import annotations

from typing import Final

from kvtuner.evaluation.cache_scheme import KEYS_PER_CHANNEL, SYMMETRIC
from kvtuner.exported_configs.scheme_names import FP8, REFERENCE

GROUPS: Final = {
    REFERENCE: "A",
    "K8V8": "B",
    "K4V4": "C",
    "K2V2": "D",
    "K8V4": "E",
    f"K4V4{KEYS_PER_CHANNEL}": "F",
    f"K4V4{SYMMETRIC}": "G",
}
"""The letters of groups by the names of their schemes; each differs in one thing from C, per token and asymmetric.

F also has the exact tokens that keys per channel need.
"""
ABLATION: Final = (*GROUPS, FP8)
