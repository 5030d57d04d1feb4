"""Asking a server over HTTP: SGLang by its own interface, others by OpenAI's completions. Greedy, by token ids."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from kvtuner.errors import EndpointError
from kvtuner.run_folder import sha256_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.evaluation.questions import Problem
    from kvtuner.evaluation.text import Text

Api = Literal["sglang", "openai"]
Reads = Literal["fresh", "cache", "below"]
KEY_VARIABLE: Final = "KVTUNER_API_KEY"
"""Sent as a bearer token where it is set; never a flag, so that it is in no file's command."""
MAX_ANSWER_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself.

    Attributes:
        model: path or name.
        version: of SGLang; None elsewhere.
        digest: of the profile it serves; None where it serves none, or does not say.
        reads: what a chunk reads of itself: ``fresh``, ``cache``, ``below`` an exact device; None without a profile.
        kv_cache_dtype: as SGLang names it; None elsewhere.
    """

    model: str
    version: str | None
    digest: str | None
    reads: Reads | None
    kv_cache_dtype: str | None


@dataclass(slots=True)
class HitCount:
    """Prompt tokens of questions, and how many of them the server found in its cache."""

    prompt: int = 0
    cached: int = 0


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
        EndpointError: it cannot be reached, or serves no model.
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
        self.hits = HitCount()
        self.served = self._served()

    @property
    def key(self) -> str | None:
        """What decides its answers besides the questions; None where the server does not say what it serves."""
        if self.api == "openai":
            return None
        served = self.served
        return sha256_of([self.api, served.model, served.version, served.digest, served.reads, served.kv_cache_dtype])

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
        self._generate(context, 1)
        return tuple(
            self._generate(
                context + self._text.after(problem.context, question.text), question.max_tokens, counted=True
            )
            for question in problem.questions
        )

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> str | None:
        """What is said after a prompt, up to the end of the text; None for an answer that did not come.

        Raises:
            EndpointError: the server is gone.
        """
        return self._generate(prompt, num_tokens)

    def _generate(self, ids: Sequence[int], num_tokens: int, *, counted: bool = False) -> str | None:
        try:
            if self.api == "sglang":
                sampling = {"temperature": 0, "max_new_tokens": num_tokens}
                answer = self._post("/generate", {"input_ids": list(ids), "sampling_params": sampling})
                text, prompt, cached = answer["text"], len(ids), answer["meta_info"].get("cached_tokens", 0)
            else:
                body = {"model": self.served.model, "prompt": list(ids), "temperature": 0, "max_tokens": num_tokens}
                answer = self._post("/v1/completions", body)
                text, usage = answer["choices"][0]["text"], answer.get("usage") or {}
                prompt, cached = len(ids), (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, OSError, http.client.HTTPException):
            self._check_alive()
            return None
        if counted:
            self.hits.prompt += prompt
            self.hits.cached += int(cached or 0)
        return text if isinstance(text, str) and text else None

    def _served(self) -> Served:
        try:
            if self.api == "openai":
                return Served(str(self._get("/v1/models")["data"][0]["id"]), None, None, None, None)
            info = self._get("/server_info")
            return Served(
                str(info["model_path"]),
                info.get("version"),
                info.get("kvtuner_profile"),
                _known_reads(info.get("kvtuner_reads")),
                info.get("kv_cache_dtype"),
            )
        except (KeyError, IndexError, TypeError, ValueError, OSError, http.client.HTTPException) as error:
            raise EndpointError(
                f"{self.url} does not answer as {self.api} servers do ({_reason(error)}); start one there, or give"
                " another --api"
            ) from error

    def _check_alive(self) -> None:
        """A request may fail; a server that is gone ends the run, which can then go on."""
        try:
            served = self._served()
        except EndpointError as error:
            raise EndpointError(
                f"{self.url} stopped answering; start it and run the same command again to resume"
            ) from error
        if served != self.served:
            raise EndpointError(f"{self.url} serves something else now; run the same command again for that")

    def _get(self, path: str) -> Any:
        return self._open(urllib.request.Request(f"{self.url}{path}"))

    def _post(self, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        return self._open(urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers))

    def _open(self, request: urllib.request.Request) -> Any:
        if key := os.environ.get(KEY_VARIABLE):
            request.add_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
            return json.loads(answer.read(MAX_ANSWER_BYTES))


def _known_reads(said: object) -> Reads | None:
    if said not in (None, *get_args(Reads)):
        raise ValueError(f"it reads {said!a}")
    return cast("Reads | None", said)


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error) or type(error).__name__
