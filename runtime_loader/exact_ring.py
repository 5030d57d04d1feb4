"""The exact copies of a server's last and first tokens, in places by request slot. Knows nothing of servers or rows.

A request in slot s has the place p of token p where p is a sink, else of p modulo the residual length behind the sinks;
beside a copy lies the position that it is of. So whoever asks for a position knows, on the device, whether its copy is
at hand: it is not where a prefix cache, a lower tier or another request computed the token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kvtuner.errors import CacheError
from kvtuner.precision import PrecisionPair, copy_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from kvtuner.precision import ExactWindow
    from kvtuner.runtime_loader.row_format import LayerFormat

COPIES_SHARE: Final = 1 / 8
LARGEST_COPIES_SHARE: Final = 0.5
"""The share of the memory that exact copies may take where somebody says how many requests run."""
LEAST_REQUESTS: Final = 8
EMPTY: Final = -1
"""The position beside a place without a copy."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ExactRing:
    """The exact copies of one layer's keys and values on one rank.

    Attributes:
        keys: The copies [request slots, places, num_kv_heads, head_dim] in the served dtype.
        values: Those of values, [request slots, places, num_kv_heads, v_head_dim].
        positions: The position of the token that a place has a copy of, or `EMPTY`, int32 [request slots, places].
        window: The tokens of a request that are kept; its residual length and sinks are the places.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    window: ExactWindow

    def places(self, positions: Tensor) -> Tensor:
        """The places of tokens at positions, whether they are kept or not."""
        sinks, last = self.window.sinks, max(self.window.residual_length, 1)
        recent = positions % last
        return torch.where(positions < sinks, positions, sinks + recent) if sinks else recent

    def store(self, new: NewTokens, k: Tensor, v: Tensor) -> None:
        """Copy keys and values [tokens, num_kv_heads, channels] of new tokens that a later one may read exactly."""
        slots, positions, lengths = new.by_token()
        if new.tokens is None and self.window.residual_length:  # the last token of each request, which is kept
            at = slots, self.places(positions)
            self.keys[at] = k[: len(slots)].to(self.keys.dtype)
            self.values[at] = v[: len(slots)].to(self.values.dtype)
            self.positions[at] = positions.to(self.positions.dtype)
            return
        kept = (positions >= lengths - self.window.residual_length) | (positions < self.window.sinks)
        index, first = kept.nonzero().flatten(), 0 if new.tokens is None else int(new.tokens[0])
        at = slots[index], self.places(positions[index])
        self.keys[at] = k[first + index].to(self.keys.dtype)
        self.values[at] = v[first + index].to(self.values.dtype)
        self.positions[at] = positions[index].to(self.positions.dtype)

    def read(self, request: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """The copies at hand of the first `num_tokens` tokens of the request in a slot: positions, keys, values."""
        places = ((self.positions[request] >= 0) & (self.positions[request] < num_tokens)).nonzero().flatten()
        return self.positions[request, places].long(), self.keys[request, places], self.values[request, places]

    def keys_of(self, request: int, start: int, stop: int) -> Tensor:
        """The exact keys [tokens, num_kv_heads, head_dim] of tokens in a row; `CacheError` where one has no copy."""
        positions = torch.arange(start, stop, device=self.positions.device)
        places = self.places(positions)
        if bool((self.positions[request, places] != positions).any()):
            raise CacheError(
                f"tokens {start} to {stop} of a request have no exact copies, though their group of keys per channel is"
                " not full; report this, with the server's flags"
            )
        return self.keys[request, places]

    def reads(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Whether queries at some positions read tokens at others exactly, [queries, tokens]."""
        near = positions[None, :] > queries[:, None] - self.window.residual_length
        return near | (positions < self.window.sinks)[None, :]


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The new tokens of the requests of a batch.

    Attributes:
        requests: The slots of the requests, [requests].
        rows: [requests + 1]; request r had ``rows[r + 1] - rows[r]`` tokens before.
        tokens: [requests + 1]; and has the new tokens ``tokens[r]`` to ``tokens[r + 1]``. None where each request has
            one new token, which `rows` count too.
    """

    requests: Tensor
    rows: Tensor
    tokens: Tensor | None = None

    def by_token(self) -> tuple[Tensor, Tensor, Tensor]:
        """The slot of each new token's request, its position, and the tokens of its request with the new ones."""
        slots = self.requests.long()
        past = self.rows[: len(slots) + 1].diff().long()
        if self.tokens is None:
            return slots, past - 1, past
        bounds = self.tokens[: len(slots) + 1].long()
        counts = bounds.diff()
        request = torch.arange(len(slots), device=slots.device).repeat_interleave(counts)
        positions = torch.arange(len(request), device=slots.device) + (past - bounds[:-1] + bounds[0])[request]
        return slots[request], positions, (past + counts)[request]


