"""SGLang's own client between real HTTP servers: the key goes to no other origin, and no proxy is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import ModelFolder

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
from dataclasses import asdict
from transformers import AutoTokenizer
from kvtuner.bench.client import Client
from kvtuner.bench.loads import Load

client = Client(sys.argv[1], "sglang", "demo", AutoTokenizer.from_pretrained(sys.argv[2]), 20)
(sent,) = client.send(Load("prompt", 3, 1, 1, 1), [[5, 6, 7]])
print(json.dumps(asdict(sent)))
"""


class Server(BaseHTTPRequestHandler):
    """Streams one token, or sends all on to `server.target`."""

    server: Any

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.keys.append(self.headers["Authorization"])
        if self.server.target is not None:
            self.send_response(307)
            self.send_header("Location", self.server.target)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        about = {"completion_tokens": 1, "prompt_tokens": 3, "cached_tokens": 0}
        body = b"data: " + json.dumps({"text": "7", "meta_info": about}).encode() + b"\n\ndata: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def serve(serve_http: Any) -> Callable[..., Any]:
    """`serve(target=None)`: a server on 127.0.0.1, with the `keys` that came."""

    def start(target: str | None = None) -> Any:
        server = serve_http(Server)
        server.target, server.keys = target, []
        return server

    return start


def test_the_key_stays_with_the_server_it_is_for_and_no_proxy_is_asked(serve: Any, model_folder: ModelFolder) -> None:
    other, proxy = serve(), serve()
    server = serve(f"http://localhost:{other.server_port}/generate")
    variables = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    path = os.pathsep.join([str(ROOT / "examples" / "sglang_on_cpu"), str(ROOT)])
    environment = {
        **variables,
        "KVTUNER_API_KEY": "s3cr3t",
        "http_proxy": f"http://127.0.0.1:{proxy.server_port}",
        "PYTHONPATH": path,
    }
    command = [sys.executable, "-c", PROGRAM, f"http://127.0.0.1:{server.server_port}", str(model_folder())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    sent = json.loads(done.stdout.splitlines()[-1])
    assert (sent["error"], sent["reported_tokens"]) == (None, 1)
    assert (server.keys, other.keys, proxy.keys) == (["Bearer s3cr3t"], [None], [])
