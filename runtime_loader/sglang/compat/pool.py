"""SGLang's KV pools: the dense pool's class, who builds it, and how many tokens fit."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import KvBufferDesc, MHATokenToKVPool, unwrap_write_loc

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.compat.hooks import AFTER, AROUND, check_leading, install
from kvtuner.runtime_loader.sglang.process_state import refusing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["KvBufferDesc", "MHATokenToKVPool", "allocation", "on_built", "on_pool", "write_slots"]

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
    pool_class: type, bytes_per_token: Callable[[Any, range], int], announce_capacity: Callable[[int, int], None]
) -> None:
    """Build dense pools as `pool_class`, and size them by `bytes_per_token(configurator, global layer ids)`.

    `announce_capacity` is called with the bytes available for the pool and the tokens that SGLang makes of them.
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
        with refusing():
            return bytes_per_token(kvc, range(kvc.layer_info.start_layer, kvc.layer_info.end_layer))

    def sized(result: Any, self: Any, available_bytes: int, page_size: int) -> None:
        announce_capacity(max(available_bytes - self._fixed_overhead_bytes, 0), result.max_total_num_tokens)

    for name, parameters in _OVERRIDDEN.items():
        check_leading(f"{_POOL}.{name}", "self", *parameters)
    install(f"{_CONFIGURATOR}._build_mha_kv_pool", build, AROUND, "max_total_num_tokens", "mha_pool_class")
    install(f"{_CAPACITY}._compute_cell_size", cell_size, AROUND, "kvc", "num_layers")
    install(f"{_CAPACITY}.calculate_pool_sizes", sized, AFTER, "available_bytes", "page_size")


def on_built(pool_class: type, built: Callable[[Any, Any], None]) -> None:
    """Call `built(configurator, pool)` with what configured a KV pool, and the pool; of another class it is refused."""

    def configured(result: Any, self: Any, **_: Any) -> None:
        if self.is_draft_worker:
            return
        pool = result.token_to_kv_pool
        with refusing():
            if type(pool) is not pool_class:
                raise ServingError(
                    f"SGLang built a {type(pool).__name__} for this model, not a {pool_class.__name__}; only models"
                    " with one dense KV pool can be served: drop --kvtuner-profile"
                )
            built(self, pool)

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
