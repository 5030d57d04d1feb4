"""A server that speaks SGLang's interface and is wrong in a chosen way: constant in time, cut, dead, slow."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_server import Server

CONSTANT_S = 0.25
STEP_S = 0.002


class Stub(BaseHTTPRequestHandler):
    """Streams as SGLang does; `server.fault` says what is wrong with it."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        if self.server.dead:
            return self._drop()
        facts = {
            "architectures": [self.server.architecture],
            "model_path": self.server.model, "version": "0.5.23", "dtype": "bfloat16", "kv_cache_dtype": "auto",
            "max_total_num_tokens": 100_000, "max_running_requests": 64, "max_req_input_len": 8192, "tp_size": 1,
            "kvtuner_profile": self.server.digest, "kvtuner_reads": "fresh" if self.server.digest else None,
        }  # fmt: skip
        self._whole(json.dumps(facts).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.dead:
            return self._drop()
        if not self.path.startswith("/generate"):
            return self._whole(b"flushed")
        with self.server.lock:
            self.server.count += 1
            number = self.server.count
        request = json.loads(body)
        self._answer(number, len(request["input_ids"]), request["sampling_params"]["max_new_tokens"])

    def _answer(self, number: int, prompt: int, tokens: int) -> None:
        fault = self.server.fault
        if fault == "slow" and number % 2:
            time.sleep(3)
        if fault == "error" and number % 2:
            return self._whole(b"out of memory", status=500)
        if fault == "dies" and number >= 3:
            self.server.dead = True
            return self._drop()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if fault == "empty" and number % 2:
            return self._end()
        if fault == "constant":
            time.sleep(CONSTANT_S)
            self._event(prompt, tokens, "a")
            return self._end()
        time.sleep(prompt * 2e-5)
        for done in range(1, tokens + 1):
            if fault == "cut" and number % 2 and done == 3:
                return self._drop()
            if fault == "short" and number % 2 and done == 3:
                break
            time.sleep(STEP_S)
            self._event(prompt, done, " 7" * done)
        self._end()

    def _event(self, prompt: int, done: int, text: str) -> None:
        about = {"completion_tokens": done, "prompt_tokens": prompt, "cached_tokens": 0}
        self._chunk(b"data: " + json.dumps({"text": text, "meta_info": about}).encode() + b"\n\n")

    def _end(self) -> None:
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _whole(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _drop(self) -> None:
        self.close_connection = True
        self.connection.close()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def stub(
    fault: str, *, model: str = "model", digest: str | None = None, architecture: str = "Qwen2ForCausalLM"
) -> Iterator[str]:
    """Its URL while it runs.

    Args:
        fault: ``none``, ``constant``, ``slow``, ``error``, ``dies``, ``empty``, ``cut`` or ``short``.
        model: The model that the stub says it serves.
        digest: The digest of the profile that it says it serves.
        architecture: The architecture of that model.
    """
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.fault, server.model, server.digest, server.architecture = fault, model, digest, architecture
    server.count, server.dead, server.lock = 0, False, threading.Lock()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
