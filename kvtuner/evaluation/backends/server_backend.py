"""A server that answers by one scheme, asked so that its answers show how it stores its cache.

The distribution of the next token is that of SGLang's or OpenAI's API; two of them have a KL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from kvtuner.errors import EndpointError
from kvtuner.evaluation.backends.base import Backend, HitCount, TextTokenizer
from kvtuner.evaluation.backends.endpoint import NO_ANSWER, Api, Endpoint
from kvtuner.evaluation.backends.local_backend import until_stop
from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME, BackendRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtuner.evaluation.cache_scheme import CacheScheme
    from kvtuner.evaluation.tasks.recall_and_needles import Problem

LEAST_HITS: Final = 0.5
"""Share of prompts that a server must find in its cache, for its answers to show how it stores them."""
MAX_STOPS: Final = 4
"""The stops that OpenAI's completions take."""
LEAST_REST: Final = 1e-7
"""The least probability of all tokens without a name: what rounding leaves in single precision."""
ROUNDING: Final = 1e-3
"""The amount by which a log-probability may exceed 0."""

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class NextToken:
    """Log-probabilities of a next token, nats: of the most likely ones, best first, and of those asked for, by id.

    The likely tokens are by text where a server names none otherwise.
    """

    top: Mapping[int | str, float]
    asked: Mapping[int, float]

    def __post_init__(self) -> None:
        for log_p in (*self.top.values(), *self.asked.values()):
            if not (math.isfinite(log_p) and log_p <= ROUNDING):
                raise ValueError(f"{log_p} is no log-probability")

    @property
    def best(self) -> int | str:
        """The most likely token."""
        return next(iter(self.top))

    def record(self) -> list[list[list[Any]]]:
        """Plain JSON, as `from_record` reads it."""
        return [[[token, log_p] for token, log_p in named.items()] for named in (self.top, self.asked)]


def from_record(record: Sequence[Sequence[tuple[Any, float]]]) -> NextToken:
    """Read what `NextToken.record` wrote."""
    top, asked = record
    return NextToken(dict(top), dict(asked))


def from_sglang(answer: Any, asked: Sequence[int]) -> NextToken:
    """Read an answer of one token to ``/generate``, `asked` its ``token_ids_logprob``.

    Raises:
        ValueError: An answer of another form; the message says which part.
    """
    top = _pairs_of_sglang(answer, "output_top_logprobs")
    named = _pairs_of_sglang(answer, "output_token_ids_logprobs") if asked else {}
    if missing := [token for token in asked if token not in named]:
        raise ValueError(f"output_token_ids_logprobs has no log-probability of {missing}, which were asked for")
    return NextToken(dict(top.items()), {token: named[token] for token in asked})


def _pairs_of_sglang(answer: Any, field: str) -> dict[int, float]:
    """The log-probabilities of the first position, by token."""
    try:
        pairs = answer["meta_info"][field][0]
        found = {int(token): float(log_p) for log_p, token, _ in pairs}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{field} holds no list of [log-probability, token, text] of a position") from error
    if not found:
        raise ValueError(f"{field} names no token")
    return found


def from_openai(answer: Any, names_one_token: Callable[[str], bool]) -> NextToken:
    """Read an answer of one token to ``/v1/completions`` with ``logprobs``.

    A text that is not that of a single token is left out: others would be taken for it.

    Raises:
        ValueError: An answer of another form; the message says which part.
    """
    try:
        named = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        likely = {str(text): float(log_p) for text, log_p in named.items()}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ValueError("top_logprobs holds no log-probabilities by text of a position") from error
    top = {text: log_p for text, log_p in likely.items() if names_one_token(text)}
    if not top:
        raise ValueError("top_logprobs names no text that is one token")
    return NextToken(dict(sorted(top.items(), key=lambda item: -item[1])), {})


def truncated_kl(reference: NextToken, other: NextToken) -> float:
    """KL of two distributions that are known of the same few tokens, nats; all other tokens count as one.

    Merging tokens can only bring distributions closer (the data-processing inequality), so that it is a lower bound of
    the KL over the vocabulary. The tokens are the reference's most likely ones, as far as the other is known of them.
    """
    log_q = dict(other.top)
    log_q.update(other.asked.items())
    named = [token for token in reference.top if token in log_q]
    p = _parts([reference.top[token] for token in named])
    q = _parts([log_q[token] for token in named])
    difference = q - p
    # As `calibration.kl.compare`: no term is negative, and small ones do not cancel.
    near = np.exp(p) * (np.expm1(np.minimum(difference, 1.0)) - difference)
    terms = np.where(difference < 1.0, near, np.exp(q) - np.exp(p) * (1 + difference))
    return float(terms.sum())


