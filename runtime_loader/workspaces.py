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
STAGED_AT_ONCE: Final = 8192
"""The tokens whose rows are read back at once where latents are staged."""
PLACED_AT_ONCE: Final = 1024
"""The new tokens whose selected tokens are looked up at once among staged latents, under an exact window."""
_FLOAT_BYTES: Final = 4
_INDEX_BYTES: Final = 8
_SLOT_BYTES: Final = 4
_LOOKUP_BYTES: Final = 40
"""The bytes of all tensors that looking one place up makes, its place among them."""
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
        attends_cache: Whether new tokens attend to one another as they were stored (``--kvtuner-attend cache``).
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
    attends_cache: bool = False

    @classmethod
    def of(
        cls, geometry: ModelGeometry, *, tp_size: int, chunk_tokens: int, graph_requests: int, context_length: int,
        window_tokens: int, index_topk: int = 0, attends_cache: bool = False,
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
            window_tokens, geometry.rope_dim, index_topk, attends_cache,
        )  # fmt: skip


def attention_bytes(shape: AttentionShape) -> int:
    """The bytes that a rank's attention takes at most, all at once.

    A chunk either reads its prefix back or keeps parts of its output: torch frees what it kept for the one where
    memory for the other runs out. What an index selects from is staged in the place of a prefix.
    """
    # The least splits of an extend are one part, beside that of new tokens, and those of copies and of stored tokens.
    parts = 4 if shape.window_tokens else 2
    partials = shape.chunk_tokens * shape.num_heads * (parts * (shape.v_head_dim + 1) * _FLOAT_BYTES)
    queries = shape.chunk_tokens * shape.num_heads * (shape.head_dim * _NATIVE_BYTES + _FLOAT_BYTES)
    read_back = WORKSPACE_BYTES + new_tokens_bytes(shape)
    of_chunk = read_back + selection_bytes(shape) if shape.index_topk else max(read_back, partials + queries)
    if shape.attends_cache and not shape.rope_dim:  # latents count so already, as they were stored
        of_chunk += new_tokens_bytes(shape)
    return of_chunk + decode_scratch_bytes(shape) + slot_table_bytes(shape) + staged_in_graphs_bytes(shape)


def new_tokens_bytes(shape: AttentionShape) -> int:
    """The bytes of a chunk's new tokens beside a prefix that is read back, as each of them reads the others.

    Latents and rotary channels are joined; besides they are there as they were stored or, where they are staged under
    an exact window, as they are.
    """
    channels = shape.head_dim + shape.v_head_dim
    if shape.rope_dim:
        copies = 2 if shape.window_tokens or not shape.index_topk else 1
        channels = copies * (shape.head_dim + shape.rope_dim)
    return shape.chunk_tokens * shape.num_kv_heads * channels * _NATIVE_BYTES


def selection_bytes(shape: AttentionShape) -> int:
    """The bytes of the places that a chunk's tokens have and read among staged latents, and of finding these."""
    places = shape.chunk_tokens * (shape.index_topk * _SLOT_BYTES + 2 * _INDEX_BYTES)
    return places + _staging_bytes(shape, min(shape.chunk_tokens, PLACED_AT_ONCE))


def _staging_bytes(shape: AttentionShape, queries: int) -> int:
    """The bytes that come and go while latents are staged: rows that are read back, or places that are looked up."""
    looked_up = queries * shape.index_topk * _LOOKUP_BYTES if shape.window_tokens else 0
    return max(STAGED_AT_ONCE * shape.head_dim * _NATIVE_BYTES, looked_up)


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
    """The bytes of the latents that decoding stages under an exact window, which a graph keeps for itself.

    Requests whose latents do not fit in the workspace are staged one after the other.
    """
    if not (shape.index_topk and shape.window_tokens and shape.graph_requests):
        return 0
    of_request = (shape.index_topk + shape.window_tokens) * (shape.head_dim + shape.rope_dim) * _NATIVE_BYTES
    together = min(shape.graph_requests, max(1, WORKSPACE_BYTES // of_request))
    of_index = together * shape.index_topk * _SLOT_BYTES + shape.graph_requests * _INDEX_BYTES  # slots and positions
    return together * of_request + of_index + _staging_bytes(shape, together)
