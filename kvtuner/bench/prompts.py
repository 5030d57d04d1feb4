"""Prompts of a wanted length, cut from real text behind a few drawn tokens. Knows nothing of servers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

DRAWN: Final = 4
"""Tokens at the beginning that are drawn one by one: two prompts with the same ones would share a cached prefix."""


class Prompts:
    """Cuts prompts from a stream of tokens.

    Args:
        stream: token ids of text, one document after another.
        seed: of the places, and of the tokens in front.
    """

    def __init__(self, stream: Sequence[int], seed: str) -> None:
        self._stream, self._random = stream, random.Random(seed)
        self._begun: set[tuple[int, ...]] = set()

    def take(self, num_tokens: int) -> list[int]:
        """A prompt of so many tokens, which begins as no other one; the stream begins again where it ends."""
        count = min(DRAWN, num_tokens)
        while (beginning := tuple(self._random.choices(self._stream, k=count))) in self._begun:
            pass
        self._begun.add(beginning)
        ids, start = list(beginning), self._random.randrange(len(self._stream))
        while len(ids) < num_tokens:
            ids += self._stream[start : start + num_tokens - len(ids)]
            start = 0
        return ids
