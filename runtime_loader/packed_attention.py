"""Attention over packed rows: what a server needs of an implementation, and one in plain torch.

The torch one is for processors and tests, and is what kernels are compared with. Knows nothing of servers or caches.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from kvtuner.errors import CacheError
from kvtuner.quant import IDENTITY, saturated

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.quant import Transform
    from kvtuner.runtime_loader.exact_ring import ExactRing, NewTokens, WindowReads
    from kvtuner.runtime_loader.row_format import RowFormat


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedRows:
    """Keys or values of one layer in a pool of token slots.

    The rows are [slots, row_bytes] uint8, or [slots, num_heads, head_dim] in the served dtype at 16 bits.
    """

    # Not a tensor on purpose: code that would read rows as keys fails at once.

    rows: Tensor
    format: RowFormat

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (slots, num_heads, head_dim) of the keys or values themselves."""
        return (self.rows.shape[0], self.format.num_heads, self.format.head_dim)

    def write(self, slots: Tensor, states: Tensor) -> None:
        """Store keys or values [tokens, num_heads, head_dim] at token slots [tokens]."""
        self.rows[slots] = self.format.pack(states).to(self.rows.dtype)

    def read(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys or values [tokens, num_heads, head_dim] of token slots [tokens], in model space."""
        return self.format.unpack(self.rows[slots], dtype)

    def as_stored(self, states: Tensor) -> Tensor:
        """Keys or values [tokens, num_heads, head_dim] as a reader of their rows would see them, float32."""
        return self.format.unpack(self.format.pack(states), torch.float32)

    def read_stored(self, slots: Tensor) -> Tensor:
        """`read` in stored space, float32."""
        return self.format.unpack_stored(self.rows[slots])


@dataclass(frozen=True, slots=True)
class ScoreScaling:
    """The scaling of products to scores: with a `logit_cap` they are ``cap * tanh(scale * product / cap)``."""

    scale: float
    logit_cap: float = 0.0

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
        """Transform, quantize, pack and write keys and values [tokens, num_kv_heads, head_dim] to slots [tokens]."""

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
        """Attention of new tokens over their request's stored prefix and, causally, over one another.

        The new tokens have queries `q` [tokens, num_heads, head_dim], and fresh keys `k` [tokens, num_kv_heads,
        head_dim] and values `v` [tokens, num_kv_heads, v_head_dim], which are read as they are. Under a `window` each
        query reads the copies at hand of the prefix, and of new tokens what `WindowReads.stored` says. The result is
        `out`, or a new tensor, [tokens, num_heads, v_head_dim] in the dtype of `q`; anything for tokens of no request,
        which pad a batch.
        """

    def read_prefix(
        self, q: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds
    ) -> tuple[Tensor, Tensor] | None:
        """The stored prefixes in model space, where the server's own attention reads them faster than `extend` would.

        They are keys and values [slots, num_kv_heads, head_dim] in the dtype of `q`, one after the other as in
        `bounds.slots`, or None where `extend` is to be called.
        """


@dataclass(frozen=True, slots=True)
class ExtendBounds:
    """The new tokens and the slots of each request of a batch.

    Attributes:
        tokens: [requests + 1]; request r has the new tokens ``tokens[r]`` to ``tokens[r + 1]``.
        prefix: [requests + 1]; and the stored prefix ``slots[prefix[r]:prefix[r + 1]]``.
        slots: The token slots of all prefixes, one after the other; any after the last prefix are not read.
        longest: The most new tokens of a request, known without asking the device.
    """

    tokens: Tensor
    prefix: Tensor
    slots: Tensor
    longest: int


class TorchAttention:
    """`PackedAttention` in plain torch, one request after the other."""

    name = "torch"
    rounding = 0.0

    def prepare(self, layers: list[tuple[PackedRows, PackedRows]], num_heads: int, max_requests: int) -> None:
        """See `PackedAttention.prepare`."""

    def store(self, keys: PackedRows, values: PackedRows, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See `PackedAttention.store`."""
        keys.write(slots, k)
        values.write(slots, v)

    def store_copies(self, ring: ExactRing, new: NewTokens, k: Tensor, v: Tensor) -> None:
        """See `PackedAttention.store_copies`."""
        ring.store(new, k, v)

    def decode(
        self, q: Tensor, keys: PackedRows, values: PackedRows, indptr: Tensor, slots: Tensor, scores: ScoreScaling,
        out: Tensor | None = None, window: WindowReads | None = None,
    ) -> Tensor:  # fmt: skip
        """See `PackedAttention.decode`."""
        # In stored space: one query is transformed, and the sums of values back, never the history.
        k_transform, v_transform = _transform(keys), _transform(values)
        num_kv_heads = keys.format.num_heads
        queries = k_transform.apply_to_query(q, num_kv_heads)
        output = q.new_zeros(len(q), q.shape[1], values.format.head_dim, dtype=torch.float32)
        copied = torch.zeros_like(output)  # in model space
        for request, (start, stop) in enumerate(_spans(indptr, len(q))):
            if start == stop:
                continue
            read, one = slots[start:stop], slice(request, request + 1)
            products = _products(queries[one], keys.read_stored(read))
            if k_transform.mu is not None and (scores.logit_cap > 0 or window is not None):
                # Without a cap or copies softmax cancels what all cached keys share.
                products = products + _products(q[one].float(), k_transform.mu.float().unsqueeze(0))
            if window is None:
                weights = torch.softmax(scores(products), dim=-1)
                output[request] = _weighted(weights, values.read_stored(read))[0]
                continue
            last = torch.tensor([stop - start - 1], device=q.device)
            copies, hidden = _copies(window, request, last, stop - start)
            products = torch.cat((products, _products(q[one].float(), copies.k)), dim=-1)
            weights = torch.softmax(scores(products).masked_fill(hidden, -torch.inf), dim=-1)
            of_rows, of_copies = weights.split((stop - start, len(copies.k)), dim=-1)
            output[request] = _weighted(of_rows, values.read_stored(read))[0]
            copied[request] = _weighted(of_copies, copies.v)[0]
        output = saturated(v_transform.invert(output) + copied, q.dtype)
        return output if out is None else out.copy_(output)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds,
        scores: ScoreScaling, out: Tensor | None = None, window: WindowReads | None = None,
    ) -> Tensor:  # fmt: skip
        """See `PackedAttention.extend`."""
        # In model space: the prefix is read back, beside fresh keys that hold their mean.
        output = q.new_empty(len(q), q.shape[1], values.format.head_dim) if out is None else out
        num_requests = len(bounds.tokens) - 1
        prefixes = _spans(bounds.prefix, num_requests)
        for request, (start, stop) in enumerate(_spans(bounds.tokens, num_requests)):
            if start == stop:
                continue
            prefix, new = bounds.slots[slice(*prefixes[request])], slice(start, stop)
            rows = _Tokens(keys.read(prefix, torch.float32), values.read(prefix, torch.float32))
            fresh = _Tokens(k[new].float(), v[new].float())
            tokens, hidden = _read_by_all(rows, fresh) if window is None else _read(window, request, rows, fresh, new)
            products = _products(q[new].float(), tokens.k)
            weights = torch.softmax(scores(products).masked_fill(hidden, -torch.inf), dim=-1)
            output[new] = _weighted(weights, tokens.v)
        return output

    def read_prefix(
        self, q: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds
    ) -> tuple[Tensor, Tensor] | None:
        """See `PackedAttention.read_prefix`: never."""


