"""What OpenAI's completions and chat ask, as far as the engine answers it; any other field is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvtuner.errors import RequestError
from kvtuner.runtime_loader.engine.generation import SamplingParameters

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_COMPLETION_TOKENS: Final = 16
"""The tokens of a completion that asks for no number, by OpenAI's interface."""
MOST_TOP_LOGPROBS: Final = 20
_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "ignore_eos", "skip_special_tokens",
)  # fmt: skip

Tokens = list[int]


class StreamOptions(BaseModel):
    """What a stream tells beside the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class AskedAnswer(BaseModel):
    """The fields of both interfaces; those behind `user`, which changes nothing, are SGLang's and vLLM's."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | list[str] = []
    user: str | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _nulls_are_defaults(cls, values: Any) -> Any:
        return {name: value for name, value in values.items() if value is not None} if type(values) is dict else values

    def sampling(self, max_tokens: int, **more: Any) -> list[SamplingParameters]:
        """The parameters of each of the `n` answers, whose seeds follow one another.

        Raises:
            RequestError: One is outside of what it may be.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        values = {name: getattr(self, name) for name in _SAMPLING}
        values["top_k"] = max(0, self.top_k)  # -1 is all for other servers
        seeds = [None if self.seed is None else self.seed + number for number in range(self.n)]
        return [
            SamplingParameters(
                **{**values, "seed": seed},
                max_tokens=max_tokens,
                stop=stop,
                stop_token_ids=tuple(self.stop_token_ids),
                **more,
            )
            for seed in seeds
        ]


class CompletionRequest(AskedAnswer):
    """The body of ``/v1/completions``: one prompt or several, texts or tokens."""

    prompt: str | list[str] | Tokens | list[Tokens]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None

    @property
    def prompts(self) -> Sequence[str | Tokens]:
        """The prompts, one at least.

        Raises:
            RequestError: There are none, or `best_of` would choose among answers.
        """
        if self.best_of not in (None, self.n):
            raise RequestError(f"best_of must be n, {self.n}, not {self.best_of}: answers are not chosen among here")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt must not be empty; give a text or tokens")
        return self.prompt  # type: ignore[return-value]  # texts or lists of tokens

    @property
    def answer_tokens(self) -> int:
        """The tokens of an answer; 0 asks for the prompt alone, with `echo`.

        Raises:
            RequestError: Nothing at all is asked for.
        """
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens must be at least 1 without echo")
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text, **({} if self.name is None else {"name": self.name})}


class ChatRequest(AskedAnswer):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    @property
    def answer_tokens(self) -> int | None:
        """The tokens of an answer; None for as many as there is room for.

        Raises:
            RequestError: Two numbers are given, or 0.
        """
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise RequestError("give max_completion_tokens or max_tokens, one of the two")
        if self.max_tokens == 0:
            raise RequestError("max_tokens must be at least 1")
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """The likely tokens told beside each; None where log-probabilities are not asked for.

        Raises:
            RequestError: Likely tokens are asked for without log-probabilities.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None
