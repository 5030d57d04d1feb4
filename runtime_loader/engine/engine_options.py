"""The options of an engine. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from kvtuner.errors import OptionError
from kvtuner.read_plan_names import ATTENDS, Attend

AttentionName = Literal["sgl_kernel", "cpu", "triton", "torch"]
ATTENTIONS: Final[tuple[AttentionName, ...]] = get_args(AttentionName)
ATTENTION_VARIABLE: Final = "ATTN_BACKEND"
"""The variable that names the attention of an engine where no option does."""
EngineAttend = Attend | Literal["decode", "hit"]
DEFAULT_PAGE_SIZE: Final = 16
ENGINE_ATTENDS: Final[tuple[EngineAttend, ...]] = (*ATTENDS, "decode", "hit")
EvictionName = Literal["lru", "lfu", "fifo", "mru"]
EVICTIONS: Final[tuple[EvictionName, ...]] = get_args(EvictionName)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of a `LocalEngine`.

    Attributes:
        attention: The implementation of attention; the first that runs here by default, as the log says.
        attend: What chunks read of themselves: keys and values as they came (``fresh``), or as rows give them back
            (``cache``); by ``decode`` a request's first chunk is fresh and others are not; by ``hit`` all are, and each
            token of an answer reads itself as it came too.
        kv_memory: The bytes of rows and exact copies; by default what `max_requests` contexts take, 1 GiB at
            most.
        page_size: The tokens of a page, the unit that requests share; by default 16 or, of keys per channel, a group if
            that is longer.
        max_requests: The requests that run at once.
        chunk_tokens: The tokens of prompts in a step, beside a token of each request that decodes.
        context_length: The tokens of a request with its answer; the model's positions by default.
        prefix_cache_tokens: The tokens that the prefix cache keeps at most; 0 keeps none, None what the pool has room
            for.
        eviction: The order in which the prefix cache loses tokens.
        allow_derived: Whether the profile may be that of the model that this one was tuned from.
    """

    attention: AttentionName | None = None
    attend: EngineAttend = "fresh"
    kv_memory: int | None = None
    page_size: int | None = None
    max_requests: int = 16
    chunk_tokens: int = 512
    context_length: int | None = None
    prefix_cache_tokens: int | None = None
    eviction: EvictionName = "lru"
    allow_derived: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("attention", (None, *ATTENTIONS)), ("attend", ENGINE_ATTENDS), ("eviction", EVICTIONS)):
            if getattr(self, name) not in choices:
                known = ", ".join(str(choice) for choice in choices if choice is not None)
                raise OptionError(f"{name} must be one of {known}, not {getattr(self, name)!r}")
        for name in ("kv_memory", "page_size", "max_requests", "chunk_tokens", "context_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} must be at least 1, not {value}")
        if self.prefix_cache_tokens is not None and self.prefix_cache_tokens < 0:
            raise OptionError(f"prefix_cache_tokens must be 0 or more, not {self.prefix_cache_tokens}")
