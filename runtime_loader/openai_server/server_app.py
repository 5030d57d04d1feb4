"""The HTTP application of a local engine: OpenAI's completions and chat, health and metrics."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST

from kvtuner.errors import KVTunerError, RequestError, ServingError
from kvtuner.runtime_loader.openai_server.answer_format import ChatFormat, CompletionFormat
from kvtuner.runtime_loader.openai_server.chat_prompt import chat_tokens
from kvtuner.runtime_loader.openai_server.error_answers import add_error_handlers, error_body
from kvtuner.runtime_loader.openai_server.protocol import (  # noqa: TC001  # FastAPI reads the annotations
    ChatRequest,
    CompletionRequest,
)
from kvtuner.runtime_loader.openai_server.server_metrics import ServerMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from starlette.types import Receive, Scope, Send

    from kvtuner.runtime_loader.engine.async_engine import AnswerStream, AsyncEngine
    from kvtuner.runtime_loader.engine.generation import Delta, SamplingParameters
    from kvtuner.runtime_loader.openai_server.answer_format import AnswerFormat

    AskedOf = tuple[list[int], SamplingParameters]

MAX_BODY_BYTES: Final = 16 << 20
_BEARER: Final = HTTPBearer(auto_error=False)


class _Server:
    """The endpoints of an engine."""

    def __init__(self, front: AsyncEngine, name: str, metrics: ServerMetrics) -> None:
        self._front, self._name, self._metrics = front, name, metrics
        self._created = int(time.time())

    async def completions(self, request: Request, asked: CompletionRequest) -> Response:
        """``/v1/completions``."""
        self._check_model(asked.model)
        prompt_logprobs = asked.logprobs if asked.echo else None
        sampling = asked.sampling(asked.answer_tokens, logprobs=asked.logprobs, prompt_logprobs=prompt_logprobs)
        prompts = [await asyncio.to_thread(self._front.engine.tokens_of, prompt) for prompt in asked.prompts]
        answers = CompletionFormat(asked, self._name, self._front.engine.tokenizer)
        return await self._answer(request, answers, [(ids, each) for ids in prompts for each in sampling], asked.stream)

    async def chat(self, request: Request, asked: ChatRequest) -> Response:
        """``/v1/chat/completions``."""
        self._check_model(asked.model)
        engine = self._front.engine
        messages = [message.for_template() for message in asked.messages]
        ids = await asyncio.to_thread(chat_tokens, engine.tokenizer, messages)
        pool_tokens = engine.pool.num_pages * engine.pool.shape.page_size
        room = min(engine.context_length, pool_tokens) - len(ids)
        sampling = asked.sampling(asked.answer_tokens or max(1, room), logprobs=asked.num_logprobs)
        answers = ChatFormat(asked, self._name, engine.tokenizer)
        return await self._answer(request, answers, [(ids, each) for each in sampling], asked.stream)

    def models(self) -> dict[str, Any]:
        """``/v1/models``."""
        return {"object": "list", "data": [self.model(self._name)]}

    def model(self, model: str) -> dict[str, Any]:
        """``/v1/models/{model}``."""
        self._check_model(model)
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvtuner",
            "max_model_len": self._front.engine.context_length,
        }

    def health(self) -> Response:
        """``/health``: 200 as long as requests are taken."""
        if self._front.failure is not None:
            raise ServingError(f"the engine failed: {self._front.failure}; start the server again")
        return Response()

    def metrics(self) -> Response:
        """``/metrics``."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._name):
            raise HTTPException(404, f"there is no model {model!r}; this server has {self._name!r}")

    async def _answer(
        self, request: Request, answers: AnswerFormat, asked: Sequence[AskedOf], is_stream: bool
    ) -> Response:
        if len(asked) > self._front.most_requests:
            raise RequestError(
                f"{len(asked)} answers are asked for at once, and at most {self._front.most_requests} may be"
                " unfinished; ask for fewer"
            )
        streams: list[AnswerStream] = []
        try:
            for ids, sampling in asked:
                streams.append(await self._front.submit(ids, sampling))
            if is_stream:
                return _Events(self._events(answers, streams), streams)
            whole = await _unless_gone(request, asyncio.gather(*map(self._deltas, streams)))
            if whole is None:
                await _close(streams)
                return Response(status_code=499)  # to nobody
            return JSONResponse(answers.whole(streams, whole))
        except BaseException:
            await _close(streams)
            raise

    async def _deltas(self, stream: AnswerStream) -> list[Delta]:
        deltas = [delta async for delta in self._metrics.watch(stream)]
        if (error := deltas[-1].error) is not None:
            raise HTTPException(500, error)
        return deltas

    async def _events(self, answers: AnswerFormat, streams: Sequence[AnswerStream]) -> AsyncIterator[str]:
        """The chunks of all choices as server-sent events, as they come."""
        for chunk in answers.opening():
            yield _event(chunk)
        arrived: asyncio.Queue[tuple[int, Delta | KVTunerError | None]] = asyncio.Queue()

        async def pump(index: int, stream: AnswerStream) -> None:
            try:
                async for delta in self._metrics.watch(stream):
                    arrived.put_nowait((index, delta))
            except KVTunerError as error:
                arrived.put_nowait((index, error))
            arrived.put_nowait((index, None))

        tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
        try:
            is_first, left = set(range(len(streams))), len(streams)
            while left:
                index, delta = await arrived.get()
                error = delta.error if delta is not None and not isinstance(delta, KVTunerError) else delta
                if error is not None:
                    yield _event(error_body(str(error), 503 if isinstance(error, KVTunerError) else 500))
                    return
                if delta is None:
                    left -= 1
                else:
                    assert not isinstance(delta, KVTunerError)
                    for chunk in answers.chunks(index, streams[index], delta, is_first=index in is_first):
                        yield _event(chunk)
                    is_first.discard(index)
            for chunk in answers.closing(streams):
                yield _event(chunk)
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()