@dataclass(frozen=True, slots=True)
class WindowReads:
    """The copies that the requests of a batch read.

    Attributes:
        ring: The layer's copies.
        requests: The slots of the requests, [requests].
        stored: Keys and values of a chunk of new tokens as rows give them back, [tokens, num_kv_heads, channels], which
            queries read of new tokens outside of their window; None where a chunk reads all of itself exactly.
    """

    ring: ExactRing
    requests: Tensor
    stored: tuple[Tensor, Tensor] | None = None


class ExactRings:
    """The copies of a rank's layers, and which request has a slot; a layer of 16 bits on both sides needs none."""

    def __init__(
        self,
        layers: Sequence[LayerFormat],
        window: ExactWindow,
        num_requests: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_requests, window.num_tokens)

        def copies(num_heads: int, head_dim: int) -> Tensor:
            return torch.zeros((*shape, num_heads, head_dim), dtype=dtype, device=device)

        self.window = window
        self._positions = torch.full((len(layers), *shape), EMPTY, dtype=torch.int32, device=device)
        self._layers = [
            ExactRing(
                copies(layer.k.num_heads, layer.k.head_dim),
                copies(layer.v.num_heads, layer.v.head_dim),
                self._positions[index],
                window,
            )
            if needs_copies(layer)
            else None
            for index, layer in enumerate(layers)
        ]
        self._seen = torch.zeros(num_requests, dtype=torch.int64)

    def __getitem__(self, layer: int) -> ExactRing | None:
        """The copies of a layer by its place on this rank."""
        return self._layers[layer]

    @property
    def num_requests(self) -> int:
        """The request slots."""
        return len(self._seen)

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies with their positions."""
        rings = [ring for ring in self._layers if ring is not None]
        return self._positions.nbytes + sum(ring.keys.nbytes + ring.values.nbytes for ring in rings)

    def copy(self, source: int, target: int) -> None:
        """Give a request slot the copies of another."""
        self._positions[:, target] = self._positions[:, source]
        for ring in self._layers:
            if ring is not None:
                ring.keys[target] = ring.keys[source]
                ring.values[target] = ring.values[source]

    def forget_former_requests(self, generations: Tensor) -> None:
        """Empty the slots that another request has since the last call, by the slots' generations on the host.

        To be called before each forward on its stream: a forward of a slot's former request comes before it.
        """
        changed = (generations != self._seen).nonzero().flatten()
        if not len(changed):
            return
        self._seen.copy_(generations)
        device = self._positions.device
        if device.type == "cuda":
            changed = changed.pin_memory()  # or the host would wait for the device
        self._positions.index_fill_(1, changed.to(device, non_blocking=True), EMPTY)


def needs_copies(layer: LayerFormat) -> bool:
    """Whether a layer's rows lose anything, so that copies are worth their bytes."""
    return layer.k.spec is not None or layer.v.spec is not None


def request_bytes(layers: Iterable[LayerFormat], window: ExactWindow, dtype: torch.dtype) -> int:
    """Bytes of one request slot's copies with their positions, on a rank with these layers, in the served dtype."""
    total = 0
    for layer in layers:
        channels = layer.k.num_heads * layer.k.head_dim + layer.v.num_heads * layer.v.head_dim
        total += copy_bytes(PrecisionPair(layer.k.bits, layer.v.bits), channels * dtype.itemsize)
    return window.num_tokens * total


def most_requests(num_tokens: int, bytes_per_token: int, bytes_per_request: int) -> int:
    """The requests to run at once beside a pool of so many tokens, if nobody says how many.

    Their copies take at most `COPIES_SHARE` of what rows and copies take, but for `LEAST_REQUESTS`.
    """
    copies_bytes = num_tokens * bytes_per_token * COPIES_SHARE / (1 - COPIES_SHARE)
    return max(LEAST_REQUESTS, int(copies_bytes / bytes_per_request))


def largest_pool(
    available_bytes: int, bytes_per_token: float, page_size: int, bytes_of_requests: Callable[[int], int]
) -> int:
    """Tokens of the largest pool, in whole pages, that fits beside the copies of all requests that it may run.

    `bytes_of_requests` says what those take for a number of tokens, and never falls as that rises.
    """
    pages, too_many = 0, int(available_bytes // (bytes_per_token * page_size)) + 1
    while too_many - pages > 1:
        middle = (pages + too_many) // 2
        tokens = middle * page_size
        fits = tokens * bytes_per_token + bytes_of_requests(tokens) <= available_bytes
        pages, too_many = (middle, too_many) if fits else (pages, middle)
    return pages * page_size
