"""SGLang's speculative decoding: what the cache of a draft model costs beside the rows."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_parallel

from kvtuner.errors import ServingError


def draft_bytes_per_token(kvc: Any) -> int:
    """Bytes of a token in the draft model's own pool on this rank; 0 without one.

    SGLang takes a draft's layers to cost what the target's do, and packed ones cost less.
    """
    aux = kvc.spec_aux_config
    layers = aux.eagle_draft_num_layers
    if kvc.is_draft_worker or not layers:
        return 0
    config = aux.draft_model_config or kvc.model_config
    heads: int = config.get_num_kv_heads(get_parallel().attn_tp_size)
    of_layer: int = heads * (config.head_dim + config.v_head_dim) * kvc.kv_cache_dtype.itemsize
    return int(layers) * of_layer


def check_draft_pool(pool: Any, charged: int) -> None:
    """Refuse a draft's pool whose tokens take more bytes than were charged for them."""
    slots = pool.size + pool.page_size
    taken = -(-sum(pool.get_kv_size_bytes()) // slots)
    if taken > charged:
        raise ServingError(
            f"the draft model's cache takes {taken:,} bytes per token, but {charged:,} were charged: there would be too"
            " little memory for it; drop --speculative-algorithm"
        )
