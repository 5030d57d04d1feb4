"""Attention over a packed pool, on the Triton backend's metadata; layers with a window go to SGLang's own kernels."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.exact_ring import NewTokens, WindowReads
from kvtuner.runtime_loader.joined_chunk import first_new_tokens
from kvtuner.runtime_loader.packed_attention import ChunkMask, ExtendBounds, NewKeys, PackedRows, ScoreScaling
from kvtuner.runtime_loader.sglang.attention.flash_prefill import PREFILL_VARIABLE, FlashPrefill, chosen_prefill
from kvtuner.runtime_loader.sglang.attention.shared_chunks import SharedChunk, SharedChunks
from kvtuner.runtime_loader.sglang.attention.windows_and_chunks import WindowsAndChunks
from kvtuner.runtime_loader.sglang.compat.attention.flash import check_flash, flash_attention
from kvtuner.runtime_loader.sglang.compat.attention.loaded_layers import (
    check_attention_layers,
    check_readers,
    check_windows,
    first_attention_layer,
    read_absorbed,
)
from kvtuner.runtime_loader.sglang.compat.attention.triton_backend import (
    TritonAttnBackend,
    let_text_run_beside_images,
    read_by_chunks,
    refuse_unserved,
)
from kvtuner.runtime_loader.sglang.compat.model import chunk_of, reading_both_ways
from kvtuner.runtime_loader.sglang.compat.pool import full_part, write_slots
from kvtuner.runtime_loader.sglang.pools.latent_pool import PackedLatentPool
from kvtuner.runtime_loader.sglang.pools.packed_pool import PackedPool
from kvtuner.runtime_loader.sglang.process_state import refusing

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from kvtuner.exported_configs.profile.profile import Profile

logger: Final = logging.getLogger("kvtuner")


def make_backend(runner: Any) -> PackedAttnBackend | None:
    """The backend of a model runner with a packed pool; None for any other pool, such as a draft's."""
    pool = full_part(runner.token_to_kv_pool)
    if not isinstance(pool, PackedPool):
        return None
    with refusing():
        windows = windows_of(pool.rank_state.profile)
        check_readers(runner.model, pool.rank_state.profile.geometry.whole())
        chunk = chunk_of(runner.model_config) if windows else None
        if chunk is not None:
            read_by_chunks(runner, windows)
        check_attention_layers(runner.model, runner.model_config.context_len, windows)
        if chunk is None:
            check_windows(runner, windows)
        if isinstance(pool, PackedLatentPool):
            read_absorbed(runner.model, pool.shape_of_layer()[1:])
    return PackedAttnBackend(runner, chunk=chunk)


