"""A server under load: its record of itself, its capacity, and whether it is still there."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvtuner.bench.client import Client
from kvtuner.bench.hardware import Observer
from kvtuner.bench.loads import Capacity
from kvtuner.errors import EndpointError
from kvtuner.exported_configs.identity.model_identity import public_name
from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from transformers import PreTrainedTokenizerBase

    from kvtuner.bench.client import RequestResult
    from kvtuner.bench.loads import Load
    from kvtuner.bench.server import ServerProcess
    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.evaluation.backends.endpoint import Endpoint
    from kvtuner.evaluation.cache_scheme import CacheScheme

RESERVED_TOKENS: Final = 8
"""The tokens of a context that SGLang keeps for itself, rounded up."""


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A server's record of itself, as it may be shared: no paths. Only SGLang states more than model and context.

    `reads` is what a chunk reads of itself, `num_gpus` those of all ranks, `tokens_that_fit` the size of the KV pool
    and `context` that of one request, tokens. A server that speculates may give several tokens in a step.
    """

    model: str
    page_size: int
    version: str | None
    dtype: str | None
    kv_cache_dtype: str | None
    digest: str | None
    reads: str | None
    device: str | None
    tp_size: int
    num_gpus: int
    tokens_that_fit: int | None
    max_running_requests: int | None
    context: int
    quantization: str | None
    speculates: bool

    @classmethod
    def of(cls, model: str, info: Mapping[str, Any], context_length: int) -> ServerRecord:
        """The record of a server of a model by the answer of SGLang's `/server_info`, which is empty of others."""
        tp_size = int(info.get("tp_size") or 1)
        return cls(
            model=public_name(model),
            page_size=int(info.get("page_size") or 1),
            version=info.get("version"),
            dtype=info.get("dtype"),
            kv_cache_dtype=info.get("kv_cache_dtype"),
            digest=info.get("kvtuner_profile"),
            reads=info.get("kvtuner_reads"),
            device=info.get("device"),
            tp_size=tp_size,
            num_gpus=tp_size * int(info.get("pp_size") or 1),
            tokens_that_fit=info.get("max_total_num_tokens"),
            max_running_requests=_running_requests(info),
            context=min(context_length, int(info.get("max_req_input_len") or context_length)) - RESERVED_TOKENS,
            quantization=info.get("quantization") or info.get("torchao_config") or None,
            speculates=info.get("speculative_algorithm") is not None,
        )

    @property
    def capacity(self) -> Capacity:
        """The loads that it has room for."""
        return Capacity(self.context, self.tokens_that_fit, self.max_running_requests, self.page_size)


def _running_requests(info: Mapping[str, Any]) -> int | None:
    """The requests that its schedulers run at once, else those that were asked for."""
    states = info.get("internal_states") or [{}]
    per_rank = states[0].get("effective_max_running_requests_per_dp")
    return info.get("max_running_requests") if per_rank is None else int(per_rank) * int(info.get("dp_size") or 1)


class Target(Protocol):
    """What loads are sent to: a server, or what answers in this process."""

    record: ServerRecord

    @property
    def client(self) -> LoadSender:
        """What sends the requests of a load, and times them."""

    def empty_prefix_cache(self) -> None:
        """Empty the prefix cache, if there is one."""

    def watching(self) -> AbstractContextManager[dict[str, float]]:
        """The machine's usage while a block runs."""

    def reason_gone(self) -> str | None:
        """The reason why it answers no more; None where it does."""


class LoadSender(Protocol):
    """What sends a load."""

    def send(self, load: Load, prompts: Sequence[Sequence[int]]) -> list[RequestResult]:
        """Send all requests of a load; the results are in the order of prompts."""


class LoadTarget:
    """A server of a scheme and a model that loads are sent to, by either interface; its process if it is started here.

    Raises:
        EndpointError: It serves another model, or stores its cache otherwise.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        tokenizer: PreTrainedTokenizerBase,
        *,
        scheme: CacheScheme,
        shape: ModelShape,
        server: ServerProcess | None,
    ) -> None:
        self._endpoint, self._server, self._name = endpoint, server, scheme.name
        info = {}
        if endpoint.api == "sglang":
            is_uniform = scheme.profile is not None and scheme.name != PROFILE_SCHEME
            if server is None and is_uniform and endpoint.facts.digest is None:
                raise EndpointError(f"{endpoint.url} was named {scheme.name}, but serves no profile")
            # A uniform of a server that was not started here may have groups of its own.
            endpoint.check_serves(scheme, None if server is None and is_uniform else scheme.profile)
            info = endpoint.get("/server_info")
            served = endpoint.get("/model_info").get("architectures") or [shape.architecture]
            if shape.architecture not in served:
                raise EndpointError(
                    f"{endpoint.url} serves a {served[0]}, not the {shape.architecture} of --model; name the served one"
                )
        self.record = ServerRecord.of(endpoint.facts.model, info, shape.context_length)
        self.client = Client(endpoint.url, endpoint.api, endpoint.facts.model, tokenizer, endpoint.timeout_s)
        self._observer = None if server is None else Observer(server.process.pid, self.record.num_gpus)

    def empty_prefix_cache(self) -> None:
        """Empty the prefix cache of SGLang, or raise `EndpointError`; prompts begin differently anyway."""
        if self._endpoint.api != "sglang":
            return
        try:
            self._endpoint.flush()
        except OSError as error:
            if self.reason_gone() is None:  # one that is gone fails the load
                raise EndpointError(
                    f"the prefix cache of {self._name}'s server cannot be emptied ({error}); serve nobody"
                    " else meanwhile, and start it without --admin-api-key"
                ) from error

    def watching(self) -> AbstractContextManager[dict[str, float]]:
        """The machine's usage while a block runs; empty for a server that was not started here."""
        return contextlib.nullcontext({}) if self._observer is None else self._observer.watching()

    def reason_gone(self) -> str | None:
        """The reason why it answers no more; None where it does."""
        if self._server is not None and self._server.process.poll() is not None:
            return self._server.log_tail()
        try:
            self._endpoint.check_alive()
        except EndpointError:
            return "it stopped answering, or serves something else"
        return None
