"""Attention over packed latents of which an index selects what a query reads, on SGLang's sparse backend (DSA).

The index is SGLang's own, and so are its keys. A new token behind a prefix reads its selection among the latents of
its request, which are staged in model space for one layer at a time, by SGLang's sparse kernel; one that decodes reads
packed rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.exact_ring import NewTokens
from kvtuner.runtime_loader.packed_attention import ScoreScaling
from kvtuner.runtime_loader.sglang.attention.selected_tokens import ExactPlaces, NewPlaces, as_lists
from kvtuner.runtime_loader.sglang.compat.attention.sparse_backend import (
    DeepseekSparseAttnBackend,
    TopkTransformMethod,
    slots_of_decode,
)
from kvtuner.runtime_loader.sglang.compat.attention.triton_backend import read_absorbed
from kvtuner.runtime_loader.sglang.options.option_rules import SPARSE_KERNEL
from kvtuner.runtime_loader.sglang.pools.indexed_pool import IndexedLatentPool
from kvtuner.runtime_loader.sglang.process_state import refusing

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.exact_ring import ExactRing
    from kvtuner.runtime_loader.packed_attention import PackedRows


def make_indexed_backend(runner: Any) -> IndexedAttnBackend | None:
    """The backend of a model runner with a packed pool of such latents; None for any other pool, as a draft's."""
    pool = runner.token_to_kv_pool
    if not isinstance(pool, IndexedLatentPool):
        return None
    with refusing():
        read_absorbed(runner.model, pool.shape_of_layer()[1:])
    return IndexedAttnBackend(runner)


