"""Prefill and decode on different servers: which two may exchange packed rows, and what a decode server has not.

Rows are sent as they are stored, so both sides must have the same profile and the same heads on a rank. Knows nothing
of how SGLang moves them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from kvtuner.runtime_loader.sglang.compat.disaggregation import before_forward, is_decode_server, on_transfer
from kvtuner.runtime_loader.sglang.pools.packed_pool import PackedPool

if TYPE_CHECKING:
    from collections.abc import Callable

logger: Final = logging.getLogger("kvtuner")


def install_transfers(served: Callable[[], str]) -> None:
    """Hook what sends and receives rows; `served` says by which profile and reading this server makes them."""
    on_transfer(served, misfit)
    if is_decode_server():
        # A decode server has no extend, by which a request's first forward is known elsewhere.
        before_forward(_forget_former_requests)


def misfit(their_tp: int, own_tp: int) -> str | None:
    """Return why rows of a server with another number of ranks cannot be read here, None where it is the same."""
    if their_tp == own_tp:
        return None
    return (
        f"its attention is split over {their_tp} ranks, and that of this decode server over {own_tp}: a row holds all"
        " heads of a rank. Start both with the same --tp-size"
    )


def tell_of_windows(pool: PackedPool) -> None:
    """Say in the log of a decode server with an exact window what it does not have."""
    window = pool.rank_state.profile.window
    if window.num_tokens and is_decode_server():
        logger.warning(
            "kvtuner: prompts come here as rows, so that of %s a request has those tokens exactly that it generates"
            " itself; its prompt is read as it was stored, as after a prefix hit",
            window,
        )


def _forget_former_requests(pool: Any) -> None:
    if isinstance(pool, PackedPool):
        pool.forget_former_requests()
