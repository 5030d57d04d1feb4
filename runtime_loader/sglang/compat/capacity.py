"""SGLang's division of its memory: how many tokens fit, of one pool or of two, and how many requests."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.mem_cache.kv_cache_configurator import get_schedule
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_exec

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.exact_ring import LARGEST_COPIES_SHARE, largest_pool
from kvtuner.runtime_loader.sglang.compat.disaggregation import slots_in_transfer
from kvtuner.runtime_loader.sglang.compat.hooks import AROUND, check_named, install
from kvtuner.runtime_loader.sglang.compat.model import has_index
from kvtuner.runtime_loader.sglang.compat.pool import layers_of_pool
from kvtuner.runtime_loader.sglang.compat.speculation import draft_bytes_per_token
from kvtuner.runtime_loader.sglang.process_state import refusing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CONFIGURATOR: Final = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_SIZES: Final = "sglang.srt.model_executor.pool_configurator"
_ONE_POOL: Final = f"{_SIZES}.DefaultPoolConfigurator"
_TWO_POOLS: Final = f"{_SIZES}.HybridSWAPoolConfigurator"
_CAPPED_WINDOWS: Final = f"{_SIZES}.SWARequestCapPoolConfigurator"


@dataclass(frozen=True, slots=True)
class RankBytes:
    """The bytes that a rank takes, as functions of SGLang's configurator.

    Attributes:
        of_token: The bytes of a token in layers of the packed pool, given by their global ids.
        of_request: The bytes of a request slot in them.
        of_workspace: The bytes that are kept free of cache for attention.
        most_requests: The requests to run at once where nobody asked for a number, for a pool of so many tokens; None
            for as many as SGLang likes. It must be the same on all ranks.
    """

    of_token: Callable[[Any, Sequence[int]], int]
    of_request: Callable[[Any, Sequence[int]], int]
    of_workspace: Callable[[Any], int]
    most_requests: Callable[[Any, int], int | None]


def on_capacity(rank: RankBytes, announce_capacity: Callable[[int, int, int, int, int], None]) -> None:
    """Size pools by the bytes of a token and of a request slot on this rank, and what SGLang keeps itself by its own.

    `announce_capacity` is called with the bytes for rows, of all requests and of attention, the tokens that SGLang
    makes of the first, and those that it makes of them for layers with a window, 0 where these have no part of theirs.
    """

    def costs_of(kvc: Any) -> _Costs:
        layers = layers_of_pool(kvc)
        return _Costs(kvc, rank.of_token(kvc, layers), rank.of_request(kvc, layers), rank.of_workspace(kvc))

    def cell_size(original: Callable[..., int], self: Any, kvc: Any, num_layers: int) -> int:
        if kvc.is_draft_worker:
            return original(self, kvc, num_layers)
        with refusing():
            costs = costs_of(kvc)
            if has_index(kvc.model_config):
                of_keys = self._compute_dsa_indexer_cell_size(kvc=kvc, num_layers=num_layers)
                costs = replace(costs, bytes_per_token=costs.bytes_per_token + of_keys)
            self._kvtuner_costs = costs
            self._kvtuner_cell = self._kvtuner_costs.bytes_per_token + draft_bytes_per_token(kvc)
        return int(self._kvtuner_costs.bytes_per_token)

    def sized(original: Callable[..., Any], self: Any, available_bytes: int, page_size: int) -> Any:
        costs = getattr(self, "_kvtuner_costs", None)
        if costs is None:
            return original(self, available_bytes, page_size)
        self._cell_size = self._kvtuner_cell  # SGLang's own has a share of the rows for a draft
        rows_bytes, taken = max(available_bytes - self._fixed_overhead_bytes - costs.workspace_bytes, 0), 0
        if costs.bytes_per_request:
            with refusing():
                tokens = costs.most_tokens(rows_bytes, self._cell_size, page_size)
            rows_bytes, taken = tokens * self._cell_size, costs.of_tokens(tokens)
        result = original(self, self._fixed_overhead_bytes + rows_bytes, page_size)
        announce_capacity(rows_bytes, taken, costs.workspace_bytes, result.max_total_num_tokens, 0)
        return result

    def priced(original: Callable[..., None], self: Any, kvc: Any) -> None:
        original(self, kvc)
        if not kvc.is_draft_worker:
            with refusing():
                self._kvtuner_costs = costs_of(kvc)
            self._recompute_cell_size()

    def full_cell(original: Callable[..., int], self: Any) -> int:
        costs = getattr(self, "_kvtuner_costs", None)
        return original(self) if costs is None else int(costs.bytes_per_token)

    def both_sized(original: Callable[..., Any], self: Any, available_bytes: int, page_size: int) -> Any:
        costs = getattr(self, "_kvtuner_costs", None)
        if costs is None:
            return original(self, available_bytes, page_size)
        rows_bytes, taken = max(available_bytes - costs.workspace_bytes, 0), 0
        if not costs.bytes_per_request:
            result = original(self, rows_bytes, page_size)
        else:
            # A cap of the windows' tokens is the same whatever full layers hold; otherwise they are a share of those.
            capped = -(-getattr(self, "_swa_cap", 0) // page_size) * page_size * self._swa_cell_bytes()
            cell = self._full_cell_bytes() if capped else self._cell_size
            with refusing():
                tokens = costs.most_tokens(rows_bytes - capped, cell, page_size)
            taken = costs.of_tokens(tokens)
            rows_bytes -= taken
            result = self.calculate_pool_sizes_from_max_tokens(tokens, page_size)
        tokens, of_windows = result.max_total_num_tokens, result.swa_max_total_num_tokens
        announce_capacity(rows_bytes, taken, costs.workspace_bytes, tokens, of_windows)
        return result

    def limited(original: Callable[..., int], self: Any, token_capacity: int) -> int:
        slots = original(self, token_capacity)
        if self.is_draft_worker or get_schedule().max_running_requests is not None:
            return slots
        with refusing():
            most = rank.most_requests(self, token_capacity)
        return slots if most is None else min(slots, most)

    check_named(f"{_ONE_POOL}._compute_dsa_indexer_cell_size", "kvc", "num_layers")
    install(f"{_ONE_POOL}._compute_cell_size", cell_size, AROUND, "kvc", "num_layers")
    install(f"{_CONFIGURATOR}.resolve_max_num_reqs", limited, AROUND, "token_capacity")
    install(f"{_ONE_POOL}.calculate_pool_sizes", sized, AROUND, "available_bytes", "page_size")
    install(f"{_TWO_POOLS}.__init__", priced, AROUND, "kvc")
    install(f"{_TWO_POOLS}._full_cell_bytes", full_cell, AROUND)
    for sizes in (_TWO_POOLS, _CAPPED_WINDOWS):
        install(f"{sizes}.calculate_pool_sizes", both_sized, AROUND, "available_bytes", "page_size")


@dataclass(frozen=True, slots=True)
class _Costs:
    """The bytes of a token's rows with what SGLang keeps beside them, of a request slot, and of attention.

    SGLang makes as many slots as it is asked to.
    """

    configurator: Any
    bytes_per_token: int
    bytes_per_request: int
    workspace_bytes: int

    def most_tokens(self, available_bytes: int, bytes_per_token: float, page_size: int) -> int:
        """The tokens of the largest pool that fits with all its slots.

        Slots that take more than `LARGEST_COPIES_SHARE` of the bytes are a `ServingError`: few tokens would fit.
        """
        tokens = largest_pool(available_bytes, bytes_per_token, page_size, self.of_tokens)
        if self.of_tokens(tokens) > LARGEST_COPIES_SHARE * available_bytes >= bytes_per_token * page_size:
            fitting = int(LARGEST_COPIES_SHARE * available_bytes) // self.bytes_per_request - 1
            number = f"--max-running-requests {fitting} or less" if fitting > 0 else "more memory"
            raise ServingError(
                f"the exact copies of each request take {self.bytes_per_request:,} bytes, and those of all that are to"
                f" run at once more than half of the {available_bytes:,} that are available; give {number}, a smaller"
                " --kvtuner-residual-length, or a profile with a shorter window"
            )
        return tokens

    def of_tokens(self, num_tokens: int) -> int:
        """Bytes of all slots that SGLang makes for a pool of so many tokens."""
        # Each call would log that requests were reduced.
        log = logging.getLogger(_CONFIGURATOR.rpartition(".")[0])
        was_disabled, log.disabled = log.disabled, True
        try:
            # One more than requests, for tokens that pad a graph.
            slots = int(self.configurator.resolve_max_num_reqs(num_tokens)) + 1 + slots_in_transfer()
            return slots * self.bytes_per_request
        finally:
            log.disabled = was_disabled


def chunk_tokens() -> int:
    """The most new tokens of a forward."""
    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size or 0
    return int(max(chunk if chunk > 0 else 0, schedule.max_prefill_tokens if chunk <= 0 else 0))


def graph_requests() -> int:
    """The requests of the largest CUDA graph of decoding; 0 where there are no graphs."""
    decode = get_exec().graph.cuda_graph_config.decode
    return 0 if decode.backend == Backend.DISABLED else int(decode.max_bs or 0)
