"""The bytes that attention by kernels works in on a GPU, beside weights and cache: SGLang's memory share knows none.

Knows nothing of servers or kernels; tests compare it with what the kernels take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvtuner.geometry import ModelGeometry

WORKSPACE_BYTES: Final = 512 << 20
"""The most bytes of a prefix that is read back, keys and values: 128k tokens of Llama-3.1-8B."""
MOST_PREPARED: Final = 512
"""The requests that decode at once for which scratch is kept; for more it is allocated for the call."""
SPARE_BYTES: Final = 4096
"""The bytes of a scratch that the alignment of its pieces may take."""
DECODED_PARTS: Final = 4096
"""The most parts of all requests that decode at once, on any device of the launch table."""
DECODED_LATENT_PARTS: Final = 1024
"""The same of latents, of which a processor holds one program: requests have as many as `Device.splits` gives them."""
INDEXED_PAGE_SIZE: Final = 64
"""The tokens of a page of SGLang's where layers have an index."""
_FLOAT_BYTES: Final = 4
_INDEX_BYTES: Final = 8
_SLOT_BYTES: Final = 4
_NATIVE_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes that the memory of attention on one rank follows from.

    Attributes:
        num_heads: The query heads of the rank.
        num_kv_heads: The KV heads of the rank.
        v_head_dim: The channels of a head's output, which of latents (MLA) are a latent's.
        decoded_parts: The most parts of all requests that decode at once.
        chunk_tokens: The most new tokens of a forward.
        graph_requests: The requests of the largest CUDA graph of decoding, 0 without graphs.
        context_length: The tokens that a request may have.
        window_tokens: The tokens of a request that the profile keeps exactly, 0 without an exact window.
        rope_dim: The rotary channels beside a latent.
        index_topk: The latents that an index selects for a query, of which attention stages some; 0 without one.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    decoded_parts: int
    chunk_tokens: int
    graph_requests: int
    context_length: int
    window_tokens: int
    rope_dim: int = 0
    index_topk: int = 0

    @classmethod
    def of(
        cls, geometry: ModelGeometry, *, tp_size: int, chunk_tokens: int, graph_requests: int, context_length: int,
        window_tokens: int, index_topk: int = 0,
    ) -> AttentionShape:  # fmt: skip
        """The shape of one of `tp_size` ranks of a model."""
        heads, kv_heads = (
            max(1, -(-count // tp_size)) for count in (geometry.num_attention_heads, geometry.num_kv_heads)
        )
        outputs, parts = geometry.v_head_dim, DECODED_PARTS
        if geometry.is_latent:
            outputs, parts = geometry.head_dim, DECODED_LATENT_PARTS
        return cls(
            heads, kv_heads, geometry.head_dim, outputs, parts, chunk_tokens, graph_requests, context_length,
            window_tokens, geometry.rope_dim, index_topk,
        )  # fmt: skip


def attention_bytes(shape: AttentionShape) -> int:
    """The bytes that a rank's attention takes at most, all at once.

    A chunk either reads its prefix back or keeps parts of its output: torch frees what it kept for the one where
    memory for the other runs out. What an index selects from is staged in the place of a prefix.
    """
    channels = shape.head_dim + shape.v_head_dim
    fresh = shape.chunk_tokens * shape.num_kv_heads * channels * _NATIVE_BYTES
    # The least splits of an extend are one part, beside that of new tokens, and those of copies and of stored tokens.
    parts = 4 if shape.window_tokens else 2
    partials = shape.chunk_tokens * shape.num_heads * (parts * (shape.v_head_dim + 1) * _FLOAT_BYTES)
    queries = shape.chunk_tokens * shape.num_heads * (shape.head_dim * _NATIVE_BYTES + _FLOAT_BYTES)
    read_back = WORKSPACE_BYTES + fresh
    of_chunk = read_back if shape.index_topk else max(read_back, partials + queries)
    return of_chunk + decode_scratch_bytes(shape) + slot_table_bytes(shape) + staged_in_graphs_bytes(shape)


def decode_scratch_bytes(shape: AttentionShape) -> int:
    """The most bytes of the scratch that decoding keeps."""
    parts = shape.decoded_parts + MOST_PREPARED  # that of copies too, of each request
    outputs, query = parts * (shape.v_head_dim + 1) * _FLOAT_BYTES, shape.head_dim * _NATIVE_BYTES + _FLOAT_BYTES
    return shape.num_heads * (outputs + MOST_PREPARED * query) + SPARE_BYTES


def slot_table_bytes(shape: AttentionShape) -> int:
    """The bytes of the token slots that SGLang's backend keeps for its largest graph.

    Beside an index it keeps pages, and slots where positions are selected.
    """
    if shape.index_topk:
        pages = -(-shape.context_length // INDEXED_PAGE_SIZE)
        slots = shape.context_length if shape.window_tokens else 0
        return shape.graph_requests * (pages + slots) * _SLOT_BYTES
    return shape.graph_requests * shape.context_length * _INDEX_BYTES


def staged_in_graphs_bytes(shape: AttentionShape) -> int:
    """The bytes of the latents that decoding stages under an exact window, which a graph keeps for itself."""
    if not (shape.index_topk and shape.window_tokens):
        return 0
    of_request = (shape.index_topk + shape.window_tokens) * (shape.head_dim + shape.rope_dim) * _NATIVE_BYTES
    return min(shape.graph_requests * of_request, max(WORKSPACE_BYTES, of_request))
