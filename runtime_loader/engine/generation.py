"""A request: what is asked, how far it is, and what its caller gets. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from kvtuner.errors import RequestError

if TYPE_CHECKING:
    from kvtuner.runtime_loader.engine.text_stream import TextStream

FinishReason = Literal["stop", "length", "abort", "error"]
MOST_LOGPROBS: Final = 100
_AT_LEAST: Final = {
    "max_tokens": 0, "temperature": 0, "top_k": 0, "min_p": 0, "logprobs": 0, "prompt_logprobs": 0, "seed": 0,
}  # fmt: skip
_AT_MOST: Final = {
    "top_p": 1, "min_p": 1, "logprobs": MOST_LOGPROBS, "prompt_logprobs": MOST_LOGPROBS, "seed": 2**63 - 1,
}  # fmt: skip
_ABOVE_ZERO: Final = ("top_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How tokens are chosen, and where an answer ends; greedily, by default.

    Attributes:
        max_tokens: The tokens of an answer; None for what the context has room for, 0 to read the prompt alone.
        temperature: 0 takes the likeliest token.
        top_k: The likeliest tokens that are sampled from; 0 for all.
        presence_penalty: What a logit loses if its token is in the answer.
        frequency_penalty: What a logit loses for every time that its token is in the answer.
        seed: The seed of this request alone; None draws one.
        stop: Texts that end an answer, which does not contain them.
        stop_token_ids: Tokens that end an answer, beside the model's own.
        ignore_eos: Whether an answer goes on behind the model's own end.
        skip_special_tokens: Whether special tokens have no text.
        logprobs: The likely tokens told beside each one, with log-probabilities as the model gives them; 0 tells that
            of the token alone.
        prompt_logprobs: The same of the prompt, which is then read whole, past the prefix cache.
    """

    max_tokens: int | None = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is taken as the model gives it."""
        has_penalty = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return self.temperature == 0 and not has_penalty

    def __post_init__(self) -> None:
        for item in fields(self):
            value: Any = getattr(self, item.name)
            if value is None or isinstance(value, tuple):
                continue
            least, most = _AT_LEAST.get(item.name), _AT_MOST.get(item.name)
            # A comparison with NaN is false, so each says what must hold.
            if not (
                (least is None or value >= least)
                and (most is None or value <= most)
                and (item.name not in _ABOVE_ZERO or value > 0)
                and abs(value) < float("inf")
            ):
                limits = f"above 0{'' if most is None else f' and at most {most}'}"
                if item.name not in _ABOVE_ZERO:
                    limits = " and ".join(
                        f"at {word} {limit}" for word, limit in (("least", least), ("most", most)) if limit is not None
                    )
                raise RequestError(f"{item.name} must be {limits or 'a finite number'}, not {value}")
        if any(not text for text in self.stop):
            raise RequestError("a text to stop at must not be empty; leave it out")


class TokenLogprob(NamedTuple):
    """A token's log-probability, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Delta(NamedTuple):
    """What a step added to an answer.

    Attributes:
        request_id: The request that is answered.
        text: New text that no text to stop at can begin in any more; "" where there is no tokenizer.
        token_ids: New tokens, whose text may come later.
        logprobs: Their log-probabilities, if asked for.
        finish_reason: Why the answer ended; None while it goes on. ``stop`` is an end of the model's own, or one asked
            for.
        error: What went wrong where the reason is ``error``.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    Attributes:
        prompt_token_ids: The prompt.
        num_cached_tokens: The tokens of the prompt that the prefix cache had.
        prompt_logprobs: The log-probabilities of the prompt's tokens but the first, if asked for.
        stop_text: The text or token that the answer was stopped at, if any.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    stop_text: str | int | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class Generation:
    """A request at work.

    Attributes:
        number: The order in which requests came.
        tokens: The prompt and the answer so far.
        num_prompt: The tokens of the prompt.
        most_tokens: The tokens at which the answer ends, the prompt's included.
        split: The tokens that are one chunk, and those behind another; None where chunks are cut as there is room.
        first_position: The position of the first token.
        branches: The requests that go on from those tokens too, and wait for them to be stored.
        slot: The request slot of its pages and exact copies; None while it waits.
        pages: Its pages of the pool.
        num_stored: The tokens whose keys and values the pool has.
        num_cached: The tokens of the prompt that the prefix cache had at first; None before.
    """

    request_id: str
    number: int
    tokens: list[int]
    num_prompt: int
    most_tokens: int
    sampling: SamplingParameters
    split: int | None = None
    first_position: int = 0
    branches: list[Generation] = field(default_factory=list)
    text: TextStream | None = None
    generator: Any = None
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_stored: int = 0
    num_cached: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    stop_text: str | int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        """The tokens whose keys and values are to be computed."""
        return len(self.tokens) - self.num_stored

    @property
    def decodes(self) -> bool:
        """Whether the newest token of the answer is all that is missing."""
        num_tokens = len(self.tokens)
        return num_tokens - self.num_stored == 1 and num_tokens > self.num_prompt

    @property
    def num_chunk(self) -> int:
        """The missing tokens that must be one chunk; 0 where they may be cut anywhere."""
        if self.split is None:
            return 0
        return self.num_missing if self.num_stored >= self.split else self.split - self.num_stored

    @property
    def answer(self) -> list[int]:
        """The tokens of the answer."""
        return self.tokens[self.num_prompt :]

    def completion(self) -> Completion:
        """The whole answer, once it is finished."""
        assert self.finish_reason is not None
        return Completion(
            self.request_id,
            "" if self.text is None else self.text.delivered,
            tuple(self.answer),
            self.finish_reason,
            tuple(self.tokens[: self.num_prompt]),
            self.num_cached or 0,
            tuple(self.logprobs),
            tuple(self.prompt_logprobs),
            self.stop_text,
            self.error,
        )
