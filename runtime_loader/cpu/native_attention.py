"""`PackedAttention` in C++ for processors: rows are stored and attended to by a compiled library."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvtuner.errors import CacheError, ServingError
from kvtuner.precision import FITTED_BITS, check_fitted_group
from kvtuner.quant import saturated
from kvtuner.runtime_loader.cpu import BACKEND
from kvtuner.runtime_loader.cpu.instruction_sets import runnable_sets
from kvtuner.runtime_loader.cpu.layer_jobs import (
    LayerJobs,
    constant_of,
    in_cpp,
    side_by_side,
    steps_of,
)
from kvtuner.runtime_loader.cpu.library import load_library, parallel_function
from kvtuner.runtime_loader.cpu.spans import Chunk, Spans, bounds_of
from kvtuner.runtime_loader.cpu.structures import (
    NUMBERS,
    AttendJob,
    RowsOfSide,
    StoreJob,
    side_of,
    side_of_states,
)
from kvtuner.runtime_loader.token_groups import GroupsOnHost
from kvtuner.runtime_loader.torch_attention import TorchAttention

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.exact_ring import ExactRing, NewTokens, WindowReads
    from kvtuner.runtime_loader.joined_chunk import JoinedChunk
    from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows, ScoreScaling

_LOWEST: Final = -3e38
_FAILURES: Final = {
    1: "a token slot lies outside of the pool",
    2: "the bounds of requests fall, or lie outside of their slots or queries",
    3: "there is no memory for the sums of attention",
    4: "slots of keys per channel are no whole groups of the pool",
    5: "the slot of a request lies outside of the copies of an exact window",
    6: "the places of an exact window are not those of its copies",
}
"""The words of the library's refusals, by its `Status` (sources/interface.h)."""


@dataclass(frozen=True, slots=True)
class _Attended:
    """Attention over a part of the tokens: float32 [queries, num_heads, channels], and the logarithm of its weights."""

    output: Tensor
    lse: Tensor

    def merged(self, other: _Attended) -> _Attended:
        """Attention over this part and another."""
        lse = torch.logaddexp(self.lse, other.lse)
        share = torch.exp(other.lse - lse.clamp(min=_LOWEST)).unsqueeze(-1)
        return _Attended(torch.lerp(self.output, other.output, share), lse)

    def beside_sinks(self, scores: ScoreScaling) -> Tensor:
        """The output where each query's softmax has a score of a token without a value too, if a model has sinks."""
        if scores.sink_scores is None:
            return self.output
        lse = torch.logaddexp(self.lse, scores.sink_scores.float())
        share = torch.exp(self.lse - lse.clamp(min=_LOWEST))  # [queries, num_heads]
        return self.output * share.unsqueeze(-1)


