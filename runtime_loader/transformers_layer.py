"""One layer of a `KVTunerCache`, as transformers calls it. Knows no models or profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvtuner.precision import NO_WINDOW, ExactWindow, PrecisionPair
from kvtuner.runtime_loader.packed_layer import PackedSide, TokenBuffer, packed_side
from kvtuner.runtime_loader.rows_in_place import StoredChunk
from kvtuner.runtime_loader.window_attention import num_copies as copies_of_chunk

if TYPE_CHECKING:
    from kvtuner.read_plan_names import ReadPlanName
    from kvtuner.runtime_loader.packed_attention import PackedAttention
    from kvtuner.runtime_loader.row_format import LayerFormat


class KVTunerLayer(CacheLayerMixin):
    """One layer of a `KVTunerCache`: its stored keys `k` and values `v`, and of some latents the keys of an index.

    An index is read whole for every query, in the dtype that it comes in.
    """

    # `keys` and `values`, which some code reads off other caches, stay None: nothing may take rows for keys.
    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, layer_format: LayerFormat, window: ExactWindow = NO_WINDOW) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self.k = packed_side(layer_format.k, window)
        self.v = packed_side(layer_format.v, window, layer_format.k.token_group)
        self.index_keys = TokenBuffer()
        self.window = window
        self.is_latent = layer_format.is_latent

    def __repr__(self) -> str:
        spec = self.k.format.spec
        v_bits = (self.k if self.is_latent else self.v).format.bits
        stored = "fp8" if spec is not None and spec.fp8 else PrecisionPair(self.k.format.bits, v_bits)
        return f"{type(self).__name__}({stored})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Check that the states can be stored, as `PackedSide.check` does; memory is taken when tokens come."""
        self.k.check(key_states)
        self.v.check(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, read_plan: ReadPlanName = "decode",
        num_copies: int = 0, **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Store a chunk and return what its queries read, both [batch, num_kv_heads, tokens, channels].

        Before all tokens come the newest `num_copies` as `PackedSide.extend` gives them. Releases of transformers pass
        more arguments, which are not used. Errors are those of `PackedSide.check`.
        """
        self.lazy_initialization(key_states, value_states)
        is_first = self.get_seq_length() == 0
        exact = read_plan == "hit" or (read_plan == "decode" and is_first)
        keys = self.k.extend(key_states, fresh_is_exact=exact, num_copies=num_copies)
        return keys, self.v.extend(value_states, fresh_is_exact=exact, num_copies=num_copies)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store a chunk's keys of the layer's index, [batch, tokens, channels], and return those of all tokens."""
        self.index_keys.append(indexer_key_states)
        keys = self.index_keys.rows
        assert keys is not None
        return keys

    def store(
        self, attention: PackedAttention, key_states: Tensor, value_states: Tensor, read_plan: ReadPlanName
    ) -> tuple[Tensor, Tensor]:
        """Store a chunk by an attention that reads rows in place, and return it with what its queries read."""
        self.lazy_initialization(key_states, value_states)
        exact = read_plan == "hit" or (read_plan == "decode" and self.get_seq_length() == 0)
        chunk = StoredChunk.store(attention, (self.k, self.v), key_states, value_states, is_exact=exact)
        return chunk.beside(key_states), value_states

    def copies_read(self, num_queries: int, read_plan: ReadPlanName) -> int:
        """The newest tokens that are given twice, since the next chunk's tokens read different ones exactly.

        There are none for one token, nor for an exact first chunk, which reads nothing but itself.
        """
        is_exact = self.get_seq_length() == 0 and read_plan != "cache"
        if num_queries == 1 or is_exact or not self.window.residual_length:
            return 0
        return copies_of_chunk(num_queries, self.window.residual_length)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of what the next `update` returns."""
        return self.get_seq_length() + num_queries_of(query_length), 0

    def get_seq_length(self) -> int:
        """The number of stored tokens."""
        return len(self.k.buffer)

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # as early releases of transformers 5 call it

    @property
    def _parts(self) -> tuple[PackedSide, PackedSide, TokenBuffer]:
        """All that grows with tokens."""
        return self.k, self.v, self.index_keys

    def reset(self) -> None:
        """Forget everything and free the memory."""
        for part in self._parts:
            part.clear()
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, given as a negative count."""
        # In early releases of transformers 5 a positive one is the number of tokens to keep.
        rest = max(0, self.get_seq_length() + tokens_to_remove)
        kept = tokens_to_remove if tokens_to_remove > 0 else rest
        for part in self._parts:
            part.truncate(kept)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let beam i continue what beam `beam_idx[i]` stored."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences of the batch."""
        for part in self._parts:
            part.take(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch."""
        rows = self.k.buffer.rows
        if rows is not None:
            self.batch_select_indices(torch.arange(rows.shape[0]).repeat_interleave(repeats))


def num_queries_of(query_length: int | Tensor) -> int:
    """The number of queries of a chunk."""
    # Early releases of transformers 5 give the positions of the queries.
    return query_length.shape[0] if isinstance(query_length, Tensor) else query_length
