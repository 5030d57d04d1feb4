"""The attention of an engine's steps: what an implementation gives, the choice of one, and those over packed rows.

`prefill` and `decode` store new keys and values and attend. To add an implementation, write a class and a row of
`_IMPLEMENTATIONS`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from kvtuner.errors import ServingError
from kvtuner.runtime_loader import cpu, kernels
from kvtuner.runtime_loader.attention_backends import backend_for
from kvtuner.runtime_loader.engine.engine_options import ATTENTION_VARIABLE, ATTENTIONS
from kvtuner.runtime_loader.engine.sgl_kernel_attention import SglKernelAttention, sgl_kernel_refusal
from kvtuner.runtime_loader.exact_ring import NewTokens, WindowReads
from kvtuner.runtime_loader.packed_attention import NewKeys
from kvtuner.runtime_loader.torch_attention import TorchAttention

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvtuner.runtime_loader.attention_backends import AttentionBackend
    from kvtuner.runtime_loader.engine.engine_options import EngineOptions
    from kvtuner.runtime_loader.engine.paged_pool import PagedPool
    from kvtuner.runtime_loader.engine.step_batch import StepPart
    from kvtuner.runtime_loader.packed_attention import PackedAttention, ScoreScaling

logger: Final = logging.getLogger("kvtuner")


class StepAttention(Protocol):
    """The attention of one layer in a step; tensors lie on the device of the pool.

    Queries are [tokens, num_heads, head_dim], keys [tokens, num_kv_heads, head_dim], values [tokens, num_kv_heads,
    v_head_dim], of the part's new tokens side by side. The result is [tokens, num_heads, v_head_dim] in the dtype of
    queries. `reads_pages` says whether parts have to have their pages.
    """

    name: str
    reads_pages: bool

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, part: StepPart, scores: ScoreScaling) -> Tensor:
        """Store chunks of new tokens; they attend to what is stored before them and, causally, to one another."""

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, part: StepPart, scores: ScoreScaling) -> Tensor:
        """Store one new token of each request, which then attends to all that is stored, itself included."""


class RowAttention:
    """The attention over packed rows by a `PackedAttention`.

    A chunk that reads of itself what its rows give back reads its exact window all the same.
    """

    reads_pages = False

    def __init__(self, pool: PagedPool, attention: PackedAttention, num_heads: int) -> None:
        self.name = attention.name
        self._pool, self._attention = pool, attention
        attention.prepare(
            [pool.sides(layer) for layer in range(len(pool.layers))], num_heads, pool.shape.max_requests
        )  # fmt: skip

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, part: StepPart, scores: ScoreScaling) -> Tensor:
        """See `StepAttention.prefill`."""
        keys, values = self._pool.sides(layer)
        copies, attention = self._pool.copies(layer), self._attention
        window = None if copies is None else WindowReads(copies, part.requests)
        self._store(layer, k, v, part)
        read_k, read_v = k, v
        if part.reads_stored:
            stored = attention.read(keys, part.new_slots, q.dtype), attention.read(values, part.new_slots, q.dtype)
            if window is None:
                read_k, read_v = stored
            else:
                window = replace(window, stored=stored)
        output = attention.extend(q, read_k, read_v, keys, values, part.bounds, scores, window=window)
        if copies is not None:  # after the chunk has read the copies whose places its own take
            attention.store_copies(copies, NewTokens(part.requests, part.reads, part.tokens), k, v)
        return output

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, part: StepPart, scores: ScoreScaling) -> Tensor:
        """See `StepAttention.decode`."""
        keys, values = self._pool.sides(layer)
        copies, window = self._pool.copies(layer), None
        if copies is not None:  # before the token reads its own copy
            self._attention.store_copies(copies, NewTokens(part.requests, part.reads), k, v)
            window = WindowReads(copies, part.requests)
        self._store(layer, k, v, part)
        return self._attention.decode(q, keys, values, part.reads, part.read_slots, scores, window=window)

    def _store(self, layer: int, k: Tensor, v: Tensor, part: StepPart) -> None:
        """Store new tokens; keys per channel by the groups that they fill, with their tokens before by copies."""
        (keys, values), copies = self._pool.sides(layer), self._pool.copies(layer)
        if keys.format.token_group == 1:
            self._attention.store(keys, values, part.new_slots, k, v)
            return
        assert copies is not None, "a profile of keys per channel has a window"
        self._attention.store_side(values, part.new_slots, v)
        new = NewTokens(part.requests, part.reads, None if part.is_decoding else part.tokens)
        chunk = None if part.is_decoding else NewKeys(part.new_slots, k, part.bounds.longest)
        self._attention.store_groups(keys, copies, new, part.read_slots, chunk)


@dataclass(frozen=True, slots=True)
class _Implementation:
    """A row of the table: the kinds of devices that take it by default, why it cannot run, and how it is made."""

    default_on: tuple[str, ...]
    refusal: Callable[[PagedPool], str | None]
    make: Callable[[PagedPool, int], StepAttention]


def _of_backend(name: str, default_on: tuple[str, ...]) -> _Implementation:
    """The row of an attention backend that a server may choose too."""

    def backend_of(pool: PagedPool) -> AttentionBackend:
        return backend_for(pool.device, name)

    def refusal(pool: PagedPool) -> str | None:
        try:
            backend_of(pool).make(pool.device)
        except ServingError as error:
            return str(error)
        return None

    def make(pool: PagedPool, num_heads: int) -> StepAttention:
        return RowAttention(pool, backend_of(pool).make(pool.device), num_heads)

    return _Implementation(default_on, refusal, make)


_IMPLEMENTATIONS: Final[dict[str, _Implementation]] = {
    "sgl_kernel": _Implementation(("cuda",), sgl_kernel_refusal, lambda pool, _: SglKernelAttention.installed(pool)),
    "cpu": _of_backend(cpu.BACKEND, ("cpu",)),
    "triton": _of_backend(kernels.NAME, ("cuda",)),
    "torch": _Implementation(
        (),
        lambda _: None,
        lambda pool, heads: RowAttention(pool, TorchAttention(), heads),
    ),
}
"""The implementations by name, the one to take first; torch runs on every device and is the last resort."""


def available(name: str, pool: PagedPool) -> bool:
    """Whether an implementation can attend over a pool here."""
    return _IMPLEMENTATIONS[name].refusal(pool) is None


def choose_attention(options: EngineOptions, pool: PagedPool, num_heads: int) -> StepAttention:
    """Make the attention that options or the variable name, or by default the first that can run; the log says which.

    Raises:
        ServingError: The one that was named cannot run.
    """
    named = options.attention or os.environ.get(ATTENTION_VARIABLE) or None
    if named is not None and named not in _IMPLEMENTATIONS:
        raise ServingError(f"{ATTENTION_VARIABLE} must be one of {', '.join(ATTENTIONS)}, not {named!r}; unset it")
    device = pool.device.type
    passed_over: list[str] = []
    for name, row in _IMPLEMENTATIONS.items():
        if name != named and (named is not None or (device not in row.default_on and name != "torch")):
            continue
        if (why := row.refusal(pool)) is None:
            reason = "as asked" if named else "; ".join(passed_over) or f"the first choice on {device}"
            logger.info("kvtuner: attention by %s (%s)", name, reason)
            return row.make(pool, num_heads)
        passed_over.append(f"not {name}: {why}")
    raise ServingError(f"attention by {named} was asked for and cannot run here: {why}")