def _parts(log_p: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Log-probabilities of tokens and of all others together, [tokens + 1]."""
    named = np.array(log_p, dtype=np.float64)
    return np.append(named, math.log(max(1.0 - float(np.exp(named).sum()), LEAST_REST)))


class ServerBackend(Endpoint, Backend):
    """A server of one scheme.

    A context is sent first, by itself, so that the questions find it in the server's prefix cache and read it as it is
    stored: scoring a whole prompt at once would read fresh keys and values, and show no damage of a quantized cache.
    The server is sent token ids, so that all servers are asked alike.
    """

    dtype = None

    def __init__(self, name: str, url: str, api: Api, text: TextTokenizer, timeout_s: float) -> None:
        super().__init__(url, api, timeout_s)
        self.name, self._text = name, text
        self.hits: HitCount = HitCount()

    def is_unread(self, hits: HitCount) -> bool:
        """Whether prompts may have been read as they were before they were stored, which shows no damage."""
        share = hits.share
        return self.facts.reads != "cache" and (share is None or share < LEAST_HITS)

    def record(self) -> BackendRecord:
        """The server, and how much of all prompts it found in its cache."""
        served, share = self.facts, self.hits.share
        return BackendRecord(kind=self.api, read_plan=None, reads=served.reads, version=served.version, hit_share=share)

    def answers(self, problem: Problem, *, offset: int = 0) -> list[str | None]:
        """The text after each question of a problem; the server counts positions by itself."""
        assert offset == 0
        context = self._text.context(problem.context)
        self.prime(context)
        answers = []
        for question in problem.questions:
            ids = context + self._text.after(problem.context, question.text)
            answers.append(self._ask(ids, question.max_tokens, self._text_of, is_counted=True))
        return answers

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> str | None:
        """The text after a prompt, up to its end."""
        return self._ask(prompt, num_tokens, self._text_of)

    def prime(self, ids: Sequence[int]) -> None:
        """Have a prompt stored, so that the next one that begins with it reads it as it is stored."""
        if ids:
            self._ask(ids, 1, self._text_of)

    def generate_until(self, prompt: Sequence[int], num_tokens: int, stops: Sequence[str]) -> str | None:
        """The text after a prompt up to the first stop; None also where the server does not say it generated it."""
        self.prime(prompt[:-1])
        more: dict[str, Any] = {}
        if stops and self.api == "sglang":
            more = {"sampling": {"stop": list(stops), "no_stop_trim": True}}
        elif stops:
            more = {"stop": list(stops[:MAX_STOPS])}
        text = self._ask(prompt, num_tokens, self._generated_text, is_counted=True, **more)
        return None if text is None else until_stop(text, stops)

    def log_likelihood(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool] | None:
        """The log-probability of a continuation; every token of it is a request of its own."""
        if self.api == "openai":
            raise EndpointError(
                "OpenAI's API names likely tokens only, so that a text has no log-likelihood; give --api sglang, or"
                " tasks that generate"
            )
        ids, total, is_greedy = [*context], 0.0, True
        self.prime(ids[:-1])
        for token in continuation:
            answer = self.next_token(ids, top=1, asked=[token])
            if answer is None:
                return None
            total, is_greedy = total + answer.asked[token], is_greedy and answer.best == token
            ids.append(token)
        return total, is_greedy

    def whole_log_likelihood(self, ids: Sequence[int]) -> float:
        """Refuse: no server is asked for it."""
        raise EndpointError(
            "a server would be asked for every token of a text by itself; evaluate tasks that score whole texts without"
            " --endpoint"
        )

    def next_token(self, ids: Sequence[int], *, top: int, asked: Sequence[int] = ()) -> NextToken | None:
        """The distribution of the token after a prompt: the likely tokens, and those asked for, of SGLang only."""
        if self.api == "openai":
            assert not asked
            parse = partial(from_openai, names_one_token=self._text.names_one_token)
            return self._ask(ids, 1, parse, is_counted=True, logprobs=top)
        more = {"return_logprob": True, "top_logprobs_num": top, "token_ids_logprob": list(asked)}
        return self._ask(ids, 1, partial(from_sglang, asked=asked), is_counted=True, **more)

    def _ask(
        self,
        ids: Sequence[int],
        num_tokens: int,
        parse: Callable[[Any], Parsed | None],
        *,
        is_counted: bool = False,
        **more: Any,
    ) -> Parsed | None:
        try:
            answer = self.generate(ids, num_tokens, **more)
            parsed, hits = parse(answer), self._hits_of(answer, len(ids))
        except NO_ANSWER:
            self.check_alive()
            return None
        if is_counted:
            self.hits += hits
        return parsed

    def _hits_of(self, answer: Any, num_prompt: int) -> HitCount:
        if self.api == "sglang":
            cached = answer["meta_info"].get("cached_tokens")
        else:
            cached = ((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
        return HitCount() if cached is None else HitCount(num_prompt, int(cached))

    def _text_of(self, answer: Any) -> str | None:
        text = answer["text"] if self.api == "sglang" else answer["choices"][0]["text"]
        return text if isinstance(text, str) and text else None

    def _generated_text(self, answer: Any) -> str | None:
        """The text of an answer, also an empty one where the server says that it generated a token."""
        about = answer["meta_info"] if self.api == "sglang" else answer.get("usage") or {}
        return self._text_of(answer) or ("" if int(about.get("completion_tokens") or 0) > 0 else None)


def server_backends(
    schemes: Sequence[CacheScheme], urls: Mapping[str, str], api: Api, text: TextTokenizer, timeout_s: float
) -> list[ServerBackend]:
    """A backend for each scheme, at the URL that has its name.

    It raises `EndpointError` where a server has another model, profile or dtype than its name says, or where its
    answers would not show how it stores its cache.
    """
    backends = [ServerBackend(scheme.name, urls[scheme.name], api, text, timeout_s) for scheme in schemes]
    models = {backend.facts.model for backend in backends}
    if len(models) > 1:
        raise EndpointError(f"the endpoints serve different models ({', '.join(sorted(models))}); compare one")
    for scheme, backend in zip(schemes, backends, strict=True):
        if api == "sglang":
            backend.check_serves(scheme, scheme.profile if scheme.name == PROFILE_SCHEME else None)
    return backends
