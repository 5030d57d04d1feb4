"""The tokens that a query sees where they are not all before it and no other. Knows nothing of attention or models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    SeenFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

COUNTED_ROWS = 512  # of a mask, at a time


@dataclass(frozen=True, slots=True, eq=False)
class SeenTokens:
    """The tokens of a window, of a chunk, or of images that see all of themselves, by transformers' own mask function.

    Attributes:
        size: The tokens up to its own that a query sees at most; a sequence of no more tokens is seen as a whole.
        function: The function of batch, head, query and token, all counted from 0, that says what is seen.
        ends: The number of first tokens that hold all that a query and those before it see, of each query, int64
            [tokens] on the CPU, where queries see tokens after their own; None where none does.
    """

    size: int
    function: SeenFunction
    ends: Tensor | None = None

    @classmethod
    def of(cls, function: SeenFunction, num_tokens: int, device: torch.device, size: int | None = None) -> SeenTokens:
        """The tokens that a function gives in a sequence, counted where no size is known.

        A run of tokens that each see the next one sees all of itself.
        """
        places = torch.arange(num_tokens, device=device)
        if size is None:
            everything = cls(num_tokens, function)
            rows = places.split(COUNTED_ROWS)
            size = max(int(everything.seen(r, places[: r[-1] + 1]).tril(int(r[0])).sum(dim=-1).max()) for r in rows)
        first = torch.zeros((), dtype=torch.int64, device=device)
        sees_next = function(first, first, places[:-1], places[1:]).bool().cpu()
        if not bool(sees_next.any()):
            return cls(size, function)
        last_of_runs = torch.cat((~sees_next, torch.ones(1, dtype=torch.bool))).nonzero().squeeze(-1)
        ends = last_of_runs[torch.searchsorted(last_of_runs, torch.arange(num_tokens))] + 1
        return cls(size, function, ends)

    def seen(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Whether the query of each token in `rows` sees each of `tokens`, bool [rows, tokens]."""
        first = torch.zeros((), dtype=torch.int64, device=rows.device)
        return self.function(first, first, rows.unsqueeze(-1), tokens.unsqueeze(0)).bool()


def last_tokens(size: int) -> SeenTokens:
    """The last `size` tokens, a query's own included."""
    return SeenTokens(size, lambda _batch, _head, query, token: (token <= query) & (token > query - size))


@dataclass(frozen=True, slots=True, eq=False)
class CausalMask:
    """The mask of queries that see all before them, for an index that scores tokens by it: made as it is read.

    Attributes:
        rows: The queries, those of the last tokens.
        tokens: The tokens.
    """

    rows: int
    tokens: int
    device: torch.device

    def __getitem__(self, place: Any) -> Tensor:
        """A part of the mask [1, 1, rows, tokens], bool, True where a query sees a token."""
        places = torch.arange(self.tokens, device=self.device)
        return (places <= places[self.tokens - self.rows :].unsqueeze(-1))[None, None][place]

    def to(self, device: torch.device | str | int, **_: Any) -> CausalMask:
        """The same on another device, where a layer lies that is called with it."""
        return replace(self, device=torch.device(device))


@dataclass(frozen=True, slots=True, eq=False)
class SelectedTokens:
    """The tokens that an index selects for each query of a sequence's last tokens: it sees no other.

    Attributes:
        indices: The places of tokens, integers [batch, rows, selected], without order and none twice. Some may come
            after the query's own where fewer than these are before it.
    """

    indices: Tensor

    @classmethod
    def of(cls, indices: Tensor, num_tokens: int) -> SelectedTokens | None:
        """The tokens that an index gives; None where it gives all."""
        return None if indices.shape[-1] >= num_tokens else cls(indices)

    def hidden(self, rows: Tensor, tokens: Tensor, num_tokens: int) -> Tensor:
        """Whether each of `tokens` is hidden from the queries at `rows` of all, bool [batch, 1, rows, tokens].

        Of all tokens so many are there; the others that an index selects are not.
        """
        picked = self.indices[:, rows].long().clamp(max=num_tokens)
        hidden = torch.ones((*picked.shape[:2], num_tokens + 1), dtype=torch.bool, device=picked.device)
        return hidden.scatter_(-1, picked, False)[..., tokens].unsqueeze(1)
