"""The earlier tokens that a query sees where it does not see all of them. Knows nothing of attention or of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    SeenFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class SeenTokens:
    """The tokens of a window or of a chunk, by transformers' own mask function.

    Attributes:
        size: The tokens that a query sees at most; a sequence of no more tokens is seen as a whole.
        function: The function of batch, head, query and token, all counted from 0, that says what is seen.
    """

    size: int
    function: SeenFunction

    def seen(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Whether the query of each token in `rows` sees each of `tokens`, bool [rows, tokens]."""
        first = torch.zeros((), dtype=torch.int64, device=rows.device)
        return self.function(first, first, rows.unsqueeze(-1), tokens.unsqueeze(0)).bool()


def last_tokens(size: int) -> SeenTokens:
    """The last `size` tokens, a query's own included."""
    return SeenTokens(size, lambda _batch, _head, query, token: (token <= query) & (token > query - size))