class NativeAttention(GroupsOnHost):
    """`PackedAttention` by the library for one instruction set, on as many threads as torch has.

    `rounding` is that of products in int16: a query is rounded to 1 / 65,534 of its largest channel, where keys are per
    channel of the largest once it is multiplied by a group's scales, and the weights of 64 tokens to as much of the
    largest of them. Products in float32 round neither: by default queries in float32 have these, and those in 16 bits,
    which are rounded to 1 / 2,048 or more of themselves, products in int16.
    """

    name = BACKEND

    def __init__(self, instruction_set: str | None = None, *, integer_products: bool | None = None) -> None:
        """Take the best instruction set of this processor, or a named one, and products by the dtype of queries.

        Raises:
            ServingError: It is not to be had here.
        """
        kind = next((each for each in runnable_sets() if each.name == instruction_set), runnable_sets()[0])
        self.instruction_set = instruction_set or kind.name
        self._library = load_library(self.instruction_set)
        self._integers = integer_products if kind.has_integer_products or integer_products else False
        self.rounding = 0.0 if self._integers is False else 2.0**-15
        self._sides: WeakKeyDictionary[PackedRows, RowsOfSide] = WeakKeyDictionary()
        self._constants: WeakKeyDictionary[PackedRows, tuple[Tensor | None, Tensor | None]] = WeakKeyDictionary()
        self._layer_jobs = LayerJobs(self._side)
        self._torch = TorchAttention()

    def prepare(self, layers: list[tuple[PackedRows, PackedRows]], num_heads: int, max_requests: int) -> None:
        """See `PackedAttention.prepare`."""
        for layer, sides in enumerate(layers):
            for stored in sides:
                try:
                    self._side(stored)
                except ServingError as error:
                    raise ServingError(f"layer {layer} of this rank: {error}") from error

    def store(self, keys: PackedRows, values: PackedRows, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See `PackedAttention.store`."""
        self.store_side(keys, slots, k)
        self.store_side(values, slots, v)

    def store_side(self, stored: PackedRows, slots: Tensor, states: Tensor) -> None:
        """See `PackedAttention.store_side`."""
        places = slots.to(torch.int64).contiguous()
        if stored.format.spec is None:
            stored.write(places, states)
        else:
            self._store(stored, places, states)

    def store_copies(self, ring: ExactRing, new: NewTokens, k: Tensor, v: Tensor) -> None:
        """See `PackedAttention.store_copies`."""
        requests = new.requests.to(torch.int64).contiguous()
        if new.tokens is not None or min(len(k), len(v)) < len(requests):
            ring.store(new, k, v)
            return
        bounds = bounds_of(new.rows, len(requests))
        k, v = (side_by_side(states.to(ring.keys.dtype)) for states in (k, v))
        _check(self._library.kvtuner_copy(ctypes.byref(self._layer_jobs.of_copies(ring, requests, bounds, k, v))))

    def decode(
        self, q: Tensor, keys: PackedRows, values: PackedRows, indptr: Tensor, slots: Tensor, scores: ScoreScaling,
        out: Tensor | None = None, window: WindowReads | None = None,
    ) -> Tensor:  # fmt: skip
        """See `PackedAttention.decode`."""
        if not (in_cpp(keys) and in_cpp(values)):
            return self._torch.decode(q, keys, values, indptr, slots, scores, out, window)
        queries, bounds, places = side_by_side(q), bounds_of(indptr, len(q)), slots.to(torch.int64).contiguous()
        job = self._layer_jobs.of_decode(keys, values, None if window is None else window.ring, queries, scores)
        result = out
        if out is None or out.dtype not in NUMBERS or not out[:1].is_contiguous():
            result = queries.new_empty(*q.shape[:2], values.format.head_dim)
        assert result is not None
        job.out, job.out_stride, job.out_numbers = result.data_ptr(), result.stride(0), NUMBERS[result.dtype]
        job.rows.slots, job.rows.tokens = places.data_ptr(), bounds.data_ptr()
        job.rows.num_slots, job.rows.num_requests = len(places), len(q)
        job.rows.integers, (job.rows.threads, job.rows.parallel) = self._has_integers(q), _threads()
        sinks = None if scores.sink_scores is None else scores.sink_scores.float().contiguous()
        job.sinks = _pointer(sinks)
        if window is not None:
            requests = window.requests.to(torch.int64).contiguous()
            job.window.requests = requests.data_ptr()
        _check(self._library.kvtuner_decode(ctypes.byref(job)))
        if out is None:
            return result.to(q.dtype)
        return out if result is out else out.copy_(result)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds,
        scores: ScoreScaling, out: Tensor | None = None, window: WindowReads | None = None,
    ) -> Tensor:  # fmt: skip
        """See `PackedAttention.extend`: attention over rows is merged with that of new tokens over one another.

        Where copies at hand have gaps, torch attends; and where chunks have nothing before them, in half of the time.
        """
        chunk = Chunk.of(bounds)
        is_plain = not scores.logit_cap and scores.sink_scores is None
        if is_plain and chunk.is_alone(len(q)) and (window is None or window.stored is None):
            return _delivered(_attention_within(chunk, q, k, v, scores), q, out)
        reads = chunk.reads(window)
        if reads is None:
            return self._torch.extend(q, k, v, keys, values, bounds, scores, out, window)
        parts = [self._of_states(q, k, v, spans, scores) for spans in reads.fresh]
        if window is not None:
            ring, stored = window.ring, window.stored or (k, v)
            copies = ring.keys.flatten(0, 1), ring.values.flatten(0, 1)
            parts += [self._of_states(q, *copies, spans, scores) for spans in reads.copies]
            parts += [self._of_states(q, *stored, spans, scores) for spans in reads.stored]
        if reads.rows.num_tokens:
            part = self._of_rows(q, keys, values, reads.rows, scores, True)
            parts.append(_Attended(values.transform.invert(part.output), part.lse))
        return _delivered(functools.reduce(_Attended.merged, parts).beside_sinks(scores), q, out)

    def read(self, stored: PackedRows, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """See `PackedAttention.read`: in float32."""
        return stored.read(slots, torch.float32)

    def read_prefix(
        self, q: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds, chunk: JoinedChunk | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """See `PackedAttention.read_prefix`: never, since `extend` reads rows in fewer bytes than they would take."""

    def _of_rows(
        self, q: Tensor, keys: PackedRows, values: PackedRows, spans: Spans, scores: ScoreScaling, shares_mean: bool
    ) -> _Attended:
        """Attention over stored rows, in stored space; with the mean key's part of scores where not all share it."""
        transform, num_kv_heads = keys.transform, keys.format.num_heads
        bias = None
        if shares_mean and transform.mu is not None:
            grouped = q.float().unflatten(1, (num_kv_heads, -1))
            bias = (grouped @ transform.mu.float().unsqueeze(-1)).flatten(1) * scores.scale
        queries = transform.apply_to_query(q, num_kv_heads)
        sides = (self._side(keys), self._side(values))
        return self._attend(queries, sides, spans, scores, bias, integers=self._has_integers(q))

    def _of_states(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scores: ScoreScaling) -> _Attended:
        """Attention over keys and values in model space."""
        k, v = (side_by_side(states) for states in (k, v))
        sides = side_of_states(k, *k.shape[1:]), side_of_states(v, *v.shape[1:])
        return self._attend(q.float(), sides, spans, scores, None)

    def _attend(
        self, q: Tensor, sides: tuple[RowsOfSide, RowsOfSide], spans: Spans, scores: ScoreScaling, bias: Tensor | None,
        *, integers: bool = False,
    ) -> _Attended:  # fmt: skip
        keys, values = sides
        num_queries, num_heads, head_dim = q.shape
        if head_dim != keys.head_dim or num_heads % keys.num_heads or keys.num_heads != values.num_heads:
            raise CacheError(f"queries {list(q.shape)} do not fit {keys.num_heads} heads of {keys.head_dim} channels")
        q = q.contiguous()
        bias = None if bias is None else bias.contiguous()
        output = torch.empty(num_queries, num_heads, values.head_dim)
        lse = torch.empty(num_queries, num_heads)
        job = AttendJob(
            keys, values, q.data_ptr(), _pointer(bias), _pointer(spans.slots), spans.tokens.data_ptr(),
            spans.queries.data_ptr(), _pointer(spans.first), _pointer(spans.last), output.data_ptr(), lse.data_ptr(),
            0 if spans.slots is None else len(spans.slots), len(spans.tokens) - 1, num_queries,
            num_heads // keys.num_heads, integers, *_threads_of(scores),
        )  # fmt: skip
        _check(self._library.kvtuner_attend(ctypes.byref(job)))
        return _Attended(output, lse)

    def _store(self, stored: PackedRows, slots: Tensor, states: Tensor) -> None:
        spec, side = stored.format.spec, self._side(stored)
        assert spec is not None
        (block, factor), (mu, inverse) = steps_of(stored), self._constants_of(stored)
        if not in_cpp(stored):
            states, block, mu, inverse = spec.transform.apply(states), 1, None, None
        if tuple(states.shape) != (len(slots), side.num_heads, side.head_dim):
            wanted = [len(slots), side.num_heads, side.head_dim]
            raise CacheError(f"keys and values of these slots are {wanted}, not {list(states.shape)}")
        if len(slots) % side.token_group:
            raise CacheError(f"keys per channel are stored in groups of {side.token_group} tokens, not {len(slots)}")
        states = states if states.dtype in NUMBERS else states.float()
        states = states if states.stride(-1) == 1 else states.contiguous()
        is_fitted = spec.fit == "least_squares" and spec.bits in FITTED_BITS
        if is_fitted:
            check_fitted_group(side.group_size)
        job = StoreJob(
            side, states.data_ptr(), slots.data_ptr(), _pointer(mu),
            _pointer(inverse), len(slots), states.stride(0), states.stride(1),
            NUMBERS[states.dtype], block, spec.symmetric, is_fitted, factor,
        )  # fmt: skip
        threads, parallel = _threads()
        _check(self._library.kvtuner_store(ctypes.byref(job), threads, ctypes.c_void_p(parallel)))

    def _has_integers(self, q: Tensor) -> bool:
        return q.dtype != torch.float32 if self._integers is None else self._integers

    def _side(self, stored: PackedRows) -> RowsOfSide:
        side = self._sides.get(stored)
        if side is None:
            side = self._sides[stored] = side_of(stored)
        return side

    def _constants_of(self, stored: PackedRows) -> tuple[Tensor | None, Tensor | None]:
        """Mu and 1 / lambda of a transform, float32 [num_heads, head_dim], as the library takes them."""
        constants = self._constants.get(stored)
        if constants is None:
            transform = stored.transform
            mu, lam = constant_of(stored, "mu", transform.mu), constant_of(stored, "lambda", transform.lam)
            inverse = None if lam is None else torch.ones_like(lam) / lam
            constants = self._constants[stored] = (mu, inverse)
        return constants


def _attention_within(chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scores: ScoreScaling) -> Tensor:
    """Causal attention of each request's new tokens over themselves, in float32."""
    # [1, heads, tokens, channels]
    q, k, v = (each.float().transpose(0, 1).unsqueeze(0) for each in (q, k, v))
    outputs = [
        scaled_dot_product_attention(
            q[:, :, start:end], k[:, :, start:end], v[:, :, start:end], is_causal=True, scale=scores.scale,
            enable_gqa=True,
        )
        for start, end in pairwise(chunk.tokens.tolist())
    ]  # fmt: skip
    return torch.cat(outputs, 2)[0].transpose(0, 1)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _delivered(output: Tensor, q: Tensor, out: Tensor | None) -> Tensor:
    result = saturated(output, q.dtype)
    return result if out is None else out.copy_(result)


def _threads() -> tuple[int, int | None]:
    """The threads of torch, and what runs something on all of them; one thread where nothing does."""
    threads = torch.get_num_threads()
    parallel = parallel_function() if threads > 1 else None
    return (1, None) if parallel is None else (threads, parallel)


def _threads_of(scores: ScoreScaling) -> tuple[int, float, float, int | None]:
    threads, parallel = _threads()
    return threads, scores.scale, scores.logit_cap, parallel


def _check(status: int) -> None:
    if status:
        raise CacheError(_FAILURES[status])
