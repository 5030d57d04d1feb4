"""An engine behind HTTP until the process is told to end. Needs the extra `serve`."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import ServingError
from kvtuner.evaluation.backends.endpoint import KEY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.pipeline.local.engine_flags import ServeFlags

SHUTDOWN_S: Final = 5
"""The seconds that answers have to end, once the server is told to."""


def serve_engine(flags: ServeFlags, on_ready: Callable[[dict[str, Any]], None]) -> None:
    """Serve a model until the process is told to end; `on_ready` gets the server's facts once it listens.

    Raises:
        KVTunerError: The address, the model or the profile cannot be had, or a library is missing.
    """
    try:
        import uvicorn

        from kvtuner.runtime_loader.openai_server.server_app import make_app
    except ImportError as error:
        raise ServingError(f"a server needs a library ({error}): pip install 'kvtuner[serve]'") from error
    from kvtuner.pipeline.local.opened_engine import open_engine
    from kvtuner.runtime_loader.engine.async_engine import AsyncEngine

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_ready(facts)

    # Bound before weights are loaded, so that a port in use is refused at once; nobody is let in yet.
    with _bound_socket(flags.host, flags.port) as listener, open_engine(flags.model, flags.engine) as engine:
        host, port = listener.getsockname()[:2]
        searched = "" if engine.profile is None else engine.profile.model.id
        name = flags.served_model_name or flags.model.model or searched
        facts = {
            "url": f"http://{f'[{host}]' if ':' in host else host}:{port}",
            "model": name,
            "profile": None if engine.profile is None else engine.profile.digest,
            "attention": engine.attention,
            "kv_bytes_per_token": engine.pool.shape.bytes_per_token,
            "kv_tokens": engine.pool.num_pages * engine.pool.shape.page_size,
        }
        app = make_app(
            AsyncEngine(engine, most_requests=flags.most_requests), name, api_key=os.environ.get(KEY_VARIABLE)
        )  # fmt: skip
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_S
        )  # fmt: skip
        Server(config).run(sockets=[listener])


def _bound_socket(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet; without a key it is one that this machine alone reaches."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ServingError(f"--host {host} is no address ({error.strerror}); give one of this machine's") from error
    try:
        if not ipaddress.ip_address(address[0]).is_loopback and not os.environ.get(KEY_VARIABLE):
            raise ServingError(
                f"--host {host} lets other machines ask; put a key into the variable {KEY_VARIABLE}, which clients send"
                " as OpenAI's API key, or leave --host out"
            )
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ServingError(f"port {port} of {host} cannot be had ({error.strerror}); give another --port") from error
    except ServingError:
        listener.close()
        raise
    return listener
