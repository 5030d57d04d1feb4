"""Sends loads through `sglang.benchmark.serving` and keeps the result of every request, failed ones too."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import EndpointError
from kvtuner.evaluation.backends.endpoint import KEY_VARIABLE, Api

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from kvtuner.bench.loads import Load

INTERFACES: Final = {"sglang": ("/generate", "sglang"), "openai": ("/v1/completions", "vllm")}
"""The path of an interface, and the name that SGLang's client has for it."""
ERROR_CHARACTERS: Final = 300
OPENAI_EXTRAS: Final = {"temperature": 0, "skip_special_tokens": False}
CLIENT_KEY_VARIABLES: Final = ("OPENAI_API_KEY", "API_KEY")
"""The variables whose values SGLang's client sends to whatever server it talks to."""
MIN_SHARE_OF_ASKED: Final = 0.25
"""The share of the asked tokens below which an answer was cut, where a server does not count them."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """A request and its result: tokens that the server reports, or None, beside those in the text, and times.

    It started `started_s` after the first request of its load; `ttft_s` is the time to the first token, `latency_s`
    that to the last one or to the failure, and `gaps_s` are those between tokens, in their order.
    """

    prompt_tokens: int
    asked_tokens: int
    reported_tokens: int | None = None
    retokenized_tokens: int = 0
    cached_tokens: int | None = None
    started_s: float = 0.0
    ttft_s: float | None = None
    latency_s: float = 0.0
    gaps_s: Sequence[float] = ()
    error: str | None = None


class Client:
    """A client of one server.

    SGLang's client goes to the server by no proxy, whatever the environment says, and takes the key to no other origin.
    The URL has no path, the model is as the server calls it, and the tokenizer counts the tokens of answers.

    Raises:
        EndpointError: SGLang's client is not installed.
    """

    def __init__(self, url: str, api: Api, model: str, tokenizer: PreTrainedTokenizerBase, timeout_s: float) -> None:
        path, self._interface = INTERFACES[api]
        self._url, self._api, self._model = url.rstrip("/") + path, api, model
        self._server = url.rstrip("/").partition("://")[2]
        self._tokenizer, self._timeout_s = tokenizer, timeout_s
        self._serving = serving_client()

    def send(self, load: Load, prompts: Sequence[Sequence[int]]) -> list[RequestResult]:
        """Send all requests of a load; the results are in the order of `prompts`."""
        with _own_key_only(), contextlib.redirect_stdout(io.StringIO()):  # a failure is printed there, and kept here
            answers = asyncio.run(self._answers(load, prompts))
        first = min(started for _, started, _ in answers)
        return [
            self._result(load, len(prompt), answer, started - first, ended - started)
            for prompt, (answer, started, ended) in zip(prompts, answers, strict=True)
        ]

    async def _answers(self, load: Load, prompts: Sequence[Sequence[int]]) -> list[tuple[Any, float, float]]:
        """Answers of SGLang's client, which raises nothing but what it could not foresee, and their start and end."""
        send, in_flight = self._serving.ASYNC_REQUEST_FUNCS[self._interface], asyncio.Semaphore(load.concurrency)

        async def answer_of(prompt: Sequence[int]) -> tuple[Any, float, float]:
            request = self._request(prompt, load.output_tokens)
            async with in_flight:
                started = time.perf_counter()
                try:
                    answer = await asyncio.wait_for(send(request_func_input=request), self._timeout_s)
                except TimeoutError:
                    answer = self._serving.RequestFuncOutput.init_new(request)
                    answer.error = f"no answer within {self._timeout_s:g} s"
                return answer, started, time.perf_counter()

        return await asyncio.gather(*map(answer_of, prompts))

    def _request(self, prompt: Sequence[int], num_tokens: int) -> Any:
        sampling = {
            "temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True,
            "skip_special_tokens": False, "spaces_between_special_tokens": False,
        }  # fmt: skip
        return self._serving.RequestFuncInput(
            prompt=list(prompt),
            api_url=self._url,
            prompt_len=len(prompt),
            output_len=num_tokens,
            model=self._model,
            lora_name=None,
            image_data=None,
            extra_request_body={"sampling_params": sampling} if self._api == "sglang" else OPENAI_EXTRAS,
        )

    def _result(self, load: Load, num_prompt: int, answer: Any, started_s: float, took_s: float) -> RequestResult:
        text = answer.generated_text
        retokenized = len(self._tokenizer.encode(text, add_special_tokens=False)) if text else 0
        # On /v1/completions SGLang's client repeats the asked number where the server reports none.
        is_counted = self._api == "sglang" and answer.success and bool(text)
        reported = answer.output_len if is_counted else None
        error = None if answer.success else _last_line(answer.error).replace(self._server, "the server")
        return RequestResult(
            prompt_tokens=num_prompt,
            asked_tokens=load.output_tokens,
            reported_tokens=reported,
            retokenized_tokens=retokenized,
            cached_tokens=answer.cached_tokens if is_counted else None,
            started_s=started_s,
            ttft_s=answer.ttft or None,
            latency_s=answer.ttft + sum(answer.itl) if answer.success and answer.ttft else took_s,
            gaps_s=tuple(answer.itl),
            error=error or _unfinished(reported, retokenized, load.output_tokens),
        )


_CLIENT_FLAGS: Final = Namespace(
    temperature=0.0, top_p=1.0, disable_ignore_eos=False, disable_stream=False, return_logprob=False,
    return_routed_experts=False, logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, cache_report=True,
    header=None,
)  # fmt: skip
"""The flags that SGLang's client reads of its command line."""


def serving_client() -> Any:
    """The module `sglang.benchmark.serving` with its flags set; `EndpointError` where it is not installed."""
    try:
        from sglang.benchmark import serving
    except ImportError as error:
        raise EndpointError(
            f"servers are driven by SGLang's own client, which cannot be imported here ({error}); pip install"
            " 'kvtuner[sglang]', or without a GPU run the commands at the top of requirements-sglang-cpu.txt in a"
            " checkout of kvtuner"
        ) from error
    serving.set_global_args(_CLIENT_FLAGS)
    return serving


def _unfinished(reported: int | None, retokenized: int, asked: int) -> str | None:
    """The reason why an answer that SGLang's client takes for one is none; None where it is one."""
    if not retokenized:
        return "an empty answer"
    if reported is not None and reported != asked:
        return f"ended after {reported} of {asked} tokens"
    if reported is None and retokenized < MIN_SHARE_OF_ASKED * asked:
        return f"ended after about {retokenized} of {asked} tokens"
    return None


def _last_line(text: str) -> str:
    return (text.strip() or "failed without a reason").splitlines()[-1].strip()[:ERROR_CHARACTERS]


@contextlib.contextmanager
def _own_key_only() -> Iterator[None]:
    """Hide the keys that are meant for others; ours goes by the name that SGLang's client looks for."""
    foreign_keys = {name: os.environ.pop(name) for name in CLIENT_KEY_VARIABLES if name in os.environ}
    if key := os.environ.get(KEY_VARIABLE):
        os.environ[CLIENT_KEY_VARIABLES[0]] = key
    try:
        yield
    finally:
        os.environ.pop(CLIENT_KEY_VARIABLES[0], None)
        os.environ.update(foreign_keys)
