"""Attention over packed rows: the rows of a layer, and what a server needs of an implementation.

Knows nothing of servers, caches or implementations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

import torch

from kvtuner.quant import IDENTITY, saturated

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvtuner.quant import Transform
    from kvtuner.runtime_loader.exact_ring import ExactRing, NewTokens, WindowReads
    from kvtuner.runtime_loader.joined_chunk import JoinedChunk
    from kvtuner.runtime_loader.row_format import RowFormat


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedRows:
    """Keys or values of one layer in a pool of token slots.

    The rows are [slots, row_bytes] uint8, or [slots, num_heads, head_dim] in the served dtype at 16 bits.
    """

    # Not a tensor on purpose: code that would read rows as keys fails at once.

    rows: Tensor
    format: RowFormat

    @classmethod
    def zeros(
        cls, row_format: RowFormat, num_slots: int, dtype: torch.dtype, device: torch.device | str,
        allocate: Callable[..., Tensor] = torch.zeros,
    ) -> Self:  # fmt: skip
        """Rows of zeros; `dtype` is the served one, and `allocate` is called as `torch.zeros`."""
        if row_format.spec is None:
            shape: tuple[int, ...] = (num_slots, row_format.num_heads, row_format.head_dim)
            return cls(allocate(shape, dtype=dtype, device=device), row_format)
        shape = (num_slots, row_format.row_bytes(dtype))
        return cls(allocate(shape, dtype=torch.uint8, device=device), row_format)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (slots, num_heads, head_dim) of the keys or values themselves."""
        return (self.rows.shape[0], self.format.num_heads, self.format.head_dim)

    def write(self, slots: Tensor, states: Tensor) -> None:
        """Store keys or values [tokens, num_heads, head_dim] at token slots [tokens]; whole groups per channel."""
        self.rows[slots] = self.format.pack(states).to(self.rows.dtype)

    def read(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys or values [tokens, num_heads, head_dim] of token slots [tokens], in model space."""
        if self.format.token_group > 1:
            return saturated(self.read_stored(slots), dtype)
        return self.format.unpack(self.rows[slots], dtype)

    def read_stored(self, slots: Tensor) -> Tensor:
        """Keys or values [tokens, num_heads, head_dim] of token slots, float32, in the space that they are stored in.

        Per channel each group of slots is read whole, whichever of its tokens are asked for; one that was never full
        gives any numbers.
        """
        group = self.format.token_group
        if group == 1:
            return self.format.unpack_stored(self.rows.index_select(0, slots))
        groups, places = (slots // group).unique(return_inverse=True)
        tokens = self.format.unpack_stored(self.rows.unflatten(0, (-1, group))[groups])
        return tokens[places, slots % group]

    def as_stored(self, states: Tensor) -> Tensor:
        """Keys or values [tokens, num_heads, head_dim] as a reader of their rows would see them, float32."""
        if self.format.spec is not None and self.format.token_group > 1:
            return self.format.spec.simulate(states)
        return self.format.unpack(self.format.pack(states), torch.float32)

    @property
    def transform(self) -> Transform:
        """The transform to the space that keys or values are stored in."""
        return IDENTITY if self.format.spec is None else self.format.spec.transform


@dataclass(frozen=True, slots=True)
class ScoreScaling:
    """The scaling of products to scores: with a `logit_cap` they are ``cap * tanh(scale * product / cap)``.

    Attributes:
        sink_scores: The scores of attention sinks, float32 [num_heads]: each query's softmax has that of its head as
            one more, of a token without a value. None where a model has none.
    """

    scale: float
    logit_cap: float = 0.0
    sink_scores: Tensor | None = field(default=None, compare=False)

    def __call__(self, products: Tensor) -> Tensor:
        """Scores of products q . k."""
        scores = products * self.scale
        return self.logit_cap * torch.tanh(scores / self.logit_cap) if self.logit_cap > 0 else scores


class PackedAttention(Protocol):
    """The attention that a server calls for every layer. Tensors lie on the device of the rows.

    `rounding` is the relative error of queries and weights over packed rows, beside that of the served dtype.
    """

    name: str
    rounding: float

    def prepare(self, layers: list[tuple[PackedRows, PackedRows]], num_heads: int, max_requests: int) -> None:
        """Get ready, once, before anything is captured in a graph, for at most `max_requests` that decode at once.

        A layer that this implementation cannot read is named in a `ServingError`.
        """

    def store(self, keys: PackedRows, values: PackedRows, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Transform, quantize, pack and write keys and values [tokens, num_kv_heads, head_dim] to slots [tokens].

        Keys per channel come in whole groups.
        """

    def store_side(self, stored: PackedRows, slots: Tensor, states: Tensor) -> None:
        """Store keys or values alone: keys per channel are stored later than their values, once a group is full."""

    def store_groups(
        self, keys: PackedRows, ring: ExactRing, new: NewTokens, slots: Tensor, chunk: NewKeys | None = None
    ) -> None:
        """Pack the groups of keys per channel that new tokens fill.

        Args:
            keys: The rows of a layer's keys.
            ring: The layer's copies, which have those of single new tokens already, and not yet those of a chunk.
            new: The new tokens.
            slots: The token slots of all requests, by ``new.rows``.
            chunk: The keys of several new tokens of a request.

        Raises:
            CacheError: A copy of a token in a group that is not full is not at hand; on a GPU the group holds NaN
                then, which shows in every answer that reads it.
        """

    def store_copies(self, ring: ExactRing, new: NewTokens, k: Tensor, v: Tensor) -> None:
        """Copy keys and values as `store` takes them to the places of an exact window.

        New tokens take the places of the first ones that none of them reads. So they are copied before a request of one
        new token attends, and after one of several does. Tokens of no request, at the end, are not copied.
        """

    def decode(
        self, q: Tensor, keys: PackedRows, values: PackedRows, indptr: Tensor, slots: Tensor, scores: ScoreScaling,
        out: Tensor | None = None, window: WindowReads | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of one query per request, `q` [requests, num_heads, head_dim], over what the pool holds of it.

        Request r reads the token slots ``slots[indptr[r]:indptr[r + 1]]``, or under a `window` the copies at hand. The
        result is `out`, or a new tensor, [requests, num_heads, v_head_dim] in the dtype of `q`; zeros for a request
        without tokens.
        """

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds,
        scores: ScoreScaling, out: Tensor | None = None, window: WindowReads | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of new tokens over their request's stored prefix and over one another, causally or by a mask.

        The new tokens have queries `q` [tokens, num_heads, head_dim], and fresh keys `k` [tokens, num_kv_heads,
        head_dim] and values `v` [tokens, num_kv_heads, v_head_dim], which are read as they are. Under a `window` each
        query reads the copies at hand of the prefix, and of new tokens what `WindowReads.stored` says. The result is
        `out`, or a new tensor, [tokens, num_heads, v_head_dim] in the dtype of `q`; anything for tokens of no request,
        which pad a batch.
        """

    def read(self, stored: PackedRows, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys or values [tokens, num_kv_heads, channels] of token slots [tokens], in model space.

        They are of the served `dtype`, or of float32 where `extend` reads new tokens as precisely as that.
        """

    def read_prefix(
        self, q: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds, chunk: JoinedChunk | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """The stored prefixes in model space, where the server's own attention reads them faster than `extend` would.

        They are keys and values [slots, num_kv_heads, head_dim] in the dtype of `q`, one after the other as in
        `bounds.slots`, or None where `extend` is to be called. With a `chunk` they are buffers with the places of
        new tokens too, which nobody has written.
        """


@dataclass(frozen=True, slots=True)
class NewKeys:
    """The keys of a chunk of new tokens.

    Attributes:
        slots: Their token slots, [tokens].
        states: The keys [tokens, num_kv_heads, head_dim].
        longest: The most new tokens of a request, known without asking the device.
    """

    slots: Tensor
    states: Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class ChunkMask:
    """The new tokens of a request that each of them reads: drafts those they follow, tokens of an image one another.

    All read the whole prefix.

    Attributes:
        mask: Bools as SGLang makes them, of one request after the other [tokens, prefix + tokens], true where a new
            token reads another; those of the prefix are not looked at.
        starts: [requests + 1]; the part of request r begins at ``mask[starts[r]]``.
    """

    mask: Tensor
    starts: Tensor

    def of_request(self, request: int, num_past: int, num_tokens: int) -> Tensor:
        """Whether the new tokens of a request read one another, [tokens, tokens]."""
        start = int(self.starts[request])
        whole = self.mask[start : start + num_tokens * (num_past + num_tokens)]
        return whole.view(num_tokens, num_past + num_tokens)[:, num_past:]


@dataclass(frozen=True, slots=True)
class ExtendBounds:
    """The new tokens and the slots of each request of a batch.

    Attributes:
        tokens: [requests + 1]; request r has the new tokens ``tokens[r]`` to ``tokens[r + 1]``.
        prefix: [requests + 1]; and the stored prefix ``slots[prefix[r]:prefix[r + 1]]``.
        slots: The token slots of all prefixes, one after the other; any after the last prefix are not read.
        longest: The most new tokens of a request, known without asking the device.
        mask: The new tokens that each reads, never under an exact window; without one each reads all before it.
    """

    tokens: Tensor
    prefix: Tensor
    slots: Tensor
    longest: int
    mask: ChunkMask | None = None
