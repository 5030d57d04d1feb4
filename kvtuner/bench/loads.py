"""Loads that a server is put under, planned from what fits it, and their prompts. Knows nothing of servers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from kvtuner.errors import CorpusError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

LoadKind = Literal["prompt", "output", "concurrency", "batch", "stability"]
SHORT_PROMPT: Final = 100
SHORT_OUTPUT: Final = 16
MAX_CONCURRENCY: Final = 256
"""The most requests in flight that doubling comes to."""
NUM_PREFIX_TOKENS: Final = 4
"""The first tokens of a prompt, drawn one by one: two prompts with the same ones would share a cached prefix."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests for one kind of figures, whose outputs are as long as asked; `round` numbers a load that is repeated."""

    kind: LoadKind
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    requests: int
    round: int = 0

    @property
    def in_flight(self) -> int:
        """The requests that are in flight at once."""
        return min(self.concurrency, self.requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """The loads that are asked for; those that do not fit the server are left out, by name.

    Attributes:
        lengths: The lengths of prompts, tokens, for the time to the first token.
        outputs: The tokens generated after `SHORT_PROMPT` tokens.
        concurrency: The requests in flight; None doubles as long as it fits.
        repeats: The requests at each length and output, and in every lane of a concurrency; the batches of each size.
        prompt_tokens: The tokens of prompts, of loads that are not about lengths; `output_tokens` those of outputs.
    """

    lengths: tuple[int, ...] = (10, 50, 100, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
    outputs: tuple[int, ...] = (16, 64, 256)
    concurrency: tuple[int, ...] | None = None
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    rounds: int = 20
    repeats: int = 5
    prompt_tokens: int = 256
    output_tokens: int = 32


@dataclass(frozen=True, slots=True)
class Capacity:
    """The room of a server: for tokens of one request, for tokens and requests in flight (None: unknown), in pages."""

    context: int
    tokens: int | None
    requests: int | None
    page: int = 1

    def fits(self, load: Load) -> bool:
        """Whether every request of a load, and all in flight together, have room."""
        tokens = load.prompt_tokens + load.output_tokens
        in_pages = -(-tokens // self.page) * self.page  # a request takes whole pages of the pool
        return (
            tokens <= self.context
            and (self.tokens is None or in_pages * load.in_flight <= self.tokens)
            and (self.requests is None or load.in_flight <= self.requests)
        )


def plan_loads(options: LoadOptions, capacity: Capacity) -> tuple[list[Load], list[Load]]:
    """Plan the loads in the order in which they are sent, and those that do not fit."""
    fitting: list[Load] = []
    left_out: list[Load] = []
    for load in _all_loads(options, capacity):
        (fitting if capacity.fits(load) else left_out).append(load)
    return fitting, left_out


def _all_loads(options: LoadOptions, capacity: Capacity) -> Iterator[Load]:
    prompt, output, repeats = options.prompt_tokens, options.output_tokens, options.repeats
    for length in options.lengths:
        yield Load("prompt", length, SHORT_OUTPUT, 1, repeats)
    for tokens in options.outputs:
        yield Load("output", SHORT_PROMPT, tokens, 1, repeats)
    for concurrency in options.concurrency or _powers_of_two(prompt, output, capacity):
        yield Load("concurrency", prompt, output, concurrency, concurrency * max(2, repeats))
    for size in options.batches:
        for number in range(repeats):
            yield Load("batch", prompt, output, size, size, number)
    fitting = [size for size in (1, 2, 4) if capacity.fits(Load("stability", prompt, output, size, size))]
    concurrency = max(fitting, default=1)
    for number in range(options.rounds):
        yield Load("stability", prompt, output, concurrency, 2 * concurrency, number)


def _powers_of_two(prompt: int, output: int, capacity: Capacity) -> Iterator[int]:
    """Powers of two while they fit, so that schemes of any capacity have points in common."""
    size = 1
    while size <= MAX_CONCURRENCY and capacity.fits(Load("concurrency", prompt, output, size, size)):
        yield size
        size *= 2


def check_prompts(stream: Collection[int], num_tokens: int, count: int) -> None:
    """Refuse a text with `CorpusError` of which so many prompts of so many tokens cannot all begin differently."""
    num_different = len(set(stream))
    most = num_different ** min(NUM_PREFIX_TOKENS, num_tokens)
    if count > most:
        raise CorpusError(
            f"no two prompts may begin alike, and {count:,} of length {num_tokens} are asked for, of which the"
            f" text's {num_different:,} different tokens begin {most:,}; give longer prompts (--prompt-tokens,"
            " --lengths), fewer requests (--concurrency, --batches, --repeats) or other --data"
        )


def cut_prompts(stream: Sequence[int], seed: str, num_tokens: int, count: int) -> list[list[int]]:
    """Cut prompts from a stream of text, which begins again where it ends; no two begin alike (`check_prompts`)."""
    check_prompts(stream, num_tokens, count)
    generator, tokens = random.Random(seed), sorted(set(stream))
    prefixes: set[tuple[int, ...]] = set()
    prompts: list[list[int]] = []
    while len(prompts) < count:
        prefix = tuple(generator.choices(tokens, k=min(NUM_PREFIX_TOKENS, num_tokens)))
        if prefix in prefixes:
            continue
        prefixes.add(prefix)
        ids, start = list(prefix), generator.randrange(len(stream))
        while len(ids) < num_tokens:  # a text that ends goes on at its beginning
            ids += stream[start : start + num_tokens - len(ids)]
            start = 0
        prompts.append(ids)
    return prompts
