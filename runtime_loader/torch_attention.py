"""Attention over packed rows in plain torch, a block of tokens at a time: for processors without a compiler, and tests.

Rows are not read back to numbers. Codes are multiplied as they are, and a group's scale and minimum come in once for
each query: ``q . (code * scale + minimum)`` is ``scale * (q . code) + minimum * sum(q)``, and a sum of values likewise.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kvtuner.errors import CacheError
from kvtuner.quant import saturated
from kvtuner.row_packing import codes_of_rows, words_of_rows
from kvtuner.runtime_loader.token_groups import GroupsOnHost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from kvtuner.runtime_loader.exact_ring import ExactRing, NewTokens, WindowReads
    from kvtuner.runtime_loader.joined_chunk import JoinedChunk
    from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows, ScoreScaling

BLOCK_KEYS: Final = 512
"""The tokens that are read at a time: their codes in float32 stay in a processor's cache."""
BLOCK_QUERIES: Final = 256
"""The new tokens that attend at a time, which bounds the memory that scores take."""


class TorchAttention(GroupsOnHost):
    """`PackedAttention` in plain torch, one request after the other."""

    name = "torch"
    rounding = 0.0

    def layer_of(self, keys: PackedRows, values: PackedRows, scores: ScoreScaling, *, shares_mean: bool) -> TorchLayer:
        """What reads the rows of a layer."""
        return TorchLayer(keys, values, scores, shares_mean)

    def prepare(self, layers: list[tuple[PackedRows, PackedRows]], num_heads: int, max_requests: int) -> None:
        """See `PackedAttention.prepare`."""

    def store(self, keys: PackedRows, values: PackedRows, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See `PackedAttention.store`."""
        keys.write(slots, k)
        values.write(slots, v)

    def store_side(self, stored: PackedRows, slots: Tensor, states: Tensor) -> None:
        """See `PackedAttention.store_side`."""
        stored.write(slots, states)

    def store_copies(self, ring: ExactRing, new: NewTokens, k: Tensor, v: Tensor) -> None:
        """See `PackedAttention.store_copies`."""
        ring.store(new, k, v)

    def decode(
        self, q: Tensor, keys: PackedRows, values: PackedRows, indptr: Tensor, slots: Tensor, scores: ScoreScaling,
        out: Tensor | None = None, window: WindowReads | None = None,
    ) -> Tensor:  # fmt: skip
        """See `PackedAttention.decode`."""
        # Without a cap, copies or sinks softmax cancels what all cached keys share.
        is_shared = scores.logit_cap > 0 or window is not None or scores.sink_scores is not None
        layer = self.layer_of(keys, values, scores, shares_mean=is_shared)
        output = q.new_zeros(len(q), q.shape[1], layer.channels) if out is None else out.zero_()
        for request, (start, stop) in enumerate(_spans(indptr, len(q))):
            if start == stop:
                continue
            read, one = slots[start:stop], slice(request, request + 1)
            if window is None:
                parts = [layer.of_rows(q[one], read)]
            else:
                last = torch.tensor([stop - start - 1], device=q.device)
                copies, of_rows, of_copies = _copies(window, request, last, stop - start)
                parts = [layer.of_rows(q[one], read, of_rows), layer.of_states(q[one], copies, of_copies)]
            output[one] = layer.attend(q[one], parts)
        return output

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds,
        scores: ScoreScaling, out: Tensor | None = None, window: WindowReads | None = None,
    ) -> Tensor:  # fmt: skip
        """See `PackedAttention.extend`."""
        layer = self.layer_of(keys, values, scores, shares_mean=True)
        output = q.new_empty(len(q), q.shape[1], layer.channels) if out is None else out
        num_requests = len(bounds.tokens) - 1
        prefixes = _spans(bounds.prefix, num_requests)
        for request, (start, stop) in enumerate(_spans(bounds.tokens, num_requests)):
            prefix = bounds.slots[slice(*prefixes[request])]
            mask = None if bounds.mask is None else bounds.mask.of_request(request, len(prefix), stop - start)
            assert mask is None or window is None
            for first in range(start, stop, BLOCK_QUERIES):
                new = slice(first, min(first + BLOCK_QUERIES, stop))
                # Of the request's new tokens those up to the last of these queries; a mask may have later ones.
                seen = slice(start, new.stop if mask is None else stop)
                fresh = TorchStates(k[seen], v[seen])
                own = slice(new.start - start, new.stop - start)
                later = _later(own.stop - own.start, own.stop, q.device) if mask is None else ~mask[own]
                if window is None:
                    parts = [layer.of_rows(q[new], prefix), layer.of_states(q[new], fresh, later)]
                else:
                    reads = _WindowOfChunk(window, request, len(prefix), new.start - start, new.stop - start)
                    parts = reads.parts(layer, q[new], prefix, fresh, seen, later)
                output[new] = layer.attend(q[new], parts)
        return output

    def read(self, stored: PackedRows, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """See `PackedAttention.read`: in float32."""
        return stored.read(slots, torch.float32)

    def read_prefix(
        self, q: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds, chunk: JoinedChunk | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """See `PackedAttention.read_prefix`: never."""


class TorchStates(NamedTuple):
    """Keys and values of some tokens in model space, [tokens, num_kv_heads, channels]."""

    k: Tensor
    v: Tensor


class TorchNumbers(NamedTuple):
    """Keys or values of a block of tokens: codes with their scale words, or numbers without.

    Attributes:
        codes: float32 [tokens, num_kv_heads, channels].
        scale: float32 [num_kv_heads, num_groups, 1, tokens]; None where the codes are the numbers themselves.
        minimum: float32, as the scale.
    """

    codes: Tensor
    scale: Tensor | None = None
    minimum: Tensor | None = None

    @classmethod
    def of_rows(cls, stored: PackedRows, slots: Tensor) -> TorchNumbers:
        """The numbers of token slots, in stored space."""
        spec = stored.format.spec
        if spec is None or spec.fp8 or spec.token_group > 1:
            return cls(stored.read_stored(slots))
        rows = stored.rows.index_select(0, slots)
        num_heads, head_dim, group_size = stored.format.num_heads, stored.format.head_dim, spec.group_size
        words = words_of_rows(rows, spec.bits, num_heads, head_dim, group_size or head_dim, word_bits=spec.word_bits)
        scale, minimum = (word.float().permute(1, 2, 0).unsqueeze(2) for word in words)
        return cls(codes_of_rows(rows, spec.bits, num_heads, head_dim).float(), scale, minimum)

    @classmethod
    def of_states(cls, states: Tensor) -> TorchNumbers:
        """The numbers of keys or values themselves, in model space."""
        return cls(states.float())

    def products(self, q: Tensor) -> Tensor:
        """Q . k of queries [num_kv_heads, queries, channels]: [num_kv_heads, queries, tokens]."""
        if self.scale is None or self.minimum is None:
            products: Tensor = q @ self.codes.permute(1, 2, 0)
            return products
        groups = q.unflatten(-1, (self.scale.shape[1], -1)).transpose(1, 2)
        codes = self.codes.unflatten(-1, (groups.shape[1], -1)).permute(1, 2, 3, 0)
        folded: Tensor = (groups @ codes).mul_(self.scale).add_(groups.sum(-1, keepdim=True) * self.minimum)
        return folded.sum(1)

    def weighted(self, weights: Tensor) -> Tensor:
        """Sums of values by weights [num_kv_heads, queries, tokens]: [num_kv_heads, queries, channels]."""
        if self.scale is None or self.minimum is None:
            sums: Tensor = weights @ self.codes.transpose(0, 1)
            return sums
        by_group = weights.unsqueeze(1)
        codes = self.codes.unflatten(-1, (self.scale.shape[1], -1)).permute(1, 2, 0, 3)
        sums = (by_group * self.scale) @ codes + by_group @ self.minimum.transpose(-1, -2)
        return sums.transpose(1, 2).flatten(-2)


@dataclass(frozen=True, slots=True)
class TorchPart:
    """Tokens that queries attend to, a block at a time.

    Attributes:
        queries: The queries in the space of these keys, float32 [num_kv_heads, gqa * queries, channels].
        blocks: What reads their keys and values, with the tokens of each.
        hidden: The tokens that a query does not read, [queries, tokens]; None where each reads all.
        mean: What products with these keys lack, [num_kv_heads, gqa * queries, 1], if anything.
        in_model_space: Whether sums of these values are in model space.
    """

    queries: Tensor
    blocks: Callable[[], Iterator[tuple[slice, TorchNumbers, Callable[[], TorchNumbers]]]]
    hidden: Tensor | None = None
    mean: Tensor | None = None
    in_model_space: bool = False


@dataclass(frozen=True, slots=True)
class TorchLayer:
    """The rows of a layer, and how products become scores.

    `shares_mean` says that a softmax reads other keys too, or is capped, so that products need what cached keys share.
    """

    keys: PackedRows
    values: PackedRows
    scores: ScoreScaling
    shares_mean: bool

    @property
    def channels(self) -> int:
        """The channels of a head's output."""
        return self.values.format.head_dim

    def of_rows(self, q: Tensor, slots: Tensor, hidden: Tensor | None = None) -> TorchPart:
        """The part of queries [queries, num_heads, channels] that is read from token slots."""

        def blocks() -> Iterator[tuple[slice, TorchNumbers, Callable[[], TorchNumbers]]]:
            for start in range(0, len(slots), BLOCK_KEYS):
                read = slots[start : start + BLOCK_KEYS]
                k = TorchNumbers.of_rows(self.keys, read)
                yield slice(start, start + len(read)), k, partial(TorchNumbers.of_rows, self.values, read)

        transform, num_heads = self.keys.transform, self.keys.format.num_heads
        mean = None
        if self.shares_mean and transform.mu is not None:
            mean = by_kv_head(q, num_heads) @ transform.mu.to(q.device, torch.float32).unsqueeze(-1)
        return TorchPart(by_kv_head(transform.apply_to_query(q, num_heads), num_heads), blocks, hidden, mean)

    def of_states(self, q: Tensor, states: TorchStates, hidden: Tensor) -> TorchPart:
        """The part of queries that is read from keys and values in model space."""

        def blocks() -> Iterator[tuple[slice, TorchNumbers, Callable[[], TorchNumbers]]]:
            for start in range(0, len(states.k), BLOCK_KEYS):
                read = slice(start, min(start + BLOCK_KEYS, len(states.k)))
                yield read, TorchNumbers.of_states(states.k[read]), partial(TorchNumbers.of_states, states.v[read])

        return TorchPart(by_kv_head(q, self.keys.format.num_heads), blocks, hidden, in_model_space=True)

    def attend(self, q: Tensor, parts: list[TorchPart]) -> Tensor:
        """The attention of queries [queries, num_heads, channels] over all parts, in their dtype."""
        shape = (self.keys.format.num_heads, q.shape[1] // self.keys.format.num_heads, len(q))
        softmax = _OnlineSoftmax(parts[0].queries, self.channels)
        for part in parts:
            for tokens, k, read_values in part.blocks():
                products = k.products(part.queries)
                scores = self.scores(products if part.mean is None else products + part.mean)
                if part.hidden is not None:
                    by_query = scores.unflatten(1, shape[1:])
                    scores = by_query.masked_fill(part.hidden[:, tokens], -torch.inf).flatten(1, 2)
                weights = softmax.weights(scores)
                sums = softmax.in_model_space if part.in_model_space else softmax.stored
                sums += read_values().weighted(weights)
        if (sinks := self.scores.sink_scores) is not None:
            softmax.add_sinks(sinks.float().view(*shape[:2], 1).expand(shape).flatten(1).unsqueeze(-1))
        stored, model = (
            (sums / softmax.total).unflatten(1, shape[1:]).permute(2, 0, 1, 3).flatten(1, 2)
            for sums in (softmax.stored, softmax.in_model_space)
        )
        return saturated(self.values.transform.invert(stored) + model, q.dtype)


class _OnlineSoftmax:
    """Sums of values by weights that are relative to the largest score so far."""

    def __init__(self, queries: Tensor, channels: int) -> None:
        shape = queries.shape[:2]
        self.stored = queries.new_zeros(*shape, channels)
        self.in_model_space = queries.new_zeros(*shape, channels)
        self.total = queries.new_zeros(*shape, 1)
        self._top = queries.new_full((*shape, 1), -torch.inf)

    def weights(self, scores: Tensor) -> Tensor:
        """The weights of more tokens, [num_kv_heads, queries, tokens], after which all sums are relative to them."""
        top = torch.maximum(self._top, scores.amax(-1, keepdim=True))
        base = top.masked_fill(top == -torch.inf, 0.0)  # of a query that has read nothing yet
        shrink, weights = torch.exp(self._top - base), torch.exp(scores - base)
        for sums in (self.stored, self.in_model_space, self.total):
            sums *= shrink
        self.total += weights.sum(-1, keepdim=True)
        self._top = top
        return weights

    def add_sinks(self, scores: Tensor) -> None:
        """Count scores [num_kv_heads, queries, 1] of tokens without values, after all others."""
        top = torch.maximum(self._top, scores)
        shrink = torch.exp(self._top - top)
        for sums in (self.stored, self.in_model_space, self.total):
            sums *= shrink
        self.total += torch.exp(scores - top)
        self._top = top


@dataclass(frozen=True, slots=True)
class _WindowOfChunk:
    """What new tokens `first` to `last` of a chunk read under an exact window, behind `num_past` tokens."""

    window: WindowReads
    request: int
    num_past: int
    first: int
    last: int

    def parts(
        self, layer: TorchLayer, q: Tensor, prefix: Tensor, fresh: TorchStates, seen: slice, later: Tensor
    ) -> list[TorchPart]:
        """The prefix and its copies, and the new tokens up to the last of these, exactly or as rows give them back."""
        positions = torch.arange(self.num_past, self.num_past + self.last, device=q.device)
        queries = positions[self.first :]
        copies, of_rows, of_copies = _copies(self.window, self.request, queries, self.num_past)
        parts = [layer.of_rows(q, prefix, of_rows), layer.of_states(q, copies, of_copies)]
        if self.window.stored is None:
            return [*parts, layer.of_states(q, fresh, later)]
        exact = self.window.ring.reads(queries, positions)
        stored = TorchStates(*(states[seen] for states in self.window.stored))
        return [*parts, layer.of_states(q, stored, later | exact), layer.of_states(q, fresh, later | ~exact)]


def _later(num_queries: int, num_tokens: int, device: torch.device) -> Tensor:
    """The tokens that come after each of the queries, which are the last of them, [queries, tokens]."""
    hidden = torch.ones((num_queries, num_tokens), dtype=torch.bool, device=device)
    return hidden.triu(1 + num_tokens - num_queries)


def _copies(window: WindowReads, request: int, queries: Tensor, num_tokens: int) -> tuple[TorchStates, Tensor, Tensor]:
    """The copies at hand of a request's first tokens, and what queries do not read of rows and of copies.

    The masks are [queries, tokens] and [queries, copies]: where a copy is read its row is hidden, and otherwise the
    copy.
    """
    positions, k, v = window.ring.read(int(window.requests[request]), num_tokens)
    reads = window.ring.reads(queries, positions)
    of_rows = torch.zeros((len(queries), num_tokens), dtype=torch.bool, device=queries.device)
    of_rows[:, positions] = reads
    return TorchStates(k, v), of_rows, ~reads


def _spans(indptr: Tensor, num_requests: int) -> list[tuple[int, int]]:
    bounds = indptr[: num_requests + 1].tolist()
    if len(bounds) <= num_requests:
        raise CacheError(f"{num_requests} requests need {num_requests + 1} bounds, but {len(bounds)} are given")
    return list(itertools.pairwise(bounds))


def by_kv_head(q: Tensor, num_kv_heads: int) -> Tensor:
    """Queries [queries, num_heads, channels] as float32 [num_kv_heads, gqa * queries, channels]."""
    grouped: Tensor = q.float().transpose(0, 1).unflatten(0, (num_kv_heads, -1))
    return grouped.flatten(1, 2)