class PackedAttnBackend(TritonAttnBackend):  # type: ignore[misc]  # sglang is not typed
    """SGLang's Triton backend, reading packed rows where it calls its kernels.

    Other layers read windows or, where it is given, chunks of `chunk` tokens.
    """

    decode_attention_fwd: Any

    def __init__(self, runner: Any, *args: Any, chunk: int | None = None, **kwargs: Any) -> None:
        super().__init__(runner, *args, **kwargs)
        self.pool: PackedPool = full_part(runner.token_to_kv_pool)
        self.attention = self.pool.rank_state.attention
        self._layers = [(keys, values) for _, keys, values in self.pool.read_layers]
        self._packed = frozenset(layer_id for layer_id, _, _ in self.pool.read_layers)
        readers = self.pool.rank_state.profile.geometry.whole().num_readers().items()
        self._shared = SharedChunks({layer_id: number for layer_id, number in readers if layer_id in self._packed})
        self._first_layer = first_attention_layer(runner.model)
        self._both_ways = reading_both_ways(runner.model_config)
        self._others = WindowsAndChunks(self, chunk, owns_masks=self._both_ways == {"window"})
        if "full" in self._both_ways:
            let_text_run_beside_images()
        with refusing():
            self.attention.prepare(self._layers, self.num_head, runner.req_to_token_pool.size)
        self._flash = self._flash_prefill()
        self._longest: int | None = None  # tokens of a request of the batch that prefills
        self._lengths: Sequence[int] | None = None  # new tokens of each of them
        self._window: WindowReads | None = None  # of the layer that attends
        self._stored_at: Tensor | None = None  # the slots that the layer's new tokens were stored at
        self._verifies = False  # drafts, in the forward that attends
        self._is_reader = False  # of another layer's keys, in the layer that attends
        self.use_verify_splitkv = self.use_verify_shared_kv = False  # kernels that read keys from the pool
        self._decode_windows = self.decode_attention_fwd
        self.decode_attention_fwd = self._decode
        if not windows_of(self.pool.rank_state.profile):
            self.sliding_window_size = None  # `check_attention_layers` left none
            # SGLang allocates partial outputs of as many channels, for every batch and for graphs; ours are its own.
            self.v_head_dim = 1

    def _flash_prefill(self) -> FlashPrefill | None:
        """SGLang's flash attention for long chunks, tested; None where its Triton kernel attends, as the log says."""
        with refusing():
            choice = chosen_prefill()
            head_dims = {side.format.head_dim for sides in self._layers for side in sides}
            device = self.pool.keys[0].rows.device
            flash, why = flash_attention(device, self.pool.model_dtype, head_dims)
            if isinstance(self.pool, PackedLatentPool):
                flash, why = None, "flash attention does not take latents (MLA)"
            if choice == "flash" and flash is None:
                raise ServingError(f"{PREFILL_VARIABLE}=flash cannot be served: {why}; unset it")
            if choice == "triton" or flash is None:
                if device.type == "cuda":
                    logger.info("kvtuner: long chunks attend by SGLang's Triton kernel: %s", why or "as asked")
                return None
            check_flash()
            prefill = FlashPrefill(flash, self.attention)
            prefill.check(self._layers, self.num_head, self.pool.model_dtype)
            logger.info("kvtuner: long chunks attend by SGLang's flash attention, self-test passed")
            return prefill

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """List what a batch reads as SGLang's method does, with chunks for windows."""
        super().init_forward_metadata(forward_batch)
        self._others.begin(forward_batch)

    def _update_decode_kv_buffers(
        self, plan: Any, bs: int, seq_lens: Tensor, req_pool_indices: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """List what a graph of `bs` requests that decode reads as SGLang's method does, with chunks for windows."""
        indptr, window_indptr, window_lengths, lengths = super()._update_decode_kv_buffers(
            plan, bs, seq_lens, req_pool_indices
        )
        chunks = self._others.of_graph(plan, seq_lens[:bs], req_pool_indices[:bs])
        if chunks is not None:
            window_indptr, window_lengths = chunks
        return indptr, window_indptr, window_lengths, lengths

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **rest: Any
    ) -> Tensor:
        """Attend as SGLang's method does, with one new token of each request, whose exact copy is made first.

        A layer that reads another's gets no keys: they are in the rows and copies of that one.
        """
        self._enter(layer, forward_batch, is_stored=save_kv_cache or k is None)
        if self._window is not None and k is not None:
            new = NewTokens(self._window.requests, self.forward_metadata.kv_indptr)
            self.attention.store_copies(self._window.ring, new, *self.pool.new_states(k, v))
        output: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **rest)
        return output

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **rest: Any
    ) -> Tensor:
        """Attend as SGLang's method does, with chunks of new tokens; a request's first forward is one of these."""
        # Attention of extends runs eagerly, on the stream of the forward, whatever graphs are around it.
        if layer.layer_id == self._first_layer and k is not None:
            self.pool.forget_former_requests()
            if self._flash is not None:
                self._flash.begin()
        self._longest, self._lengths = _longest_request(forward_batch), forward_batch.extend_seq_lens_cpu
        self._enter(layer, forward_batch, is_stored=save_kv_cache or k is None)
        self._verifies = forward_batch.forward_mode.is_target_verify()
        self._is_reader = k is None and layer.layer_id in self._packed
        if self._is_reader:
            with refusing():
                chunk = self._shared.take(layer.layer_id)
            k, v, self._stored_at = chunk.k, chunk.v, chunk.stored_at
        output: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **rest)
        # As SGLang's flash attention returns it, by heads in one row: its code for Gemma 3n takes no other shape.
        return output.flatten(1)

    def _enter(self, layer: Any, forward_batch: Any, *, is_stored: bool) -> None:
        self._stored_at = None
        copies = self.pool.copies_of(layer.layer_id)
        if copies is not None and not is_stored:
            with refusing():
                raise ServingError("this model stores keys by itself, so that an exact window would miss them")
        self._window = None if copies is None else WindowReads(copies, forward_batch.req_pool_indices)

    def _set_kv_buffer(
        self, forward_batch: Any, layer: Any, loc_info: Any, k: Tensor, v: Tensor, *scales: float | None
    ) -> None:
        self._stored_at = write_slots(loc_info)
        super()._set_kv_buffer(forward_batch, layer, loc_info, k, v, *scales)

    def _as_stored(self, keys: PackedRows, values: PackedRows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The new keys and values [tokens, heads, channels] as a reader of their rows sees them."""
        if self._stored_at is None:
            with refusing():
                raise ServingError(
                    "this model stores keys by itself, so that a chunk cannot read them back; drop --kvtuner-attend"
                )
        k, v = (self.attention.read(stored, self._stored_at, dtype) for stored in (keys, values))
        return k, v

    def _store_groups(
        self, keys: PackedRows, rows: Tensor, slots: Tensor, tokens: Tensor | None = None, chunk: NewKeys | None = None
    ) -> None:
        """Pack the groups that the layer's new tokens fill, of keys per channel, which the pool does not write."""
        window = self._window
        assert window is not None, "such a profile has a window, and its layers copies"
        with refusing():
            self.attention.store_groups(keys, window.ring, NewTokens(window.requests, rows, tokens), slots, chunk)

    def _decode(
        self, q: Tensor, keys: PackedRows | Tensor, values: PackedRows | Tensor, o: Tensor, kv_indptr: Tensor,
        kv_indices: Tensor, attn_logits: Tensor, attn_lse: Tensor, num_kv_splits: Tensor, max_kv_splits: int,
        sm_scale: float, *scales: Any, logit_cap: float = 0.0, **arguments: Any,
    ) -> None:  # fmt: skip
        """Called as SGLang's decode kernel, with rows for buffers; writes `o` [requests, heads, channels]."""
        if not (isinstance(keys, PackedRows) and isinstance(values, PackedRows)):
            self._decode_windows(
                q, keys, values, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits, max_kv_splits,
                sm_scale, *scales, logit_cap=logit_cap, **arguments,
            )  # fmt: skip
            return
        refuse_unserved(arguments)
        if keys.format.token_group > 1:
            self._store_groups(keys, kv_indptr, kv_indices)
        scores = ScoreScaling(sm_scale, logit_cap, arguments.get("sinks"))
        self.attention.decode(q, keys, values, kv_indptr, kv_indices, scores, out=o, window=self._window)

    def _forward_extend_kernel(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, o: Tensor, keys: PackedRows | Tensor,
        values: PackedRows | Tensor, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor,
        custom_mask: Tensor | None, is_causal: bool, mask_indptr: Tensor | None, max_len_extend: int,
        k_descale: float, v_descale: float, sm_scale: float, *, logit_cap: float = 0.0, **arguments: Any,
    ) -> None:  # fmt: skip
        """Called as SGLang's extend kernel, with rows for buffers; writes `o` [tokens, heads, channels]."""
        if self._both_ways == {"window"} and isinstance(keys, PackedRows) and not self._verifies:
            custom_mask = None  # it is of the other layers
        mask = None
        if custom_mask is not None and mask_indptr is not None and (self._verifies or self._both_ways):
            mask = ChunkMask(custom_mask, mask_indptr)
        # A kernel that is told that new tokens are causal reads none behind its block of queries, whatever a mask says.
        host_is_causal = is_causal and (mask is None or self._verifies)
        if not (isinstance(keys, PackedRows) and isinstance(values, PackedRows)):
            read = ExtendBounds(qo_indptr, kv_indptr, kv_indices, max_len_extend, None if self._verifies else mask)
            read, options = self._others.of_extend(read, layer.sliding_window_size + 1)
            super()._forward_extend_kernel(
                layer, q, k, v, o, keys, values, read.tokens, read.prefix, read.slots, custom_mask, host_is_causal,
                mask_indptr, read.longest, k_descale, v_descale, sm_scale, logit_cap=logit_cap,
                **{**arguments, **options},
            )  # fmt: skip
            return
        refuse_unserved({**arguments, "custom_mask": None if mask else custom_mask, "is_causal": is_causal})
        k, v = self.pool.new_states(k, v)
        if not self._is_reader:
            with refusing():
                self._shared.keep(layer.layer_id, SharedChunk(k, v, self._stored_at))
        if keys.format.token_group > 1:
            assert self._stored_at is not None, "the pool has just stored the layer's values"
            chunk = NewKeys(self._stored_at, k, max_len_extend)
            self._store_groups(keys, kv_indptr, kv_indices, qo_indptr, chunk)
        bounds = ExtendBounds(qo_indptr, kv_indptr, kv_indices, max_len_extend, mask)
        scores = ScoreScaling(sm_scale, logit_cap, arguments.get("sinks"))
        window, prefix = self._window, None
        # Drafts are read as they are without speculation, where each reads itself as it was stored.
        if self._verifies or self.pool.rank_state.attend == "cache":
            stored = self._as_stored(keys, values, q.dtype)
            if window is None:
                k, v = stored
            else:
                window = replace(window, stored=stored)
        near = None if window is None or not len(kv_indices) else self._near_prefix(window, bounds)
        # Each query has a window of its own, which one prefix for all of them cannot hold.
        reads_prefix = window is None or near is not None or (window.stored is None and not len(kv_indices))
        is_done = False
        # Drafts are verified in graphs, whose slots are as many as SGLang has room for.
        is_plain = logit_cap <= 0 and scores.sink_scores is None and not self._verifies and mask is None
        if reads_prefix and self._flash is not None and is_plain:
            is_done = self._flash.attend(q, k, v, keys, values, bounds, sm_scale, o, self._longest)
        elif reads_prefix:
            prefix = self.attention.read_prefix(q, keys, values, bounds)
        if prefix is not None:
            # SGLang's own kernel attends over the prefix that was read back for it, in order, from slot 0 on.
            new = (states.to(q.dtype) for states in self.pool.read_states(k, v))
            super()._forward_extend_kernel(
                layer, q, *new, o, *prefix, qo_indptr, kv_indptr, kv_indices, custom_mask,
                host_is_causal, mask_indptr, max_len_extend, 1.0, 1.0, sm_scale, logit_cap=logit_cap,
                **{**arguments, "page_size": 1, "identity_kv_indices": True},
            )  # fmt: skip
        elif not is_done:
            self.attention.extend(q, k, v, keys, values, bounds, scores, out=o, window=window)
            near = None
        if near is not None and len(near[0]):
            places, first = near
            o[places] = self.attention.extend(
                q[places], k[places], v[places], keys, values, first, scores, window=window
            )  # fmt: skip
        # Readers of the layer read the copies of tokens before the chunk, whose places those of the chunk may take.
        if window is not None and not self._shared.is_read_again(layer.layer_id):
            self.attention.store_copies(window.ring, NewTokens(window.requests, kv_indptr, qo_indptr), k, v)

    def _near_prefix(self, window: WindowReads, bounds: ExtendBounds) -> tuple[Tensor, ExtendBounds] | None:
        """The new tokens whose windows reach into prefixes, which attend once more, with copies: the first of a chunk.

        None where all of them read copies: with sinks, or where new tokens outside of a window read what is stored; and
        where SGLang has their numbers on the device alone.
        """
        if window.stored is not None or window.ring.window.sinks or self._lengths is None:
            return None
        return first_new_tokens(bounds, max(0, window.ring.window.residual_length - 1), self._lengths)


def windows_of(profile: Profile) -> dict[int, int]:
    """The tokens that each layer with a window reads, by its global id."""
    owners = profile.geometry.owners().items()
    return {layer_id: layer.kind.number or 0 for layer_id, layer in owners if layer.kind.name == "window"}


def _longest_request(forward_batch: Any) -> int | None:
    """The most tokens of a request with its prefix, where SGLang has their numbers on the host."""
    prefixes, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    if prefixes is None or lengths is None:
        return None
    return max((past + new for past, new in zip(prefixes, lengths, strict=True)), default=None)
