"""Prompts of a wanted length, cut from real text behind a few drawn tokens. Knows nothing of servers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from kvtuner.errors import CorpusError

if TYPE_CHECKING:
    from collections.abc import Sequence

DRAWN: Final = 4
"""The tokens at the beginning that are drawn one by one: two prompts with the same ones would share a cached prefix."""


class Prompts:
    """Cuts prompts from a stream of tokens.

    Args:
        stream: The token ids of text, one document after another.
        seed: The seed of the places, and of the tokens in front.
    """

    def __init__(self, stream: Sequence[int], seed: str) -> None:
        self._stream, self._random = stream, random.Random(seed)
        self._tokens = sorted(set(stream))
        self._begun: dict[int, set[tuple[int, ...]]] = {}

    def check(self, num_tokens: int, count: int) -> None:
        """Check that so many prompts of so many tokens can all begin differently.

        Raises:
            CorpusError: the text has too few tokens that differ.
        """
        if count > (most := len(self._tokens) ** min(DRAWN, num_tokens)):
            raise CorpusError(
                f"no two prompts may begin alike, and {count:,} of length {num_tokens} are asked for, of which the"
                f" text's {len(self._tokens):,} different tokens begin {most:,}; give longer prompts (--prompt,"
                " --lengths), fewer requests (--concurrency, --batches, --repeats) or other --data"
            )

    def take(self, num_tokens: int) -> list[int]:
        """Cut a prompt of so many tokens, which begins like no other one; the stream begins again where it ends.

        Raises:
            CorpusError: all that begin differently were taken.
        """
        drawn = min(DRAWN, num_tokens)
        begun = self._begun.setdefault(drawn, set())
        self.check(num_tokens, len(begun) + 1)
        while (beginning := tuple(self._random.choices(self._tokens, k=drawn))) in begun:
            pass
        begun.add(beginning)
        ids, start = list(beginning), self._random.randrange(len(self._stream))
        while len(ids) < num_tokens:
            ids += self._stream[start : start + num_tokens - len(ids)]
            start = 0
        return ids
