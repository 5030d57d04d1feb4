"""SGLang's KV pools: the dense pool's class, who builds it, and how many tokens fit."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.kv_cache_configurator import get_schedule
from sglang.srt.mem_cache.memory_pool import KvBufferDesc, MHATokenToKVPool, unwrap_write_loc
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_exec

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.exact_ring import LARGEST_COPIES_SHARE, largest_pool
from kvtuner.runtime_loader.sglang.compat.disaggregation import slots_in_transfer
from kvtuner.runtime_loader.sglang.compat.hooks import AFTER, AROUND, check_leading, install
from kvtuner.runtime_loader.sglang.compat.releases import release_rules
from kvtuner.runtime_loader.sglang.compat.speculation import check_draft_pool, draft_bytes_per_token
from kvtuner.runtime_loader.sglang.process_state import refusing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["KvBufferDesc", "MHATokenToKVPool"]  # handed on

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
# The methods that `PackedKVPool` overrides or calls, with the parameters that SGLang gives by position.
_OVERRIDDEN: Final = {
    "_create_buffers": (),
    "_build_kv_buffer_descs": (),
    "_init_data_ptrs_and_strides": (),
    "get_key_buffer": ("layer_id",),
    "get_value_buffer": ("layer_id",),
    "set_kv_buffer": ("layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale", "layer_id_override"),
    "move_kv_cache": ("tgt_loc", "src_loc"),
    "get_device_pool_infos": (),
    "set_kv_buffer_prefix_valid": (),
}
_CAPACITY = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"


def on_pool(
    pool_class: type,
    bytes_per_token: Callable[[Any, range], int],
    bytes_per_request: Callable[[Any, range], int],
    most_requests: Callable[[Any, int], int | None],
    workspace_bytes: Callable[[Any], int],
    announce_capacity: Callable[[int, int, int, int], None],
) -> None:
    """Build dense pools as `pool_class`, and size them by the bytes of a token and of a request slot on this rank.

    Both are functions of the configurator and of global layer ids. `most_requests` gives the requests to run at once
    where nobody asked for a number, for a pool of so many tokens, None for as many as SGLang likes; it must be the same
    on all ranks. `workspace_bytes` are kept free of cache for attention. `announce_capacity` is called with the bytes
    for rows, of all requests and of attention, and the tokens that SGLang makes of the first.
    """

    def build(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
        # A draft keeps its own pool, which no profile describes.
        if not self.is_draft_worker:
            kwargs["mha_pool_class"] = pool_class
        with refusing():  # of the pool's own constructor
            return original(self, **kwargs)

    def cell_size(original: Callable[..., int], self: Any, kvc: Any, num_layers: int) -> int:
        if kvc.is_draft_worker:
            return original(self, kvc, num_layers)
        layers = range(kvc.layer_info.start_layer, kvc.layer_info.end_layer)
        with refusing():
            size = bytes_per_token(kvc, layers)
            self._kvtuner_cell = size + draft_bytes_per_token(kvc)
            self._kvtuner_requests = _RequestCosts(kvc, bytes_per_request(kvc, layers), workspace_bytes(kvc))
            return size

    def sized(original: Callable[..., Any], self: Any, available_bytes: int, page_size: int) -> Any:
        costs = getattr(self, "_kvtuner_requests", None)
        if costs is None:
            return original(self, available_bytes, page_size)
        self._cell_size = self._kvtuner_cell  # SGLang's own has a share of the rows for a draft
        rows_bytes, taken = max(available_bytes - self._fixed_overhead_bytes - costs.workspace_bytes, 0), 0
        if costs.bytes_per_request:
            with refusing():
                tokens = costs.most_tokens(rows_bytes, self._cell_size, page_size)
            rows_bytes, taken = tokens * self._cell_size, costs.of_tokens(tokens)
        result = original(self, self._fixed_overhead_bytes + rows_bytes, page_size)
        announce_capacity(rows_bytes, taken, costs.workspace_bytes, result.max_total_num_tokens)
        return result

    def limited(original: Callable[..., int], self: Any, token_capacity: int) -> int:
        slots = original(self, token_capacity)
        if self.is_draft_worker or get_schedule().max_running_requests is not None:
            return slots
        with refusing():
            most = most_requests(self, token_capacity)
        return slots if most is None else min(slots, most)

    absent = release_rules().absent
    for name, parameters in _OVERRIDDEN.items():
        if name not in absent:
            check_leading(f"{_POOL}.{name}", "self", *parameters)
    install(f"{_CONFIGURATOR}._build_mha_kv_pool", build, AROUND, "max_total_num_tokens", "mha_pool_class")
    install(f"{_CAPACITY}._compute_cell_size", cell_size, AROUND, "kvc", "num_layers")
    install(f"{_CONFIGURATOR}.resolve_max_num_reqs", limited, AROUND, "token_capacity")
    install(f"{_CAPACITY}.calculate_pool_sizes", sized, AROUND, "available_bytes", "page_size")


@dataclass(frozen=True, slots=True)
class _RequestCosts:
    """The bytes that each request slot takes beside the rows; SGLang makes as many slots as it is asked to."""

    configurator: Any
    bytes_per_request: int
    workspace_bytes: int = 0

    def most_tokens(self, available_bytes: int, bytes_per_token: int, page_size: int) -> int:
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


def generations_of(request_pool: Any) -> torch.Tensor:
    """The number of requests that had a slot so far, of each slot, on the host; it rises before the next forward."""
    generations = getattr(request_pool, "req_generation", None)
    slots = len(request_pool.req_to_token)
    if not isinstance(generations, torch.Tensor) or generations.device.type != "cpu" or len(generations) != slots:
        raise ServingError("this SGLang does not count the requests of a slot; install a version that kvtuner knows")
    return generations


def on_built(pool_class: type, built: Callable[[Any, Any, Any], None]) -> None:
    """Call `built` with what configured a KV pool, the pool, and that of requests; another pool class is refused."""
    charged = 0

    def configured(result: Any, self: Any, **_: Any) -> None:
        nonlocal charged
        pool = result.token_to_kv_pool
        with refusing():
            if self.is_draft_worker:
                check_draft_pool(pool, charged)
                return
            charged = draft_bytes_per_token(self)
            if type(pool) is not pool_class:
                raise ServingError(
                    f"SGLang built a {type(pool).__name__} for this model, not a {pool_class.__name__}; only models"
                    " with one dense KV pool can be served: drop --kvtuner-profile"
                )
            built(self, pool, result.req_to_token_pool)

    install(f"{_CONFIGURATOR}.configure", configured, AFTER)


def write_slots(loc_info: Any) -> torch.Tensor:
    """Token slots that keys are written to, of a tensor or of SGLang's KVWriteLoc."""
    slots: torch.Tensor = unwrap_write_loc(loc_info)[0]
    return slots


@contextmanager
def allocation(pool: Any) -> Iterator[None]:
    """Allocate a pool's buffers inside: under the memory saver, in the transfer engine's own memory pool."""
    own = torch.cuda.use_mem_pool(pool.custom_mem_pool) if pool.enable_custom_mem_pool else nullcontext()
    with pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), own:
        yield
