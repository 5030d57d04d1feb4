"""The flags of commands that run the local engine. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from kvtuner.errors import OptionError, RequestError
from kvtuner.pipeline.flags.number_readers import (
    byte_count,
    finite_number,
    from_zero,
    port_number,
    positive,
    seed,
    token_count,
    tokens_from_zero,
)
from kvtuner.pipeline.flags.option_fields import check_options, option, option_group
from kvtuner.pipeline.options import ModelOptions
from kvtuner.read_plan_names import ATTENDS, Attend
from kvtuner.runtime_loader.engine.engine_options import (
    ATTENTIONS,
    DEFAULT_PAGE_SIZE,
    EVICTIONS,
    AttentionName,
    EngineOptions,
    EvictionName,
)
from kvtuner.runtime_loader.engine.generation import SamplingParameters

_DEFAULTS = EngineOptions()
_GREEDY = SamplingParameters()


_TEXTS = {
    "model": "hub id, local folder, or the shipped demo model; the profile's by default",
    "revision": "commit, tag or branch on the hub; the profile's by default, with its model",
    "device": "torch device: auto (the first GPU, else the CPU), cpu, cuda, cuda:N",
    "context_length": "most tokens of a request, such as 32k; the model's maximum by default",
}
"""The help of a model's flags, since an engine runs on one device and may take the profile's model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFlags:
    """The profile, and how the engine runs."""

    profile: str | None = option(
        None,
        "profile of the cache: profile.json, run folder, owner/name of the hub, or catalogue:name; unquantized without",
        metavar="PROFILE",
    )
    attention: AttentionName | None = option(
        None,
        f"implementation of attention: {', '.join(ATTENTIONS)}; the first that runs here by default",
        choices=ATTENTIONS,
    )
    attend: Attend = option(
        "fresh", "what chunks read of themselves: fresh, as they came; cache, as rows give them back", choices=ATTENDS
    )
    kv_memory: int | None = option(
        None, "size of the KV pool, such as 4GiB; at most 1GiB by default", type=byte_count, metavar="BYTES"
    )
    page_size: int | None = option(
        None,
        f"tokens of a page; {DEFAULT_PAGE_SIZE} by default, or a group of keys per channel if that is longer",
        type=token_count,
        metavar="TOKENS",
    )
    max_requests: int = option(_DEFAULTS.max_requests, "requests that run at once", type=positive, metavar="N")
    chunk_tokens: int = option(
        _DEFAULTS.chunk_tokens, "tokens of prompts in a step, beside decoding", type=token_count, metavar="TOKENS"
    )
    prefix_cache_tokens: int | None = option(
        None,
        "tokens that the prefix cache keeps at most; 0: none; all of the pool by default",
        type=tokens_from_zero,
        metavar="TOKENS",
    )
    eviction: EvictionName = option("lru", "what the prefix cache loses first", choices=EVICTIONS)
    allow_derived: bool = option(False, "take a profile of the model that this one was tuned from")

    def __post_init__(self) -> None:
        check_options(self)

    def settings(self) -> dict[str, Any]:
        """The fields of `EngineOptions` that flags give."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "profile"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingFlags:
    """How tokens are chosen."""

    max_tokens: int = option(_GREEDY.max_tokens, "tokens of an answer", type=token_count, metavar="N")
    temperature: float = option(0.0, "temperature; 0 takes the likeliest token", type=finite_number)
    top_p: float = option(1.0, "share of probability that is sampled from", type=finite_number)
    top_k: int = option(0, "likeliest tokens that are sampled from; 0: all", type=from_zero)
    min_p: float = option(0.0, "least probability beside the likeliest token's", type=finite_number)
    repetition_penalty: float = option(1.0, "factor on tokens that were there", type=finite_number)
    presence_penalty: float = option(0.0, "taken from logits of tokens in the answer", type=finite_number)
    frequency_penalty: float = option(0.0, "taken for each time that they are", type=finite_number)
    seed: int | None = option(None, "seed of every request; drawn anew by default", type=seed)
    stop: tuple[str, ...] = option((), "text that ends an answer; may be given again", action="append", metavar="TEXT")
    ignore_eos: bool = option(False, "go on behind the model's own end")
    logprobs: int | None = option(
        None, "likely tokens to tell beside each with log-probabilities, for --json", type=from_zero, metavar="K"
    )

    def __post_init__(self) -> None:
        check_options(self)

    def parameters(self) -> SamplingParameters:
        """The parameters of a request.

        Raises:
            OptionError: One is outside of what it may be.
        """
        try:
            return SamplingParameters(**{item.name: getattr(self, item.name) for item in fields(self)})
        except RequestError as error:
            raise OptionError(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateFlags:
    """Prompts, the model and engine that answer them, and how."""

    prompt: tuple[str, ...] = option(
        (),
        "prompt; may be given again. Without this and --prompts, standard input is one",
        action="append",
        group="prompts",
        metavar="TEXT",
    )
    prompts: str | None = option(
        None, "file of prompts: one on each line, or JSONL with prompt or messages", metavar="FILE"
    )
    chat: bool = option(False, "put prompts through the tokenizer's chat template, as a user's message")
    model: ModelOptions = option_group(ModelOptions, **_TEXTS)
    engine: EngineFlags = field(default_factory=EngineFlags)
    sampling: SamplingFlags = field(default_factory=SamplingFlags)

    def __post_init__(self) -> None:
        check_options(self)
        if self.prompt and self.prompts:
            raise OptionError("give --prompt or --prompts, one of the two")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeFlags:
    """A server's address and the requests it takes, and the model and engine that answer."""

    host: str = option(
        "127.0.0.1", "address to listen at; another than this machine's own needs a key in KVTUNER_API_KEY",
        group="server", metavar="ADDRESS",
    )  # fmt: skip
    port: int = option(8000, "port to listen at; 0: any that is free", type=port_number)
    served_model_name: str | None = option(
        None, "name that clients give the model; as --model has it by default", metavar="NAME"
    )
    most_requests: int = option(
        256, "requests unfinished at once, waiting ones included; more are answered by status 429", type=positive,
        metavar="N",
    )  # fmt: skip
    model: ModelOptions = option_group(ModelOptions, **_TEXTS)
    engine: EngineFlags = field(default_factory=EngineFlags)

    def __post_init__(self) -> None:
        check_options(self)
