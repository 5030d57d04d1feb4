"""Servers on 127.0.0.1 in a thread, with a tiny model behind them."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
import uvicorn

from kvtuner.runtime_loader.engine.async_engine import AsyncEngine
from kvtuner.runtime_loader.engine.local_engine import LocalEngine
from kvtuner.runtime_loader.openai_server.server_app import make_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from fixture_types import LoadTiny

MODEL = "tiny"
KEY = "s3cr3t"


@dataclass(frozen=True)
class Served:
    """A server, its engine, and clients of it."""

    url: str
    front: AsyncEngine

    @property
    def engine(self) -> LocalEngine:
        return self.front.engine

    def client(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": KEY, "max_retries": 0, **settings})

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, trust_env=False)

    def is_idle(self) -> bool:
        """Whether nobody has a page or a place, within seconds."""
        state = self.engine.state if self.comes_to(0) else None
        return state is not None and state.num_free_pages + state.num_idle_pages == state.num_pages

    def comes_to(self, num_unfinished: int) -> bool:
        """Whether so many requests are unfinished, within seconds: an abort waits for the step that runs."""
        for _ in range(2000):
            if self.front.num_unfinished == num_unfinished:
                return True
            time.sleep(0.005)
        return False


@pytest.fixture(scope="session")
def serve(load_tiny: LoadTiny) -> Callable[..., AbstractContextManager[Served]]:
    """`serve(api_key=None, most_requests=64, **engine_options)`: a server of the tiny model until its block ends."""

    @contextmanager
    def run(*, api_key: str | None = None, most_requests: int = 64, **options: Any) -> Iterator[Served]:
        loaded = load_tiny("llama-gqa", chat=True)
        with LocalEngine(loaded.model, loaded.tokenizer, **{"attention": "torch", **options}) as engine:
            front = AsyncEngine(engine, most_requests=most_requests)
            config = uvicorn.Config(make_app(front, MODEL, api_key=api_key), log_level="warning", access_log=False)
            server = uvicorn.Server(config)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
                thread.start()
                try:
                    yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", front)
                finally:
                    server.should_exit = True
                    thread.join()

    return run


@pytest.fixture(scope="module")
def served(serve: Callable[..., AbstractContextManager[Served]]) -> Iterator[Served]:
    """A server without a key that the tests of a file share."""
    with serve() as server:
        yield server
