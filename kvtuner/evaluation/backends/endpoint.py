"""Speaks to a server over HTTP: SGLang by its own interface, others by OpenAI's completions. Greedy, by token ids.

Servers on this machine are asked without a proxy, and no redirect is followed.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import urllib.error
import urllib.request
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, get_args
from urllib.parse import urlsplit

from kvtuner.errors import EndpointError
from kvtuner.run_folder import sha256_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.evaluation.cache_scheme import CacheScheme
    from kvtuner.exported_configs.profile.profile import Profile

Api = Literal["sglang", "openai"]
Reads = Literal["fresh", "cache", "below"]
KEY_VARIABLE: Final = "KVTUNER_API_KEY"
"""The variable whose value is sent as a bearer token; never a flag, so that it is in no file's command."""
MAX_ANSWER_BYTES: Final = 64 << 20
FLUSH_S: Final = 60
KEPT: Final = 3
"""The version of the facts that are kept of an answer and of its server; increase it when more are kept."""
STARTED_WITH: Final = (
    "dtype",
    "quantization",
    "torchao_config",
    "quantization_param_path",
    "revision",
    "json_model_override_args",
    "tp_size",
)
"""SGLang's arguments, as it reports them, that decide answers besides the model and its cache."""
LOADED: Final = ("model_path", "load_format", "weight_version")
"""SGLang's report of the weights that it holds now: an update changes them while it runs."""
NO_ANSWER: Final = (KeyError, IndexError, TypeError, AttributeError, ValueError, OSError, http.client.HTTPException)
"""The errors of a server that is not there, or that answers something else than was asked."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The report of a server on itself: only SGLang's has more than its model.

    The digest is that of the profile; `reads` is what a chunk reads of itself: ``fresh``, ``cache``, ``below`` an exact
    device. Both are None without a profile. Weights are the values of `STARTED_WITH` and `LOADED`, in this order.
    """

    model: str
    version: str | None = None
    digest: str | None = None
    reads: Reads | None = None
    kv_cache_dtype: str | None = None
    weights: tuple[object, ...] = ()


