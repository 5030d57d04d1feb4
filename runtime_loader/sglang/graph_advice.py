"""A recommendation for servers that run more requests at once than CUDA graphs were captured for."""

from __future__ import annotations

import logging
from typing import Final

logger: Final = logging.getLogger("kvtuner")

GRAPHS_FLAG: Final = "--cuda-graph-max-bs-decode"
STEP: Final = 32
"""The requests that a recommended number is a multiple of."""


def recommended_graph(captured: int, running: int, bytes_per_token: int, bf16_bytes_per_token: int) -> int | None:
    """The requests of the largest CUDA graph that suits a packed pool, None where the one that is captured does.

    Args:
        captured: The requests of the largest graph, 0 without graphs.
        running: The requests that the server runs at most.
        bytes_per_token: The stored bytes of a token.
        bf16_bytes_per_token: The same in bf16: what filled the graph then is that many times as many requests now.
    """
    if not 0 < captured < running:
        return None
    filled = -(-captured * bf16_bytes_per_token // bytes_per_token)
    wanted = min(running, -(-filled // STEP) * STEP)
    return wanted if wanted > captured else None


def recommend_graph(captured: int, running: int, bytes_per_token: int, bf16_bytes_per_token: int) -> None:
    """Say in the log which flag captures graphs of as many requests as fit now."""
    wanted = recommended_graph(captured, running, bytes_per_token, bf16_bytes_per_token)
    if wanted is not None:
        logger.warning(
            "kvtuner: CUDA graphs are captured for %d requests, but packed rows let more run at once (%d at most);"
            " larger batches decode without a graph, at the processor's speed: add %s %d",
            captured, running, GRAPHS_FLAG, wanted,
        )  # fmt: skip
