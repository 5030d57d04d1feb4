"""The self-test of an exact window, which compares copies and what is read of them with the window's definition.

Two requests get chunks and single tokens until places are taken anew, and one's slot goes to a third. Their rows lie in
a few token slots again and again, of other keys and values than their copies: so it shows which of both was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import torch

from kvtuner.runtime_loader.exact_ring import EMPTY, ExactRing, ExactRings, NewTokens, WindowReads
from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows, ScoreScaling
from kvtuner.runtime_loader.sglang.pools.self_test import failed, tested_slots, tolerance

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from kvtuner.runtime_loader.sglang.pools.packed_pool import PackedPool

HIT_TOKENS: Final = 7
"""The tokens of the third request that another computed."""


def window_self_test(pool: PackedPool, rings: ExactRings, generations: Tensor) -> None:
    """Copy keys and values by the backend in use, attend to them, hand a slot on, and refuse what differs."""
    handed_on = generations.clone()
    handed_on[0] += 1
    for index, (keys, values) in enumerate(zip(pool.keys, pool.values, strict=True)):
        ring = rings[index]
        if ring is None:
            continue
        test = _LayerTest(pool, keys, values, ring)
        problem = test.problem_of_copies()
        rings.forget_former_requests(handed_on)
        problem = problem or test.problem_of_slots()
        rings.forget_former_requests(generations)
        if problem is not None:
            raise failed(pool, f"{problem} (layer {pool.layer_ids[index]}, {ring.window})")
        test.clear()


@dataclass(slots=True)
class _Request:
    """A request in a slot: its keys and values so far, of which those from `first_own` on have copies."""

    slot: int
    k: Tensor
    v: Tensor
    first_own: int


@dataclass(frozen=True, slots=True)
class _Step:
    """New tokens of each request, `lengths`, after those `before`; single ones are decoded."""

    slots: Tensor
    before: list[int]
    lengths: tuple[int, int]
    k: Tensor
    v: Tensor

    @property
    def is_decode(self) -> bool:
        return max(self.lengths) == 1

    @property
    def ends(self) -> list[int]:
        return [before + length for before, length in zip(self.before, self.lengths, strict=True)]

    @property
    def new(self) -> NewTokens:
        if self.is_decode:
            return NewTokens(self.slots, self.indptr(self.ends))
        return NewTokens(self.slots, self.indptr(self.before), self.bounds)

    @property
    def bounds(self) -> Tensor:
        """The bounds of new tokens, in int64 as SGLang has them."""
        return self.indptr(self.lengths).long()

    def indptr(self, lengths: Iterable[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.slots.device)


class _LayerTest:
    """The test of one layer."""

    def __init__(self, pool: PackedPool, keys: PackedRows, values: PackedRows, ring: ExactRing) -> None:
        self._rank, self._read_states = pool.rank_state, pool.read_states
        self._keys, self._values, self._ring = keys, values, ring
        self._generator = torch.Generator().manual_seed(0)
        self._tokens = tested_slots([keys])
        for stored in (keys, values):
            stored.write(self._tokens, self._states(len(self._tokens), *stored.shape[1:]))
        self._requests = [self._request(slot, 0) for slot in (0, len(ring.positions) - 1)]

    def problem_of_copies(self) -> str | None:
        """What is wrong while requests get more tokens than they have places; None if nothing is."""
        window = self._ring.window
        # A chunk longer than the window, in places of tokens of its own; single tokens and chunks over those of others.
        steps = ((window.num_tokens + 5, 3), (1, 1), (2, window.sinks + 3), (1, 1))
        return next((problem for lengths in steps if (problem := self._problem_of_step(lengths))), None)

    def problem_of_slots(self) -> str | None:
        """What is wrong once the first slot is another request's, which begins with tokens that it did not compute."""
        self._requests[0] = self._request(self._requests[0].slot, HIT_TOKENS)
        if not self._has_its_copies(self._requests[0]):
            return "a request slot keeps the copies of its former request"
        return self._problem_of_step((2, 1)) or self._problem_of_step((1, 1))

    def clear(self) -> None:
        """Leave rows and copies as they are allocated."""
        for stored in (self._keys, self._values):
            stored.rows[self._tokens] = torch.zeros_like(stored.rows[self._tokens])
        for request in self._requests:
            self._ring.positions[request.slot] = EMPTY
            for copies in (self._ring.keys, self._ring.values):
                copies[request.slot] = torch.zeros_like(copies[request.slot])

    def _problem_of_step(self, lengths: tuple[int, int]) -> str | None:
        k, v = (self._states(sum(lengths), *stored.shape[1:]) for stored in (self._keys, self._values))
        slots = torch.tensor([request.slot for request in self._requests], device=k.device)
        step = _Step(slots, [len(request.k) for request in self._requests], lengths, k, v)
        for request, new_k, new_v in zip(self._requests, k.split(lengths), v.split(lengths), strict=True):
            request.k, request.v = torch.cat((request.k, new_k)), torch.cat((request.v, new_v))
        reads_right = True
        if step.is_decode:
            self._rank.attention.store_copies(self._ring, step.new, k, v)
        if any(step.before):  # a first chunk reads itself, which is no window's
            reads_right = all(self._reads_right(step, cap) for cap in sorted({0.0, self._rank.logit_cap}))
        if not step.is_decode:
            self._rank.attention.store_copies(self._ring, step.new, k, v)
        if not all(self._has_its_copies(request) for request in self._requests):
            return "exact copies are not those of the last and first tokens"
        return None if reads_right else "attention does not read the exact copies of its window"

    def _has_its_copies(self, request: _Request) -> bool:
        """Whether a slot has the copies of its request's own last and first tokens, and no others."""
        window, end = self._ring.window, len(request.k)
        own = range(request.first_own, end)
        kept = [position for position in own if position < window.sinks or position >= end - window.residual_length]
        positions, k, v = self._ring.read(request.slot, torch.iinfo(torch.int32).max)
        order = positions.argsort()
        return (
            positions[order].tolist() == kept
            and torch.equal(k[order], request.k[kept])
            and torch.equal(v[order], request.v[kept])
        )

    def _reads_right(self, step: _Step, cap: float) -> bool:
        """Whether the step's queries read copies and rows as the window says."""
        attention, keys, values = self._rank.attention, self._keys, self._values
        channels = self._read_states(step.k, step.v)[0].shape[-1]
        q = self._states(len(step.k), self._rank.gqa * keys.shape[1], channels) / 4
        scores, reads = ScoreScaling(keys.shape[-1] ** -0.5, cap), WindowReads(self._ring, step.slots)
        prefixes = step.ends if step.is_decode else step.before
        slots = torch.cat([self._token_slots(prefix) for prefix in prefixes])
        if step.is_decode:
            found = attention.decode(q, keys, values, step.indptr(prefixes), slots, scores, window=reads)
        else:
            if self._by_cache:
                reads = WindowReads(self._ring, step.slots, (keys.as_stored(step.k), values.as_stored(step.v)))
            bounds = ExtendBounds(step.bounds, step.indptr(prefixes), slots, max(step.lengths))
            found = attention.extend(q, step.k, step.v, keys, values, bounds, scores, window=reads)
        queries = zip(self._requests, q.split(step.lengths), step.before, strict=True)
        expected = torch.cat([self._attended(step, request, of, before, scores) for request, of, before in queries])
        allowed = tolerance(attention, q.dtype) * expected.abs().max()
        return bool(((found.float() - expected).abs() <= allowed).all())

    def _attended(self, step: _Step, request: _Request, q: Tensor, before: int, scores: ScoreScaling) -> Tensor:
        """Attention of a request's newest queries [queries, num_heads, head_dim] in float32."""
        window, positions = self._ring.window, torch.arange(len(request.k), device=q.device)
        queries, slots = positions[before:, None], self._token_slots(len(request.k))
        exact = (positions > queries - window.residual_length) | (positions < window.sinks)
        exact &= positions >= request.first_own
        stored = [side.read(slots, torch.float32) for side in (self._keys, self._values)]
        if not step.is_decode and self._by_cache:
            for side, rows, states in zip((self._keys, self._values), stored, (request.k, request.v), strict=True):
                rows[before:] = side.as_stored(states[before:])
        elif not step.is_decode:
            exact |= positions >= before
        (k1, v1), (k2, v2) = (
            [side.float().repeat_interleave(self._rank.gqa, dim=1) for side in self._read_states(*states)]
            for states in ((request.k, request.v), stored)
        )
        exactly, from_rows = (torch.einsum("qhd,khd->hqk", q.float(), k) for k in (k1, k2))
        weights = torch.softmax(
            scores(torch.where(exact, exactly, from_rows)).masked_fill(positions > queries, -torch.inf), dim=-1
        )
        of_copies = torch.einsum("hqk,khd->qhd", weights * exact, v1)
        return of_copies + torch.einsum("hqk,khd->qhd", weights * ~exact, v2)

    @property
    def _by_cache(self) -> bool:
        return self._rank.attend == "cache"

    def _request(self, slot: int, first_own: int) -> _Request:
        k, v = (self._states(first_own, *stored.shape[1:]) for stored in (self._keys, self._values))
        return _Request(slot, k, v, first_own)

    def _token_slots(self, num_tokens: int) -> Tensor:
        return self._tokens[torch.arange(num_tokens, device=self._tokens.device) % len(self._tokens)]

    def _states(self, *shape: int) -> Tensor:
        return (4 * torch.randn(shape, generator=self._generator)).to(self._ring.keys)