class Endpoint:
    """A server at a URL without a path, whose answers may take so many seconds; `EndpointError` where there is none."""

    def __init__(self, url: str, api: Api, timeout_s: float) -> None:
        self.url, self.api = url.rstrip("/"), api
        self.timeout_s, self._opener = timeout_s, opener_of(self.url)
        self.facts = self._read_facts()

    @property
    def key(self) -> str | None:
        """The hash of all that decides its answers besides the questions; None where the server does not report it."""
        *facts, weights = astuple(self.facts)
        return None if self.api == "openai" else sha256_of([self.api, KEPT, *facts, *weights])

    def generate(
        self, ids: Sequence[int], num_tokens: int, *, sampling: dict[str, Any] | None = None, **more: Any
    ) -> Any:
        """The JSON that the server answers to a prompt, with SGLang's sampling parameters and more fields besides.

        It raises `OSError` without an answer, and `ValueError` for one that is no JSON.
        """
        body: dict[str, Any]
        if self.api == "sglang":
            greedy = {"temperature": 0, "max_new_tokens": num_tokens, **(sampling or {})}
            path, body = "/generate", {"input_ids": list(ids), "sampling_params": greedy}
        else:
            path, body = "/v1/completions", {"prompt": list(ids), "temperature": 0, "max_tokens": num_tokens}
            body["model"] = self.facts.model
        return json.loads(self._read(path, json.dumps({**body, **more}).encode()))

    def check_serves(self, scheme: CacheScheme, profile: Profile | None) -> None:
        """Raise `EndpointError` unless SGLang shows that it serves its scheme, and the profile if one is given."""
        served = self.facts
        if profile is not None and served.digest != profile.digest:
            stored = f"the profile {served.digest}" if served.digest else "no profile"
            raise EndpointError(f"{self.url} serves {stored}, not {profile.digest}; start it with --kvtuner-profile")
        if profile is not None and served.reads == "below":
            raise EndpointError(
                f"{self.url} quantizes below an exact device: its answers show that only after eviction; evaluate with"
                " --read-plan hit and without --endpoint"
            )
        if contradiction := scheme.contradiction(served.kv_cache_dtype, served.digest):
            raise EndpointError(f"{self.url} was named {scheme.name}, but {contradiction}")

    def _read_facts(self) -> ServerFacts:
        try:
            if self.api == "openai":
                return ServerFacts(str(self.get("/v1/models")["data"][0]["id"]))
            info, model = self.get("/server_info"), self.get("/model_info")
            reads: Reads | None = info.get("kvtuner_reads")
            if reads not in (None, *get_args(Reads)):
                raise ValueError(f"it reads {reads!a}")
            return ServerFacts(
                str(info["model_path"]),
                info.get("version"),
                info.get("kvtuner_profile"),
                reads,
                info.get("kv_cache_dtype"),
                (*map(info.get, STARTED_WITH), *map(model.get, LOADED)),
            )
        except NO_ANSWER as error:
            proxy, reason = proxy_of(self.url), str(getattr(error, "reason", None) or error) or type(error).__name__
            through = f", through the proxy {proxy}; no_proxy leaves hosts out" if proxy else ""
            raise EndpointError(
                f"{self.url} does not answer as {self.api} servers do ({reason}{through}); start one there, or"
                " give another --api"
            ) from error

    def check_alive(self) -> None:
        """Raise `EndpointError` unless the server is still there and serves the same; the same command resumes."""
        try:
            served = self._read_facts()
        except EndpointError as error:
            raise EndpointError(
                f"{self.url} stopped answering; start it and run the same command again to resume"
            ) from error
        if served != self.facts:
            raise EndpointError(f"{self.url} serves something else now; run the same command again for that")

    def get(self, path: str) -> Any:
        """The JSON that the server has at a path; raises what `generate` does."""
        return json.loads(self._read(path))

    def flush(self) -> None:
        """Empty SGLang's prefix cache, once it serves nobody; `OSError` where it is not idle for too long."""
        self._read(f"/flush_cache?timeout={FLUSH_S}", b"")

    def _read(self, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"{self.url}{path}", body)
        if body:
            request.add_header("Content-Type", "application/json")
        if key := os.environ.get(KEY_VARIABLE):
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with self._opener.open(request, timeout=self.timeout_s) as answer:
                return bytes(answer.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            raise


def opener_of(url: str) -> urllib.request.OpenerDirector:
    """The opener of a server's paths, which takes the environment's proxy except for servers on this machine.

    It raises `EndpointError` where the URL is no address, and opening does where the server redirects.
    """
    proxies = urllib.request.ProxyHandler({} if is_loopback(url) else None)
    return urllib.request.build_opener(proxies, _NoRedirects())


def proxy_of(url: str) -> str | None:
    """The host and port of the proxy that `opener_of` goes by, without its password; None without one."""
    server = urlsplit(url)
    proxy = urllib.request.getproxies().get(server.scheme)
    if not proxy or is_loopback(url) or urllib.request.proxy_bypass(server.netloc):
        return None
    return urlsplit(proxy if "://" in proxy else f"//{proxy}").netloc.rpartition("@")[2]


def is_loopback(url: str) -> bool:
    """Whether a server is on this machine, as far as its name says; `EndpointError` for no address."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError as error:
        raise EndpointError(f"{url} is no address ({error}); an endpoint is http://HOST:PORT") from error
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take prompts, and the key, to a server that nobody named."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> NoReturn:
        fp.close()
        raise EndpointError(
            f"{req.full_url} redirects to {newurl.partition('?')[0]}, and no key or prompt is sent on; give the address"
            " of the server itself, if it is to be asked"
        )