class _Tokens(NamedTuple):
    """Keys and values of some tokens, float32 [tokens, num_kv_heads, channels]."""

    k: Tensor
    v: Tensor


def _read_by_all(rows: _Tokens, fresh: _Tokens) -> tuple[_Tokens, Tensor]:
    """The tokens of a prefix and new ones, and which of them the new ones do not read, [new tokens, tokens]."""
    hidden = torch.ones((len(fresh.k), len(rows.k) + len(fresh.k)), dtype=torch.bool, device=fresh.k.device)
    return _joined(rows, fresh), hidden.triu(1 + len(rows.k))


def _read(window: WindowReads, request: int, rows: _Tokens, fresh: _Tokens, new: slice) -> tuple[_Tokens, Tensor]:
    """The tokens that new ones read under an exact window: a prefix and its copies, new ones and perhaps their rows."""
    num_new = len(fresh.k)
    positions = torch.arange(len(rows.k), len(rows.k) + num_new, device=fresh.k.device)
    copies, hidden = _copies(window, request, positions, len(rows.k))
    later = torch.ones((num_new, num_new), dtype=torch.bool, device=fresh.k.device).triu(1)
    if window.stored is None:
        return _joined(rows, copies, fresh), torch.cat((hidden, later), dim=-1)
    exact = window.ring.reads(positions, positions)
    stored = _Tokens(*(states[new].float() for states in window.stored))
    return _joined(rows, copies, stored, fresh), torch.cat((hidden, later | exact, later | ~exact), dim=-1)


def _joined(*parts: _Tokens) -> _Tokens:
    return _Tokens(torch.cat([part.k for part in parts]), torch.cat([part.v for part in parts]))


def _copies(window: WindowReads, request: int, queries: Tensor, num_tokens: int) -> tuple[_Tokens, Tensor]:
    """The copies at hand of a request's first tokens, and what queries do not read of rows and of copies.

    The mask is [queries, tokens + copies]: where a copy is read its row is hidden, and otherwise the copy.
    """
    positions, k, v = window.ring.read(int(window.requests[request]), num_tokens)
    reads = window.ring.reads(queries, positions)
    of_rows = torch.zeros((len(queries), num_tokens), dtype=torch.bool, device=queries.device)
    of_rows[:, positions] = reads
    return _Tokens(k.float(), v.float()), torch.cat((of_rows, ~reads), dim=-1)


def _transform(stored: PackedRows) -> Transform:
    return IDENTITY if stored.format.spec is None else stored.format.spec.transform


def _spans(indptr: Tensor, num_requests: int) -> list[tuple[int, int]]:
    bounds = indptr[: num_requests + 1].tolist()
    if len(bounds) <= num_requests:
        raise CacheError(f"{num_requests} requests need {num_requests + 1} bounds, but {len(bounds)} are given")
    return list(itertools.pairwise(bounds))


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Q . k of [queries, num_heads, head_dim] and [tokens, num_kv_heads, head_dim]: [num_heads, queries, tokens]."""
    grouped = q.transpose(0, 1).unflatten(0, (k.shape[1], -1))
    products: Tensor = grouped @ k.permute(1, 2, 0).unsqueeze(1)
    return products.flatten(0, 1)


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    """[queries, num_heads, channels]: sums of values [tokens, num_kv_heads, ...] by [num_heads, queries, tokens]."""
    grouped = weights.unflatten(0, (v.shape[1], -1))
    sums: Tensor = grouped @ v.transpose(0, 1).unsqueeze(1)
    return sums.flatten(0, 1).transpose(0, 1)
