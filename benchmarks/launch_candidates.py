"""The launch settings that launch_table.py counts and `gpu.py --sweep` times."""

from __future__ import annotations

from typing import Final

from kvtuner.runtime_loader.kernels.settings import DecodeLaunch

CANDIDATES: Final = tuple(
    DecodeLaunch(tokens, warps, stages, asm=True)
    for tokens, warps, stages in (
        (64, 1, 3), (32, 1, 3), (128, 4, 3), (64, 4, 2), (32, 4, 2), (16, 1, 2)
    )
)  # fmt: skip
