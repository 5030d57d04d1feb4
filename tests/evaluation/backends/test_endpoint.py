"""Endpoints and real HTTP servers on loopback: whose answers are known, where keys go, which proxies are asked."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import EndpointError
from kvtuner.evaluation.backends.endpoint import KEY_VARIABLE, is_loopback, proxy_of
from kvtuner.evaluation.backends.server_backend import ServerBackend
from kvtuner.evaluation.tasks.likelihood import Scoring, server_likelihood_cells
from kvtuner.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

INFO = {
    "model_path": "demo", "version": "0.5.23", "kvtuner_profile": None, "kvtuner_reads": None,
    "kv_cache_dtype": "auto", "dtype": "bfloat16", "quantization": None, "torchao_config": "", "tp_size": 1,
    "quantization_param_path": None, "revision": None, "json_model_override_args": "{}", "startup_time": 1.0,
}  # fmt: skip
MODEL = {"model_path": "demo", "load_format": "auto", "weight_version": "default"}
SECRET = "s3cr3t"
ELSEWHERE = "http://kvtuner.invalid:9"
"""A name that nobody has."""


class Server(BaseHTTPRequestHandler):
    """Says what an SGLang server says; sends on what `server.redirects` names, with that status."""

    server: Any

    def do_GET(self) -> None:
        self.answer({"/server_info": self.server.info, "/model_info": self.server.model}.get(self.route, {}))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        top = [[-0.5, asked["input_ids"][-1], None], [-1.5, 400, None]]
        named = [[-2.0, token, None] for token in asked.get("token_ids_logprob", ())]
        about = {"cached_tokens": 1, "output_top_logprobs": [top], "output_token_ids_logprobs": [named]}
        self.answer({"text": "7", "meta_info": about})

    @property
    def route(self) -> str:
        """What a proxy's request asks of the server behind it."""
        return "/" + self.path.rpartition("/")[2]

    def answer(self, document: Any) -> None:
        self.server.asked.append((self.command, self.path, self.headers["Authorization"]))
        body = json.dumps(document).encode()
        status, target = self.server.redirects.get(self.route, (self.server.status, None))
        self.send_response(status)
        if target is not None:
            self.send_header("Location", target)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def serve(serve_http: Any) -> Callable[..., Any]:
    """`serve()`: a server on 127.0.0.1 with its `url`, `info`, `model`, `asked`, `redirects` and `status`."""

    def start() -> Any:
        server = serve_http(Server)
        server.info, server.model, server.asked, server.redirects = dict(INFO), dict(MODEL), [], {}
        server.status, server.url = 200, f"http://127.0.0.1:{server.server_port}"
        return server

    return start


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def endpoint(url: str) -> ServerBackend:
    text: Any = None  # asked for by questions alone
    return ServerBackend("profile", url, "sglang", text, 20)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("info", "dtype", "float16"),
        ("info", "quantization", "fp8"),
        ("info", "torchao_config", "int8wo"),
        ("info", "quantization_param_path", "scales.json"),
        ("info", "revision", "abc"),
        ("info", "json_model_override_args", '{"rope_theta": 1}'),
        ("info", "tp_size", 2),
        ("model", "model_path", "other"),
        ("model", "load_format", "dummy"),
        ("model", "weight_version", "2"),
    ],
)
def test_answers_of_a_server_are_not_those_of_one_with_other_weights(
    where: str, name: str, value: Any, serve: Any, tmp_path: Path
) -> None:
    server = serve()
    folder = RunFolder(tmp_path)
    folder.create()

    def posts() -> int:
        """Requests for what the journal does not know."""
        before = len(server.asked)
        found = endpoint(server.url)
        server_likelihood_cells([found], Scoring([[5, 6, 7, 8], [6, 7, 8, 9]], 1, 2, 0), folder, "x")
        return sum(command == "POST" for command, *_ in server.asked[before:])

    assert posts() == 4
    server.info["startup_time"] = 2.0
    assert posts() == 0, "the same one, started again"
    running = endpoint(server.url)
    getattr(server, where)[name] = value
    with pytest.raises(EndpointError, match="serves something else now"):
        running.check_alive()
    assert posts() == 4


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("route", ["/server_info", "/generate"])
def test_a_redirect_takes_neither_key_nor_prompt_to_another_server(
    route: str, status: int, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    server, other = serve(), serve()
    target = f"http://localhost:{other.server_port}{route}"
    server.redirects[route] = (status, target + "?key=1")
    with pytest.raises(EndpointError, match=f"{server.url}{route} redirects to {target}, and"):
        endpoint(server.url).prime([1, 2])
    assert not other.asked
    assert {key for *_, key in server.asked} == {f"Bearer {SECRET}"}


def test_the_key_is_sent_with_every_request(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    endpoint(server.url).prime([1])
    assert {key for *_, key in server.asked} == {None}
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    endpoint(server.url).prime([1])
    assert [key for *_, key in server.asked[-3:]] == [f"Bearer {SECRET}"] * 3


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_servers_on_this_machine_are_asked_without_a_proxy(
    host: str, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, proxy = serve(), serve()
    proxy.status = 502
    monkeypatch.setenv("http_proxy", proxy.url)
    backend = endpoint(f"http://{host}:{server.server_port}")
    assert backend.continuation([1], 1) == "7"
    assert not proxy.asked


def test_other_servers_are_asked_by_the_proxy_which_errors_name(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = serve()
    monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//me:pa55@"))
    assert endpoint(ELSEWHERE).continuation([1], 1) == "7"
    assert [path for _, path, _ in proxy.asked] == [
        f"{ELSEWHERE}{route}" for route in ("/server_info", "/model_info", "/generate")
    ]
    proxy.status = 502
    with pytest.raises(EndpointError) as refused:
        endpoint(ELSEWHERE)
    assert f"through the proxy 127.0.0.1:{proxy.server_port}; no_proxy leaves hosts out" in str(refused.value)
    assert "pa55" not in str(refused.value)
    monkeypatch.setenv("no_proxy", "kvtuner.invalid")
    assert proxy_of(ELSEWHERE) is None
    assert proxy_of("http://other.invalid") == f"127.0.0.1:{proxy.server_port}"
    assert proxy_of("https://other.invalid") is None, "that is http's alone"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:1", True),
        ("http://127.9.9.9", True),
        ("http://[::1]:1/v1", True),
        ("http://LOCALHOST:1", True),
        ("http://a.localhost", True),
        ("http://10.0.0.1:1", False),
        ("http://localhost.example:1", False),
        ("http://127.0.0.1@example.com:1", False),
        ("http://[2001:db8::1]", False),
    ],
)
def test_loopback_is_known_by_its_names(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(EndpointError, match=r"http://\[::1 is no address"):
        endpoint("http://[::1")


def test_a_server_that_says_no_objects_is_refused(serve: Any) -> None:
    server = serve()
    server.model = []
    with pytest.raises(EndpointError, match="does not answer as sglang servers do"):
        endpoint(server.url)
