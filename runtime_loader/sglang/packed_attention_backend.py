"""Attention over a packed pool, on the Triton backend's metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtuner.runtime_loader.packed_attention import ExtendBounds, ScoreScaling
from kvtuner.runtime_loader.sglang.compat.attention import TritonAttnBackend, check_attention_layers, refuse_unserved
from kvtuner.runtime_loader.sglang.packed_pool import PackedKVPool
from kvtuner.runtime_loader.sglang.process_state import refusing

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.packed_attention import PackedRows


def make_backend(runner: Any) -> PackedAttnBackend | None:
    """The backend of a model runner with a packed pool; None for any other pool, such as a draft's."""
    if not isinstance(runner.token_to_kv_pool, PackedKVPool):
        return None
    with refusing():
        check_attention_layers(runner.model, runner.model_config.context_len)
    return PackedAttnBackend(runner)


class PackedAttnBackend(TritonAttnBackend):  # type: ignore[misc]  # sglang is not typed
    """SGLang's Triton backend, reading packed rows where it calls its kernels."""

    def __init__(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(runner, *args, **kwargs)
        self.pool: PackedKVPool = runner.token_to_kv_pool
        self.attention = self.pool.rank_state.attention
        with refusing():
            self.attention.prepare(
                list(zip(self.pool.keys, self.pool.values, strict=True)), self.num_head, runner.req_to_token_pool.size
            )
        self.decode_attention_fwd = self._decode
        self.sliding_window_size = None  # `check_attention_layers` left none

    def _decode(
        self, q: Tensor, keys: PackedRows, values: PackedRows, o: Tensor, kv_indptr: Tensor, kv_indices: Tensor,
        attn_logits: Tensor, attn_lse: Tensor, num_kv_splits: Tensor, max_kv_splits: int, sm_scale: float, *_: Any,
        logit_cap: float = 0.0, **arguments: Any,
    ) -> None:  # fmt: skip
        """Called as SGLang's decode kernel, with rows for buffers; writes `o` [requests, heads, channels]."""
        refuse_unserved(arguments)
        self.attention.decode(q, keys, values, kv_indptr, kv_indices, ScoreScaling(sm_scale, logit_cap), out=o)

    def _forward_extend_kernel(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, o: Tensor, keys: PackedRows, values: PackedRows,
        qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, custom_mask: Tensor | None, is_causal: bool,
        mask_indptr: Tensor | None, max_len_extend: int, k_descale: float, v_descale: float, sm_scale: float, *,
        logit_cap: float = 0.0, **arguments: Any,
    ) -> None:  # fmt: skip
        """Called as SGLang's extend kernel, with rows for buffers; writes `o` [tokens, heads, channels]."""
        refuse_unserved({**arguments, "custom_mask": custom_mask, "is_causal": is_causal})
        if self.pool.rank_state.attend == "cache":
            k, v = self.pool.as_stored(layer.layer_id, k, v)
        else:
            k, v = k.view(-1, *keys.shape[1:]), v.view(-1, *values.shape[1:])
        bounds = ExtendBounds(qo_indptr, kv_indptr, kv_indices, max_len_extend)
        prefix = self.attention.read_prefix(q, keys, values, bounds)
        if prefix is None:
            self.attention.extend(q, k, v, keys, values, bounds, ScoreScaling(sm_scale, logit_cap), out=o)
            return
        # SGLang's own kernel attends over the prefix that was read back for it, in order, from slot 0 on.
        super()._forward_extend_kernel(
            layer, q, k.to(q.dtype), v.to(q.dtype), o, *prefix, qo_indptr, kv_indptr, kv_indices, custom_mask,
            is_causal, mask_indptr, max_len_extend, 1.0, 1.0, sm_scale, logit_cap=logit_cap,
            **{**arguments, "page_size": 1, "identity_kv_indices": True},
        )  # fmt: skip
