"""Asking a server over HTTP: SGLang by its own interface, others by OpenAI's completions. Greedy, by token ids."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast, get_args

from kvtuner.errors import EndpointError
from kvtuner.evaluation.backends.next_token import from_openai, from_sglang
from kvtuner.evaluation.backends.url_opener import opener_of, proxy_of
from kvtuner.run_folder import sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtuner.evaluation.backends.next_token import NextToken
    from kvtuner.evaluation.tasks.questions import Problem
    from kvtuner.evaluation.token_text import Text

Api = Literal["sglang", "openai"]
Reads = Literal["fresh", "cache", "below"]
KEY_VARIABLE: Final = "KVTUNER_API_KEY"
"""Sent as a bearer token where it is set; never a flag, so that it is in no file's command."""
MAX_ANSWER_BYTES: Final = 64 << 20
FLUSH_S: Final = 60
KEPT: Final = 3
"""Raised whenever more is kept of an answer, or of the server that gave it, than before."""
STARTED_WITH: Final = (
    "dtype",
    "quantization",
    "torchao_config",
    "quantization_param_path",
    "revision",
    "json_model_override_args",
    "tp_size",
)
"""What SGLang says it was started with, of that which decides answers besides the model and its cache."""
LOADED: Final = ("model_path", "load_format", "weight_version")
"""What SGLang says of the weights that it holds now: an update changes them while it runs."""
NO_ANSWER: Final = (KeyError, IndexError, TypeError, AttributeError, ValueError, OSError, http.client.HTTPException)
"""What comes of a server that is not there, or says something else than was asked."""
LEAST_HITS: Final = 0.5
"""Share of prompts that a server must find in its cache, for its answers to show how it stores them."""
MAX_STOPS: Final = 4
"""That OpenAI's completions take."""

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself.

    Attributes:
        model: path or name.
        version: of SGLang; None elsewhere.
        digest: of the profile it serves; None where it serves none, or does not say.
        reads: what a chunk reads of itself: ``fresh``, ``cache``, ``below`` an exact device; None without a profile.
        kv_cache_dtype: as SGLang names it; None elsewhere.
        weights: what SGLang says of `STARTED_WITH` and `LOADED`, in this order; nothing elsewhere.
    """

    model: str
    version: str | None
    digest: str | None
    reads: Reads | None
    kv_cache_dtype: str | None
    weights: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class HitCount:
    """Prompt tokens of which a server said whether they were in its cache, and how many were."""

    prompt: int = 0
    cached: int = 0

    def __add__(self, other: HitCount) -> HitCount:
        return HitCount(self.prompt + other.prompt, self.cached + other.cached)

    def __sub__(self, other: HitCount) -> HitCount:
        return HitCount(self.prompt - other.prompt, self.cached - other.cached)

    @property
    def share(self) -> float | None:
        """Found in the cache; None where nothing was said of any."""
        return min(1.0, self.cached / self.prompt) if self.prompt else None


class Endpoint:
    """A server that answers greedily.

    A context is sent first, by itself, so that the questions find it in the server's prefix cache and read it as it is
    stored: scoring a whole prompt at once would read fresh keys and values, and show no damage of a quantized cache.

    Args:
        name: of the way that it stores its cache.
        url: of the server, without a path.
        api: how to speak to it.
        text: the model's tokens; the server is sent ids, so that all are asked alike.
        timeout_s: for one answer.

    Raises:
        EndpointError: it cannot be reached, redirects, or serves no model.
    """

    def __init__(
        self,
        name: str,
        url: str,
        api: Api,
        text: Text,
        timeout_s: float,
    ) -> None:
        self.name, self.url, self.api = name, url.rstrip("/"), api
        self._text, self._timeout_s = text, timeout_s
        self._opener = opener_of(self.url)
        self.hits = HitCount()
        self.served = self._served()

    @property
    def key(self) -> str | None:
        """What decides its answers besides the questions; None where the server does not say what it serves."""
        if self.api == "openai":
            return None
        served = self.served
        said = [served.model, served.version, served.digest, served.reads, served.kv_cache_dtype]
        return sha256_of([self.api, KEPT, *said, *served.weights])

    def is_unread(self, hits: HitCount) -> bool:
        """Whether prompts may have been read as they were before they were stored, which shows no damage."""
        share = hits.share
        return self.served.reads != "cache" and (share is None or share < LEAST_HITS)

    def answers(self, problem: Problem, *, offset: int = 0) -> tuple[str | None, ...]:
        """What is said after each question of a problem; None for an answer that did not come.

        Args:
            problem: context and questions.
            offset: 0; a server counts positions by itself.

        Raises:
            EndpointError: the server is gone.
        """
        assert offset == 0
        context = self._text.context(problem.context)
        self.prime(context)
        return tuple(
            self._ask(
                context + self._text.after(problem.context, question.text),
                question.max_tokens,
                self._text_of,
                counted=True,
            )
            for question in problem.questions
        )

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> str | None:
        """What is said after a prompt, up to the end of the text; None for an answer that did not come.

        Raises:
            EndpointError: the server is gone.
        """
        return self._ask(prompt, num_tokens, self._text_of)

    def prime(self, ids: Sequence[int]) -> None:
        """Have a prompt stored, so that the next one that begins with it reads it as it is stored.

        Raises:
            EndpointError: the server is gone.
        """
        self._ask(ids, 1, self._text_of)

    def said_until(self, ids: Sequence[int], num_tokens: int, stops: Sequence[str]) -> str | None:
        """What is said after a prompt up to the first of some texts, which may be at its beginning.

        Returns:
            None for an answer that did not come, or that a server does not say it generated.

        Raises:
            EndpointError: the server is gone.
        """
        if self.api == "sglang":
            more: dict[str, Any] = {"sampling": {"stop": list(stops), "no_stop_trim": True}} if stops else {}
        else:
            more = {"stop": list(stops[:MAX_STOPS])} if stops else {}
        said = self._ask(ids, num_tokens, self._generated_text, counted=True, **more)
        return None if said is None else min((said.split(stop)[0] for stop in stops), key=len, default=said)

    def next_token(self, ids: Sequence[int], *, top: int, asked: Sequence[int] = ()) -> NextToken | None:
        """What is said of the token after a prompt; None for an answer that did not come.

        Args:
            ids: of the prompt.
            top: how many of the most likely tokens to name.
            asked: tokens to name besides; of SGLang only.

        Raises:
            EndpointError: the server is gone.
        """
        if self.api == "openai":
            assert not asked
            return self._ask(
                ids, 1, lambda answer: from_openai(answer, self._text.names_one_token), counted=True, logprobs=top
            )
        more = {"return_logprob": True, "top_logprobs_num": top, "token_ids_logprob": list(asked)}
        return self._ask(ids, 1, lambda answer: from_sglang(answer, asked), counted=True, **more)

    def _ask(
        self,
        ids: Sequence[int],
        num_tokens: int,
        parse: Callable[[Any], Parsed | None],
        *,
        counted: bool = False,
        **more: Any,
    ) -> Parsed | None:
        try:
            answer = self._post(*self._request(ids, num_tokens, **more))
            found, hits = parse(answer), self._hits_of(answer, len(ids))
        except NO_ANSWER:
            self.check_alive()
            return None
        if counted:
            self.hits += hits
        return found

    def _request(
        self, ids: Sequence[int], num_tokens: int, *, sampling: dict[str, Any] | None = None, **more: Any
    ) -> tuple[str, dict[str, Any]]:
        if self.api == "sglang":
            greedy = {"temperature": 0, "max_new_tokens": num_tokens, **(sampling or {})}
            return "/generate", {"input_ids": list(ids), "sampling_params": greedy, **more}
        body = {"model": self.served.model, "prompt": list(ids), "temperature": 0, "max_tokens": num_tokens, **more}
        return "/v1/completions", body

    def _hits_of(self, answer: Any, prompt: int) -> HitCount:
        if self.api == "sglang":
            cached = answer["meta_info"].get("cached_tokens")
        else:
            cached = ((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
        return HitCount() if cached is None else HitCount(prompt, int(cached))

    def _text_of(self, answer: Any) -> str | None:
        """None for an empty one."""
        text = answer["text"] if self.api == "sglang" else answer["choices"][0]["text"]
        return text if isinstance(text, str) and text else None

    def _generated_text(self, answer: Any) -> str | None:
        """An empty one too, where the server says that it generated a token."""
        about = answer["meta_info"] if self.api == "sglang" else answer.get("usage") or {}
        return self._text_of(answer) or ("" if int(about.get("completion_tokens") or 0) > 0 else None)

    def _served(self) -> Served:
        try:
            if self.api == "openai":
                return Served(str(self.get("/v1/models")["data"][0]["id"]), None, None, None, None)
            info, model = self.get("/server_info"), self.get("/model_info")
            return Served(
                str(info["model_path"]),
                info.get("version"),
                info.get("kvtuner_profile"),
                _known_reads(info.get("kvtuner_reads")),
                info.get("kv_cache_dtype"),
                (*map(info.get, STARTED_WITH), *map(model.get, LOADED)),
            )
        except NO_ANSWER as error:
            proxy = proxy_of(self.url)
            through = f", through the proxy {proxy}; no_proxy leaves hosts out" if proxy else ""
            raise EndpointError(
                f"{self.url} does not answer as {self.api} servers do ({_reason(error)}{through}); start one there, or"
                " give another --api"
            ) from error

    def check_alive(self) -> None:
        """A request may fail; a server that is gone ends the run, which can then go on."""
        try:
            served = self._served()
        except EndpointError as error:
            raise EndpointError(
                f"{self.url} stopped answering; start it and run the same command again to resume"
            ) from error
        if served != self.served:
            raise EndpointError(f"{self.url} serves something else now; run the same command again for that")

    def get(self, path: str) -> Any:
        """JSON that the server has at a path.

        Raises:
            OSError: it does not answer; URLError and timeouts are.
            ValueError: no JSON.
        """
        return json.loads(self._read(urllib.request.Request(f"{self.url}{path}")))

    def flush(self) -> None:
        """Empty SGLang's prefix cache, once it serves nobody.

        Raises:
            OSError: it does not answer, or is not idle for too long.
        """
        self._read(urllib.request.Request(f"{self.url}/flush_cache?timeout={FLUSH_S}", b""))

    def _post(self, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        return json.loads(self._read(urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)))

    def _read(self, request: urllib.request.Request) -> bytes:
        if key := os.environ.get(KEY_VARIABLE):
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                return bytes(answer.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            raise


def _known_reads(said: object) -> Reads | None:
    if said not in (None, *get_args(Reads)):
        raise ValueError(f"it reads {said!a}")
    return cast("Reads | None", said)


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error) or type(error).__name__
