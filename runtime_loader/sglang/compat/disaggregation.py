"""SGLang's disaggregation: what prefill and decode servers tell each other before one writes to the other's cache."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.runtime_context import get_disagg

from kvtuner.runtime_loader.sglang.compat.hooks import AROUND, install

if TYPE_CHECKING:
    from collections.abc import Callable

_MANAGER: Final = "sglang.srt.disaggregation.common.conn.CommonKVManager"
_RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner"

logger: Final = logging.getLogger("kvtuner")


def is_decode_server() -> bool:
    """Whether this process computes no prompt and gets the rows of prompts from other servers."""
    return bool(get_disagg().disaggregation_mode == "decode")


def slots_in_transfer() -> int:
    """Request slots beside those that run, of requests whose rows are still to come."""
    return int(get_disagg().disaggregation_decode_extra_slots or 0) if is_decode_server() else 0


def on_transfer(served: Callable[[], str], misfit: Callable[[int, int], str | None]) -> None:
    """Tell the other side what this one has `served`, and fail requests of prefill servers that do not fit.

    SGLang compares the names of the caches' dtypes, of which what is served becomes a part. `misfit` gets the sizes of
    attention's tensor parallelism, of the other side and of this one, and gives the reason, or None where they fit.
    """

    def made(original: Callable[..., None], self: Any, args: Any, *rest: Any, **options: Any) -> None:
        # A server without packed rows refuses the other side by this too.
        args.kv_cache_dtype_str = f"{args.kv_cache_dtype_str} packed by kvtuner, {served()}"
        original(self, args, *rest, **options)

    def ensured(original: Callable[..., bool], self: Any, bootstrap_addr: str) -> bool:
        try:
            if not original(self, bootstrap_addr):
                return False
            peer = self.prefill_info_table[bootstrap_addr]
            reason = misfit(peer.attn_tp_size, self.attn_tp_size)
            if reason is None:
                return True
            del self.prefill_info_table[bootstrap_addr]
        except RuntimeError as error:  # SGLang's own comparison, which would end this server for one bad peer
            reason = f"{error} Start both with the same --kvtuner-profile, --kvtuner-attend and options of the cache"
        _fail_requests(self, bootstrap_addr, f"kvtuner: the prefill server at {bootstrap_addr} does not fit: {reason}")
        return False

    install(f"{_MANAGER}.__init__", made, AROUND, "args", "disaggregation_mode")
    install(f"{_MANAGER}.try_ensure_parallel_info", ensured, AROUND, "bootstrap_addr")


def _fail_requests(manager: Any, bootstrap_addr: str, reason: str) -> None:
    """Fail the requests that wait for a prefill server, with a reason that their clients read."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    logger.error(reason)
    for room in list(manager.addr_to_rooms_tracker.get(bootstrap_addr, ())):
        manager.record_failure(room, reason)
        manager.update_status(room, KVPoll.Failed)


def before_forward(run: Callable[[Any], None]) -> None:
    """Call `run` with the KV pool before each forward, whether it is replayed from a graph or not, on its stream."""

    def forward(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
        run(self.token_to_kv_pool)
        return original(self, *args, **options)

    install(f"{_RUNNER}.forward", forward, AROUND, "forward_batch")
