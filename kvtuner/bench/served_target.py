"""A server under load, as the runner sees it: what it says of itself, what it holds, whether it is still there."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtuner.bench.client import Client
from kvtuner.bench.loads import Capacity
from kvtuner.bench.usage import Observer
from kvtuner.errors import EndpointError
from kvtuner.evaluation.backends.hosts import check_served
from kvtuner.exported_configs.identity.model_identity import public_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from transformers import PreTrainedTokenizerBase

    from kvtuner.bench.client import RequestResult
    from kvtuner.bench.loads import Load
    from kvtuner.bench.server import Server
    from kvtuner.evaluation.backends.endpoint import Api, Endpoint
    from kvtuner.evaluation.scheme import CacheScheme
    from kvtuner.exported_configs.profile.profile import Profile

RESERVED: Final = 8
"""Tokens of a context that SGLang keeps for itself, rounded up."""


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """What a server says of itself, as it may be shared: no paths.

    Attributes:
        model: the last part of its name.
        page_size: tokens of a page of its pool.
        version: of SGLang; None of other servers, as is all that follows.
        dtype: of the weights.
        kv_cache_dtype: as SGLang names it.
        digest: of the profile that it serves.
        reads: what a chunk reads of itself.
        device: such as cuda.
        tp_size: tensor-parallel ranks.
        num_gpus: of all ranks.
        tokens_that_fit: in its KV pool.
        max_running_requests: in flight at most.
        context: tokens of one request.
        quantization: of the weights.
        speculates: whether a step may give several tokens.
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

    @property
    def capacity(self) -> Capacity:
        """What it holds."""
        return Capacity(self.context, self.tokens_that_fit, self.max_running_requests, self.page_size)


class ServedTarget:
    """A server, spoken to by either interface.

    Args:
        endpoint: of it.
        tokenizer: the model's.
        timeout_s: for one request.
        context_length: of the model, or what was asked for.
        scheme: The scheme that it must serve.
        profile: The profile that it must serve; None where the scheme says enough.
        architecture: of the model that it must serve.
        server: if it was started here.

    Raises:
        EndpointError: it serves something else than its name says.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        tokenizer: PreTrainedTokenizerBase,
        timeout_s: float,
        *,
        context_length: int,
        scheme: CacheScheme,
        profile: Profile | None,
        architecture: str,
        server: Server | None = None,
    ) -> None:
        self._endpoint, self._server = endpoint, server
        api: Api = endpoint.api
        info = endpoint.get("/server_info") if api == "sglang" else {}
        if api == "sglang":
            check_served(scheme, endpoint, profile)
            _check_architecture(endpoint, architecture)
        self.record = _record(endpoint.served.model, info, context_length)
        self.capacity = self.record.capacity
        self._client = Client(endpoint.url, api, endpoint.served.model, tokenizer, timeout_s)
        self._observer = None if server is None else Observer(server.process.pid, self.record.num_gpus)

    def send(self, load: Load, prompts: Sequence[Sequence[int]]) -> list[RequestResult]:
        """See `kvtuner.bench.runner.LoadTarget`."""
        return self._client.send(load, prompts)

    def forget(self) -> None:
        """SGLang's own interface alone has it; prompts differ from their beginnings on anyway."""
        if self._endpoint.api == "sglang":
            try:
                self._endpoint.flush()
            except OSError as error:
                if self.is_gone() is None:  # one that is gone fails the load
                    raise EndpointError(
                        f"the prefix cache of {self._endpoint.name}'s server cannot be emptied ({error}); serve nobody"
                        " else meanwhile, and start it without --admin-api-key"
                    ) from error

    def watching(self) -> AbstractContextManager[dict[str, float]]:
        """See `kvtuner.bench.runner.LoadTarget`; nothing is seen of a server that was not started here."""
        return contextlib.nullcontext({}) if self._observer is None else self._observer.watching()

    def is_gone(self) -> str | None:
        """See `kvtuner.bench.runner.LoadTarget`."""
        if self._server is not None and self._server.process.poll() is not None:
            return self._server.last_words()
        try:
            self._endpoint.check_alive()
        except EndpointError:
            return "it stopped answering, or serves something else"
        return None


def _check_architecture(endpoint: Endpoint, architecture: str) -> None:
    served = endpoint.get("/model_info").get("architectures") or [architecture]
    if architecture not in served:
        raise EndpointError(
            f"{endpoint.url} serves a {served[0]}, not the {architecture} of --model; name the served one"
        )


def _record(model: str, info: Mapping[str, Any], context_length: int) -> ServerRecord:
    longest = info.get("max_req_input_len")
    context = context_length if longest is None else min(context_length, int(longest))
    tp_size = int(info.get("tp_size") or 1)
    return ServerRecord(
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
        context=context - RESERVED,
        quantization=info.get("quantization") or info.get("torchao_config") or None,
        speculates=info.get("speculative_algorithm") is not None,
    )


def _running_requests(info: Mapping[str, Any]) -> int | None:
    """What its schedulers run at once, else what was asked for."""
    states = info.get("internal_states") or [{}]
    each = states[0].get("effective_max_running_requests_per_dp")
    return info.get("max_running_requests") if each is None else int(each) * int(info.get("dp_size") or 1)
