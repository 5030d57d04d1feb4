"""Loads that a server is put under, planned from what fits it. Knows nothing of servers or figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = Literal["prompt", "output", "concurrency", "batch", "stability"]
LENGTHS: Final = (10, 50, 100, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
OUTPUTS: Final = (16, 64, 256)
BATCHES: Final = (1, 2, 4, 8, 16)
SHORT_PROMPT: Final = 100
SHORT_OUTPUT: Final = 16
MAX_CONCURRENCY: Final = 256
"""The most requests in flight that doubling comes to."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind.

    Attributes:
        kind: The kind of figures that it is for.
        prompt_tokens: The tokens of every prompt.
        output_tokens: The tokens that every request generates, whatever the model wants.
        concurrency: The requests in flight at most.
        requests: The number of requests.
        round: The number of a load that is repeated, from 0.
    """

    kind: Kind
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    requests: int
    round: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The loads that are asked for; those that do not fit the server are left out, by name.

    Attributes:
        lengths: The lengths of prompts, tokens, for the time to the first token.
        outputs: The tokens generated after `SHORT_PROMPT` tokens.
        concurrency: The requests in flight; None doubles as long as it fits.
        batches: The requests sent at one moment.
        rounds: The rounds of the same load, which show whether figures stay as they are.
        repeats: The requests at each length and output, and in every lane of a concurrency; the batches of each size.
        prompt_tokens: The tokens of prompts, of loads that are not about lengths.
        output_tokens: The tokens of outputs, of loads that are not about lengths.
    """

    lengths: tuple[int, ...] = LENGTHS
    outputs: tuple[int, ...] = OUTPUTS
    concurrency: tuple[int, ...] | None = None
    batches: tuple[int, ...] = BATCHES
    rounds: int = 20
    repeats: int = 5
    prompt_tokens: int = 256
    output_tokens: int = 32


@dataclass(frozen=True, slots=True)
class Capacity:
    """The room of a server.

    Attributes:
        context: The tokens of one request, prompt and output.
        tokens: The tokens of all requests in flight; None where the server does not say.
        requests: The requests in flight at most; None where the server does not say.
        page: The tokens that a request takes at once.
    """

    context: int
    tokens: int | None
    requests: int | None
    page: int = 1

    def fits(self, load: Load) -> bool:
        """Whether every request of a load, and all in flight together, have room."""
        tokens = load.prompt_tokens + load.output_tokens
        in_pages = -(-tokens // self.page) * self.page
        in_flight = min(load.concurrency, load.requests)
        return (
            tokens <= self.context
            and (self.tokens is None or in_pages * in_flight <= self.tokens)
            and (self.requests is None or in_flight <= self.requests)
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
    for lanes in options.concurrency or _doubling(prompt, output, capacity):
        yield Load("concurrency", prompt, output, lanes, lanes * max(2, repeats))
    for size in options.batches:
        for number in range(repeats):
            yield Load("batch", prompt, output, size, size, number)
    lanes = max((size for size in (1, 2, 4) if capacity.fits(Load("stability", prompt, output, size, size))), default=1)
    for number in range(options.rounds):
        yield Load("stability", prompt, output, lanes, 2 * lanes, number)


def _doubling(prompt: int, output: int, capacity: Capacity) -> Iterator[int]:
    """Powers of two while they fit, so that schemes of any capacity have points in common."""
    lanes = 1
    while lanes <= MAX_CONCURRENCY and capacity.fits(Load("concurrency", prompt, output, lanes, lanes)):
        yield lanes
        lanes *= 2
