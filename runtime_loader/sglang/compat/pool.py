"""SGLang's KV pools: the classes of keys and of latents, pools with a part of these, and who builds them."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    KvBufferDesc,
    MHATokenToKVPool,
    MLATokenToKVPool,
    unwrap_write_loc,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.compat.hooks import AFTER, AROUND, check_leading, install
from kvtuner.runtime_loader.sglang.compat.releases import release_rules
from kvtuner.runtime_loader.sglang.compat.speculation import check_draft_pool, draft_bytes_per_token
from kvtuner.runtime_loader.sglang.process_state import refusing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["DSATokenToKVPool", "KvBufferDesc", "MHATokenToKVPool", "MLATokenToKVPool"]  # handed on

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_POOLS = "sglang.srt.mem_cache.memory_pool"
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
# And those of `PackedLatentPool`.
_OVERRIDDEN_OF_LATENTS: Final = {
    "_create_buffers": (),
    "get_key_buffer": ("layer_id",),
    "get_value_buffer": ("layer_id",),
    "set_kv_buffer": ("layer", "loc_info", "cache_k", "cache_v", "layer_id_override"),
    "set_mla_kv_buffer": ("layer", "loc_info", "cache_k_nope", "cache_k_rope", "layer_id_override"),
    "get_mla_kv_buffer": ("layer", "loc", "dst_dtype"),
    "get_contiguous_buf_infos": (),
    "get_cpu_copy": (),
    "get_device_pool_infos": (),
}
_FULL_PART: Final = "Full"
"""SGLang's label of the part of full layers in a pool that has another for windows."""