class _Events(StreamingResponse):
    """Server-sent events of some streams, which are closed whatever becomes of the client."""

    def __init__(self, events: AsyncIterator[str], streams: Sequence[AnswerStream]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await _close(self._streams)


def make_app(front: AsyncEngine, name: str, *, api_key: str | None = None) -> FastAPI:
    """The application of an engine, whose thread it ends with itself; `name` is the model's, as clients call it.

    With a key ``/v1`` is for those who send it.
    """
    metrics = ServerMetrics(front, name)
    server = _Server(front, name, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with front:
            yield

    app = FastAPI(title="kvtuner serve-local", lifespan=lifespan, max_body_size=MAX_BODY_BYTES)
    guarded = APIRouter(prefix="/v1", dependencies=[Depends(_guard(api_key))] if api_key else [])
    guarded.post("/completions")(server.completions)
    guarded.post("/chat/completions")(server.chat)
    guarded.get("/models")(server.models)
    guarded.get("/models/{model:path}")(server.model)
    app.include_router(guarded)
    app.get("/health")(server.health)
    app.get("/metrics")(server.metrics)
    add_error_handlers(app)
    paths = {str(getattr(route, "path", "")) for route in app.routes}
    app.add_middleware(metrics.counting, paths=paths)
    return app


def _guard(api_key: str) -> Any:
    def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> None:
        if given is None or not secrets.compare_digest(given.credentials.encode(), api_key.encode()):
            raise HTTPException(401, "send the server's API key as a bearer token", {"WWW-Authenticate": "Bearer"})

    return check


async def _unless_gone(request: Request, work: asyncio.Future[list[list[Delta]]]) -> list[list[Delta]] | None:
    """What work gives; None, and the work cancelled, where the client goes away before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.create_task(gone())
    try:
        await asyncio.wait((work, watcher), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        watcher.cancel()
        work.cancel()


async def _close(streams: Sequence[AnswerStream]) -> None:
    for stream in streams:
        await stream.aclose()


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