class IndexedAttnBackend(DeepseekSparseAttnBackend):  # type: ignore[misc]  # sglang is not typed
    """SGLang's sparse backend, reading packed rows where it reads its pool."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.pool: IndexedLatentPool = runner.token_to_kv_pool
        self.attention = self.pool.rank_state.attention
        self.dsa_prefill_impl = self.dsa_decode_impl = SPARSE_KERNEL  # which needs no metadata of its own
        layers = [(keys, values) for _, keys, values in self.pool.read_layers]
        with refusing():
            self.attention.prepare(layers, self.num_q_heads, runner.req_to_token_pool.size)
        self._is_fresh = self.pool.rank_state.attend == "fresh"
        if self.pool.rank_state.profile.window.num_tokens:
            self.use_fused_topk = False  # which gives slots where a window asks for positions

    def get_topk_transform_method(self, forward_mode: Any = None) -> TopkTransformMethod:
        """Let the index count tokens by their place among all of the batch where latents are staged so."""
        is_staged = forward_mode is not None and forward_mode.is_extend_without_speculative()
        return TopkTransformMethod.RAGGED if is_staged else TopkTransformMethod.PAGED

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        q_rope: Tensor | None = None, k_rope: Tensor | None = None, topk_indices: Tensor | None = None, **rest: Any,
    ) -> Tensor:  # fmt: skip
        """Attend as SGLang's method does, over staged latents of all tokens that the requests of the batch have."""
        if layer.layer_id == self.pool.start_layer:
            self.pool.forget_former_requests()
        new, selected = self._store(k, k_rope, layer, forward_batch, save_kv_cache, topk_indices, rest)
        q, first = _joined_queries(q, q_rope, layer), self.forward_metadata.topk_indices_offset
        # Layers may share what was selected, so it stays as it is. The index may have counted from request to request.
        offset = 0 if self.use_fused_topk else first[:, None]
        places = torch.where(selected >= 0, selected + offset, selected)
        staged, ring = self._staged(layer, forward_batch, new), self.pool.copies_of(layer.layer_id)
        if ring is not None:
            staged, places = self._with_copies(staged, places, new, ring, forward_batch)
        output = self._attend(q, staged, places, layer)
        if ring is not None:
            tokens = NewTokens(
                forward_batch.req_pool_indices, _before(forward_batch), self.forward_metadata.cu_seqlens_q
            )
            self.attention.store_copies(ring, tokens, *self.pool.new_states(new, new))
        return output

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        q_rope: Tensor | None = None, k_rope: Tensor | None = None, topk_indices: Tensor | None = None, **rest: Any,
    ) -> Tensor:  # fmt: skip
        """Attend as SGLang's method does, over packed rows of the selected tokens, the new one's among them.

        Under an exact window these are staged too, beside copies.
        """
        new, selected = self._store(k, k_rope, layer, forward_batch, save_kv_cache, topk_indices, rest)
        q, ring = _joined_queries(q, q_rope, layer), self.pool.copies_of(layer.layer_id)
        slots = slots_of_decode(self, selected, len(q))
        if ring is None:
            bounds, lists = as_lists(slots)
            scores = ScoreScaling(layer.scaling, layer.logit_cap)
            output: Tensor = self.attention.decode(q, *self._rows(layer), bounds, lists, scores)
            return output
        requests = forward_batch.req_pool_indices
        rows = self.forward_metadata.cu_seqlens_k
        self.attention.store_copies(ring, NewTokens(requests, rows), *self.pool.new_states(new, new))
        staged = torch.cat((self._read(layer, slots.flatten().clamp(min=0), q.dtype), copies_of(ring, requests)))
        places = torch.arange(slots.numel(), dtype=slots.dtype, device=slots.device).view(slots.shape)
        positions, numbers = self._pad_topk_indices(selected, len(q)), torch.arange(len(q), device=slots.device)
        exact = ExactPlaces(ring, requests, slots.numel())
        places = exact.of(torch.where(slots >= 0, places, -1), positions, rows[: len(q) + 1].diff() - 1, numbers)
        return self._attend(q, staged, places, layer)

    def _attend(self, q: Tensor, staged: Tensor, places: Tensor, layer: Any) -> Tensor:
        """Attention of queries to staged latents at places [queries, most] of their own, by SGLang's sparse kernel."""
        output: Tensor = self._forward_flashmla_sparse(
            q_all=q, kv_cache=staged, page_table_1=self._pad_topk_indices(places, len(q)), sm_scale=layer.scaling,
            v_head_dim=layer.v_head_dim, topk_length=self.forward_metadata.dsa_cache_seqlens_int32,
        )  # fmt: skip
        return output

    def _rows(self, layer: Any) -> tuple[PackedRows, PackedRows]:
        """The latents of a layer, and the rotary channels beside them."""
        local = layer.layer_id - self.pool.start_layer
        return self.pool.keys[local], self.pool.values[local]

    def _read(self, layer: Any, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Both parts of the latents of token slots in model space, [tokens, 1, channels]."""
        return torch.cat([self.attention.read(stored, slots, dtype) for stored in self._rows(layer)], dim=-1)

    def _store(
        self, k: Tensor, k_rope: Tensor | None, layer: Any, forward_batch: Any, save_kv_cache: bool,
        topk_indices: Tensor | None, rest: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Store new latents; return both parts of them [tokens, 1, channels], and what the index has selected.

        What a packed pool does not know is refused.
        """
        unknown = [name for name, value in rest.items() if value not in (None, False)]
        if topk_indices is None or k_rope is None or not save_kv_cache or unknown:
            what = (
                unknown[0] if unknown else "no new latents with rotary channels, or nothing that an index has selected"
            )
            with refusing():
                raise ServingError(f"attention to packed latents does not take what SGLang gives here: {what}")
        self.pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
        return torch.cat((k, k_rope), dim=-1), topk_indices

    def _staged(self, layer: Any, forward_batch: Any, new: Tensor) -> Tensor:
        """The latents of all tokens of a batch's requests, one after the other, [tokens, 1, channels of both parts].

        New ones are as they are, or as they were stored where they are to be read so.
        """
        slots, metadata = self.forward_metadata.page_table_1_flattened, self.forward_metadata
        if slots is None:  # no request has a prefix
            return new if self._is_fresh else self._read(layer, forward_batch.out_cache_loc, new.dtype)
        staged = self._read(layer, slots, new.dtype)
        if self._is_fresh:
            places = metadata.topk_indices_offset + metadata.dsa_seqlens_expanded - 1
            staged[places.long()] = new[: len(places)]
        return staged

    def _with_copies(
        self, staged: Tensor, places: Tensor, new: Tensor, ring: ExactRing, forward_batch: Any
    ) -> tuple[Tensor, Tensor]:
        """Staged latents with the copies of a batch's requests behind them, and new ones, and where those are read."""
        metadata, requests = self.forward_metadata, forward_batch.req_pool_indices
        parts, new_places = [staged, copies_of(ring, requests)], None
        if not self._is_fresh:
            past = _before(forward_batch).diff()
            first = len(staged) + len(parts[1]) + metadata.cu_seqlens_q[: len(past)]
            new_places = NewPlaces(past, first - past)
            parts.append(new)
        exact = ExactPlaces(ring, requests, len(staged), new_places)
        positions = places - metadata.topk_indices_offset[:, None]
        queries = metadata.dsa_seqlens_expanded - 1
        return torch.cat(parts), exact.of(places, positions, queries, metadata.token_to_batch_idx)


def copies_of(ring: ExactRing, requests: Tensor) -> Tensor:
    """The copies of request slots, one after the other, [requests * places, 1, channels of both parts]."""
    return torch.cat((ring.keys[requests.long()], ring.values[requests.long()]), dim=-1).flatten(0, 1)


def _before(forward_batch: Any) -> Tensor:
    """The bounds [requests + 1] of the tokens that the requests of a batch had before, one after the other."""
    past = forward_batch.seq_lens - forward_batch.extend_seq_lens
    return torch.nn.functional.pad(past.cumsum(0), (1, 0))


def _joined_queries(q: Tensor, q_rope: Tensor | None, layer: Any) -> Tensor:
    """Queries [tokens, heads, channels of both parts], whose parts SGLang may give apart."""
    if q_rope is None:
        return q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
    parts = (q.view(-1, layer.tp_q_head_num, layer.v_head_dim), q_rope)
    return torch.cat((parts[0], parts[1].view(len(parts[0]), layer.tp_q_head_num, -1)), dim=-1)