def on_pool(
    pool_class: type,
    latent_pool_class: type,
    indexed_pool_class: type,
    announce_windows: Callable[[Sequence[int], int, int], None],
    announce_states: Callable[[int, int], None],
) -> None:
    """Build dense pools as `pool_class`, and so the part of full layers where SGLang keeps other layers in theirs.

    Pools of latents are built as `latent_pool_class`, and of those that an index selects from as `indexed_pool_class`.
    A part is told the global ids of its layers, as `layer_ids`. `announce_windows` is called with those of the layers
    with a window in the other part, the tokens that this holds, and its bytes; `announce_states` with the states that
    the pool of layers without keys holds of each of them, and its bytes.
    """

    def build(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
        # A draft keeps its own pool, which no profile describes.
        if not self.is_draft_worker:
            kwargs["mha_pool_class"] = pool_class
        with refusing():  # of the pool's own constructor
            return original(self, **kwargs)

    def build_of_latents(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
        if not self.is_draft_worker:
            kwargs["mla_pool_class"] = latent_pool_class
        with refusing():
            return original(self, **kwargs)

    def build_indexed(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
        if not self.is_draft_worker:
            kwargs["dsa_pool_class"] = indexed_pool_class
        with refusing():
            return original(self, **kwargs)

    def build_parts(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
        if self.is_draft_worker:
            return original(self, **kwargs)

        def part(*, allocation_label: str, **options: Any) -> Any:
            if allocation_label != _FULL_PART:
                return MHATokenToKVPool(allocation_label=allocation_label, **options)
            return pool_class(layer_ids=layers_of_pool(self), allocation_label=allocation_label, **options)

        kwargs["mha_pool_class"] = part
        with refusing():
            built = original(self, **kwargs)
        windows = built.swa_kv_pool
        announce_windows(self.layer_info.swa_attention_layer_ids, windows.size, sum(windows.get_kv_size_bytes()))
        return built

    def build_beside_states(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
        if self.is_draft_worker:
            return original(self, **kwargs)
        layer_ids = layers_of_pool(self)
        kwargs["mha_pool_class"] = partial(pool_class, layer_ids=layer_ids)
        kwargs["mla_pool_class"] = partial(latent_pool_class, layer_ids=layer_ids)
        with refusing():
            built = original(self, **kwargs)
        announce_states(built.mamba_pool.size, built.mamba_pool.mamba_cache.mem_usage_bytes())
        return built

    absent = release_rules().absent
    of_latents = dict.fromkeys(("MLATokenToKVPool", "DSATokenToKVPool"), _OVERRIDDEN_OF_LATENTS)
    for base, overridden in {"MHATokenToKVPool": _OVERRIDDEN, **of_latents}.items():
        for name, parameters in overridden.items():
            if name not in absent:
                check_leading(f"{_POOLS}.{base}.{name}", "self", *parameters)
    install(f"{_CONFIGURATOR}._build_mha_kv_pool", build, AROUND, "max_total_num_tokens", "mha_pool_class")
    install(f"{_CONFIGURATOR}._build_mla_kv_pool", build_of_latents, AROUND, "max_total_num_tokens", "mla_pool_class")
    install(f"{_CONFIGURATOR}._build_dsa_kv_pool", build_indexed, AROUND, "max_total_num_tokens", "dsa_pool_class")
    install(
        f"{_CONFIGURATOR}._build_hybrid_swa_kv_pool", build_parts, AROUND, "full_max_total_num_tokens", "mha_pool_class"
    )
    of_states = f"{_CONFIGURATOR}._build_hybrid_linear_kv_pool"
    parameters = ("max_total_num_tokens", "req_to_token_pool", "mha_pool_class", "mla_pool_class")
    install(of_states, build_beside_states, AROUND, *parameters)


def on_stored_layers(first_reader: Callable[[Any], int | None]) -> None:
    """Leave a model's last layers out of pools where they read other layers' keys; SGLang gives them bytes as well.

    `first_reader` gives the global id of the first of them by SGLang's ModelConfig, and None where there are none.
    """

    def configured(original: Callable[..., None], self: Any) -> None:
        if not self.is_draft_worker:
            with refusing():
                first = first_reader(self.model_config)
            if first is not None:
                self.layer_info = _without_readers(self.layer_info, first)
        original(self)

    install(f"{_CONFIGURATOR}.__post_init__", configured, AROUND)


def _without_readers(layers: Any, first_reader: int) -> Any:
    """SGLang's ModelLayerInfo of the layers before one."""
    end = min(layers.end_layer, first_reader)

    def before(layer_ids: list[int] | None) -> list[int] | None:
        return None if layer_ids is None else [layer_id for layer_id in layer_ids if layer_id < end]

    return msgspec.structs.replace(
        layers,
        end_layer=end,
        num_effective_layers=end - layers.start_layer,
        swa_attention_layer_ids=before(layers.swa_attention_layer_ids),
        full_attention_layer_ids=before(layers.full_attention_layer_ids),
    )


def layers_of_pool(kvc: Any) -> Sequence[int]:
    """The global ids of the layers of this rank that a configurator gives the packed pool."""
    if kvc.is_hybrid_swa:
        return tuple(kvc.layer_info.full_attention_layer_ids)
    layers = range(kvc.layer_info.start_layer, kvc.layer_info.end_layer)
    if kvc.mambaish_config is not None:
        return tuple(layer for layer in kvc.mambaish_config.full_attention_layer_ids if layer in layers)
    return layers


def full_part(pool: Any) -> Any:
    """The part of a pool that holds full layers: all of it, but where SGLang keeps other layers in a part of theirs."""
    return pool.full_kv_pool if isinstance(pool, SWAKVPool) or type(pool) is HybridLinearKVPool else pool


def generations_of(request_pool: Any) -> torch.Tensor:
    """The number of requests that had a slot so far, of each slot, on the host; it rises before the next forward."""
    generations = getattr(request_pool, "req_generation", None)
    slots = len(request_pool.req_to_token)
    if not isinstance(generations, torch.Tensor) or generations.device.type != "cpu" or len(generations) != slots:
        raise ServingError("this SGLang does not count the requests of a slot; install a version that kvtuner knows")
    return generations


def on_built(pool_classes: Sequence[type], built: Callable[[Any, Any, Any], None]) -> None:
    """Call `built` with what configured a KV pool, the pool of full layers, and that of requests.

    A pool of another class than these is refused.
    """
    charged = 0

    def configured(result: Any, self: Any, **_: Any) -> None:
        nonlocal charged
        pool = result.token_to_kv_pool
        with refusing():
            if self.is_draft_worker:
                check_draft_pool(pool, charged)
                return
            charged = draft_bytes_per_token(self)
            full = full_part(pool)
            if type(full) not in pool_classes:
                names = " or ".join(pool_class.__name__ for pool_class in pool_classes)
                raise ServingError(
                    f"SGLang built a {type(full).__name__} for this model, not a {names}; only models with a dense KV"
                    " pool of their full layers can be served: drop --kvtuner-profile"
                )
            built(self, full, result.req_to_token_pool)

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
