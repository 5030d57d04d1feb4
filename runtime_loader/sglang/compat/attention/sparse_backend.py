"""SGLang's sparse attention (DSA): the backend for latents of which an index selects what each query reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend, transform_index_page_table_decode

from kvtuner.runtime_loader.sglang.compat.attention.backend_registry import build_by
from kvtuner.runtime_loader.sglang.compat.hooks import check_leading, check_named
from kvtuner.runtime_loader.sglang.options.option_rules import INDEX_BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["DeepseekSparseAttnBackend", "TopkTransformMethod", "on_sparse_backend", "slots_of_decode"]

_BACKEND: Final = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
_SPARSE: Final = ("q_all", "kv_cache", "v_head_dim", "page_table_1", "sm_scale", "topk_length")


def on_sparse_backend(make: Callable[[Any], Any | None]) -> None:
    """Let `make` build the sparse backend of a model runner; where it gives None, SGLang's own is built."""
    for method in ("forward_decode", "forward_extend"):
        check_leading(f"{_BACKEND}.{method}", "self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")
        check_named(f"{_BACKEND}.{method}", "q_rope", "k_rope", "topk_indices")
    check_leading(f"{_BACKEND}.get_topk_transform_method", "self", "forward_mode")
    check_leading(f"{_BACKEND}._pad_topk_indices", "self", "topk_indices", "num_tokens")
    check_named(f"{_BACKEND}._forward_flashmla_sparse", *_SPARSE)
    build_by(INDEX_BACKEND, make)


def slots_of_decode(backend: DeepseekSparseAttnBackend, selected: Tensor) -> Tensor:
    """The token slots [queries, most] that an index has selected for decoding queries, -1 where they are fewer."""
    if backend.use_fused_topk:  # the index has looked slots up
        return selected
    slots: Tensor = transform_index_page_table_decode(
        page_table=backend.forward_metadata.page_table_1, topk_indices=selected
    )
    return slots
