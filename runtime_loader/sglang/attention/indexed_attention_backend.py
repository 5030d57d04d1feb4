"""Attention over packed latents of which an index selects what a query reads, on SGLang's sparse backend (DSA).

The index is SGLang's own, and so are its keys. New tokens of a prompt read their selection among the latents of their
request, which are staged in model space for one layer at a time, by SGLang's sparse kernel; one that decodes reads
packed rows, or under an exact window staged ones.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.exact_ring import NewTokens
from kvtuner.runtime_loader.packed_attention import ScoreScaling
from kvtuner.runtime_loader.sglang.attention.selected_tokens import DecodedSelection
from kvtuner.runtime_loader.sglang.attention.staged_latents import LatentStaging, StagedRequests, requests_together
from kvtuner.runtime_loader.sglang.compat.attention.loaded_layers import (
    check_attention_layers,
    read_absorbed,
)
from kvtuner.runtime_loader.sglang.compat.attention.sparse_backend import (
    DeepseekSparseAttnBackend,
    TopkTransformMethod,
    slots_of_decode,
)
from kvtuner.runtime_loader.sglang.options.option_rules import SPARSE_KERNEL
from kvtuner.runtime_loader.sglang.pools.indexed_pool import IndexedLatentPool
from kvtuner.runtime_loader.sglang.process_state import refusing
from kvtuner.runtime_loader.workspaces import WORKSPACE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.packed_attention import PackedRows


def make_indexed_backend(runner: Any) -> IndexedAttnBackend | None:
    """The backend of a model runner with a packed pool of such latents; None for any other pool, as a draft's."""
    pool = runner.token_to_kv_pool
    if not isinstance(pool, IndexedLatentPool):
        return None
    with refusing():
        check_attention_layers(runner.model, runner.model_config.context_len)
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
        channels = sum(self.pool.shape_of_layer()[1:])
        self._most_staged = WORKSPACE_BYTES // (channels * self.pool.model_dtype.itemsize)
        self._num_copies = self.pool.rank_state.profile.window.num_tokens
        self._together: list[StagedRequests] = []
        self._decoded: DecodedSelection | None = None
        if self._num_copies:
            self.use_fused_topk = False  # which gives slots where a window asks for positions
        self.supports_mha_one_shot = False  # by which SGLang reads short prompts otherwise than a packed pool can

    def get_topk_transform_method(self, forward_mode: Any = None) -> TopkTransformMethod:
        """Let the index count tokens by their place among all of the batch where latents are staged so."""
        is_staged = forward_mode is not None and forward_mode.is_extend_without_speculative()
        return TopkTransformMethod.RAGGED if is_staged else TopkTransformMethod.PAGED

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        q_rope: Tensor | None = None, k_rope: Any = None, topk_indices: Tensor | None = None, **rest: Any,
    ) -> Tensor:  # fmt: skip
        """Attend as SGLang's method does, over staged latents of all tokens that the requests of the batch have.

        Requests whose latents do not fit in the workspace together are staged one after the other.
        """
        if layer.layer_id == self.pool.start_layer:
            self.pool.forget_former_requests()
            self._together = self._staged_together(forward_batch)
        selected = self._store(k, k_rope, layer, forward_batch, save_kv_cache, topk_indices, rest)
        q, latents = _joined_queries(q, q_rope, layer), torch.cat((k, k_rope), dim=-1)
        staging = self._staging(layer)

        def attend(some: StagedRequests) -> Tensor:
            # An index that has looked nothing up counts from the first token of each request.
            first = some.first_places[:, None] if not self.use_fused_topk else -some.first_place
            # Layers may share what was selected, so it stays as it is.
            own = selected[some.new]
            places = torch.where(own >= 0, own + first, -1)
            staged, places = staging.of_requests(some, latents[some.new], places, is_fresh=self._is_fresh)
            return self._attend(q[some.new], staged, places, some.new, layer)

        outputs = [attend(some) for some in self._together]  # each frees its latents before the next are staged
        if staging.copies is not None:
            past = (forward_batch.seq_lens - forward_batch.extend_seq_lens).cumsum(0)
            bounds = torch.nn.functional.pad(past, (1, 0)), self.forward_metadata.cu_seqlens_q
            new = NewTokens(forward_batch.req_pool_indices, *bounds)
            self.attention.store_copies(staging.copies, new, *self.pool.new_states(latents, latents))
        return _joined_outputs(outputs, len(q))

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        q_rope: Tensor | None = None, k_rope: Any = None, topk_indices: Tensor | None = None, **rest: Any,
    ) -> Tensor:  # fmt: skip
        """Attend as SGLang's method does, over the selected tokens, the new one's among them."""
        selected = self._store(k, k_rope, layer, forward_batch, save_kv_cache, topk_indices, rest)
        q, staging = _joined_queries(q, q_rope, layer), self._staging(layer)
        decoded = self._selection(selected, len(q), layer)
        if staging.copies is None:
            output: Tensor = self.attention.decode(q, *staging.rows, *decoded.lists, ScoreScaling(layer.scaling))
            return output
        selected, slots = decoded.positions, decoded.slots
        latents = torch.cat((k, k_rope), dim=-1)
        requests, rows = forward_batch.req_pool_indices, self.forward_metadata.cu_seqlens_k
        new = NewTokens(requests, rows)
        self.attention.store_copies(staging.copies, new, *self.pool.new_states(latents, latents))
        positions = rows[: len(q) + 1].diff() - 1

        def attend(some: slice) -> Tensor:
            staged, places = staging.of_selection(slots[some], selected[some], positions[some], requests[some], q.dtype)
            return self._attend(q[some], staged, places, some, layer)

        together = requests_together([slots.shape[1] + self._num_copies] * len(q), self._most_staged)
        outputs = [attend(some) for some in together]
        return _joined_outputs(outputs, len(q))

    def _selection(self, selected: Tensor, num_queries: int, layer: Any) -> DecodedSelection:
        """What decoding queries read: looked up where a layer has an index, kept for those behind that share it."""
        if self.pool.has_index(layer.layer_id):
            selected = self._pad_topk_indices(selected, num_queries)
            self._decoded = DecodedSelection(selected, slots_of_decode(self, selected))
        assert self._decoded is not None, "the first layer has an index"
        return self._decoded

    def _attend(self, q: Tensor, staged: Tensor, places: Tensor, queries: slice, layer: Any) -> Tensor:
        """Attention of some queries of a batch to staged latents at places [queries, most] of their own."""
        output: Tensor = self._forward_flashmla_sparse(
            q_all=q, kv_cache=staged, page_table_1=places, sm_scale=layer.scaling, v_head_dim=layer.v_head_dim,
            topk_length=self.forward_metadata.dsa_cache_seqlens_int32[queries],
        )  # fmt: skip
        return output

    def _staging(self, layer: Any) -> LatentStaging:
        local = layer.layer_id - self.pool.start_layer
        rows: tuple[PackedRows, PackedRows] = self.pool.keys[local], self.pool.values[local]
        return LatentStaging(self.attention, rows, self.pool.copies_of(layer.layer_id))

    def _staged_together(self, forward_batch: Any) -> list[StagedRequests]:
        """The requests of a batch that are staged together, for all layers of a forward."""
        metadata, slots = self.forward_metadata, self.forward_metadata.page_table_1_flattened
        lengths = forward_batch.seq_lens_cpu.tolist()
        ends, new_ends = ([0, *accumulate(each)] for each in (lengths, forward_batch.extend_seq_lens_cpu))
        before = forward_batch.seq_lens - forward_batch.extend_seq_lens

        def staged(some: slice) -> StagedRequests:
            new, first = slice(new_ends[some.start], new_ends[some.stop]), ends[some.start]
            return StagedRequests(
                new=new,
                first_place=first,
                slots=forward_batch.out_cache_loc[new],
                all_slots=None if slots is None else slots[first : ends[some.stop]],
                positions=metadata.dsa_seqlens_expanded[new] - 1,
                numbers=metadata.token_to_batch_idx[new] - some.start,
                first_places=metadata.topk_indices_offset[new] - first,
                requests=forward_batch.req_pool_indices[some],
                before=before[some],
                bounds=metadata.cu_seqlens_q[some] - new.start,
            )

        return [
            staged(some)
            for some in requests_together([length + self._num_copies for length in lengths], self._most_staged)
        ]

    def _store(
        self, k: Tensor, k_rope: Tensor | None, layer: Any, forward_batch: Any, save_kv_cache: bool,
        topk_indices: Tensor | None, rest: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Store new latents, and return what the index has selected; what a packed pool does not know is refused."""
        unknown = [name for name, value in rest.items() if value is not None and value is not False]
        missing = {"new latents": save_kv_cache, "k_rope": k_rope is not None, "topk_indices": topk_indices is not None}
        unknown += [f"no {name}" for name, is_there in missing.items() if not is_there]
        unknown += ["a cap of scores"] if layer.logit_cap else []
        if k_rope is None or topk_indices is None or unknown:
            with refusing():
                raise ServingError(
                    f"SGLang gives {unknown[0]} to attention here, which packed latents do not have; serve without a"
                    " profile"
                )
        self.pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
        return topk_indices


def _joined_queries(q: Tensor, q_rope: Tensor | None, layer: Any) -> Tensor:
    """Queries [tokens, heads, channels of both parts], whose parts SGLang may give apart."""
    if q_rope is None:
        return q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
    parts = (q.view(-1, layer.tp_q_head_num, layer.v_head_dim), q_rope)
    return torch.cat((parts[0], parts[1].view(len(parts[0]), layer.tp_q_head_num, -1)), dim=-1)


def _joined_outputs(outputs: list[Tensor], num_queries: int) -> Tensor:
    """The outputs of all queries, with zeros for those that only fill a batch."""
    filling = num_queries - sum(map(len, outputs))
    if filling:
        outputs = [*outputs, outputs[0].new_zeros(filling, *outputs[0].shape[1:])]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
