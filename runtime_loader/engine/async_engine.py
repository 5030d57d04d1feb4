"""The asyncio front of an engine, whose steps run on a thread of their own. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from kvtuner.errors import EngineBusyError, RequestError, ServingError
from kvtuner.runtime_loader.engine.local_engine import GREEDY_SAMPLING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.runtime_loader.engine.batch_scheduler import EngineState
    from kvtuner.runtime_loader.engine.generation import (
        Completion,
        Delta,
        Generation,
        SamplingParameters,
        TokenLogprob,
    )
    from kvtuner.runtime_loader.engine.local_engine import AskedPrompt, LocalEngine

DEFAULT_MOST_REQUESTS: Final = 256


@dataclass(eq=False)
class _Mailbox:
    """The deltas of a request that its caller has not taken; at most `max_tokens` and one."""

    loop: asyncio.AbstractEventLoop
    deltas: deque[Delta] = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    error: BaseException | None = None

    def put(self, delta: Delta | None, error: BaseException | None = None) -> None:
        """Deliver from the engine's thread."""
        self.loop.call_soon_threadsafe(self._put, delta, error)

    def _put(self, delta: Delta | None, error: BaseException | None) -> None:
        if delta is not None:
            self.deltas.append(delta)
        self.error = self.error or error
        self.arrived.set()


class AnswerStream:
    """An answer as it comes: an asynchronous iterator of deltas, the last one with a reason.

    Whoever goes away early closes it, by `aclose` or by the end of an ``async with`` block, so that its pages are free.
    """

    def __init__(self, engine: AsyncEngine, generation: Generation, mailbox: _Mailbox) -> None:
        self._engine, self._generation, self._mailbox = engine, generation, mailbox
        self._is_finished = False

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self._generation.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The tokens of the prompt."""
        return self._generation.tokens[: self._generation.num_prompt]

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """The log-probabilities of the prompt's tokens but the first, if asked for, from the first delta on."""
        return self._generation.prompt_logprobs

    @property
    def num_cached_tokens(self) -> int:
        """The tokens of the prompt that the prefix cache had, from the first delta on."""
        return self._generation.num_cached or 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """The next delta.

        Raises:
            ServingError: The engine failed or was closed.
        """
        if self._is_finished:
            raise StopAsyncIteration
        box = self._mailbox
        while not box.deltas:
            if box.error is not None:
                self._is_finished = True
                raise box.error
            box.arrived.clear()
            await box.arrived.wait()
        delta = box.deltas.popleft()
        self._is_finished = delta.finish_reason is not None
        return delta

    async def completion(self) -> Completion:
        """The whole answer, once it is there; deltas that nobody took are taken."""
        async for _ in self:
            pass
        return self._generation.completion()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort the request unless it is finished."""
        if not self._is_finished:
            self._is_finished = True
            self._engine.abort(self.request_id)


class AsyncEngine:
    """A `LocalEngine` for many tasks of event loops: the engine's own thread alone touches it.

    At most `most_requests` are unfinished at once, those that wait included; one more is refused.
    """

    def __init__(self, engine: LocalEngine, *, most_requests: int = DEFAULT_MOST_REQUESTS) -> None:
        self.engine, self.most_requests = engine, most_requests
        self._mailboxes: dict[str, _Mailbox] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._wake, self._is_closed = threading.Condition(), False
        self._failure: BaseException | None = None
        self._num_unfinished = 0
        self._thread = threading.Thread(target=self._run, name="kvtuner-engine", daemon=True)
        self._thread.start()

    @property
    def state(self) -> EngineState:
        """The counts of the engine, from between two of its steps or within one."""
        return self.engine.state

    @property
    def num_unfinished(self) -> int:
        """The requests that were taken and are not answered."""
        return self._num_unfinished

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine's thread, after which every request is refused."""
        return self._failure

    async def submit(
        self, prompt: AskedPrompt, sampling: SamplingParameters = GREEDY_SAMPLING, *, request_id: str | None = None
    ) -> AnswerStream:
        """Give the engine a request.

        Raises:
            RequestError: The engine cannot answer it as asked.
            EngineBusyError: As many requests as may be are unfinished.
            ServingError: The engine failed or was closed.
        """
        loop = asyncio.get_running_loop()
        taken: asyncio.Future[AnswerStream] = loop.create_future()
        mailbox = _Mailbox(loop)
        with self._wake:
            self._check_open()
            if self._num_unfinished >= self.most_requests:
                raise EngineBusyError(
                    f"{self._num_unfinished} requests are unfinished, as many as may be; ask again later"
                )
            self._num_unfinished += 1
            self._calls.append(lambda: self._take(prompt, sampling, request_id, mailbox, taken))
            self._wake.notify()
        try:
            return await taken
        except asyncio.CancelledError:
            # The engine may have taken it, or may do so later: an abort behind it reaches it either way.
            taken.cancel()
            self._call(lambda: self._abort_of(mailbox))
            raise

    def abort(self, request_id: str) -> None:
        """End a request after the step that runs; its stream ends with the reason ``abort``."""
        self._call(lambda: self._abort(request_id))

    def close(self) -> None:
        """End the thread after its step; unfinished requests get a `ServingError`. The engine itself stays open."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def _call(self, function: Callable[[], None]) -> None:
        with self._wake:
            self._calls.append(function)
            self._wake.notify()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise ServingError(f"the engine failed: {self._failure}") from self._failure
        if self._is_closed:
            raise ServingError("the engine was closed; make another")

    def _run(self) -> None:
        """Run what is asked and then a step, until closed."""
        try:
            while self._wait():
                while self._calls:
                    self._calls.popleft()()
                for delta in self.engine.step():
                    self._deliver(delta)
        except BaseException as error:  # whatever it is, those who wait must hear of it
            self._failure = error
        with self._wake:
            self._is_closed = True
            late, self._calls = list(self._calls), deque()
        for call in late:  # requests that came meanwhile get the same answer
            call()
        for request_id, mailbox in list(self._mailboxes.items()):
            self.engine.abort(request_id)
            mailbox.put(None, self._end())

    def _end(self) -> ServingError:
        try:
            self._check_open()
        except ServingError as error:
            return error
        raise AssertionError("an engine ends closed or failed")

    def _wait(self) -> bool:
        """Wait until there is something to do; False once closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._is_closed or self._calls or self.engine.has_requests)
            return not self._is_closed

    def _take(
        self,
        prompt: AskedPrompt,
        sampling: SamplingParameters,
        request_id: str | None,
        mailbox: _Mailbox,
        taken: asyncio.Future[AnswerStream],
    ) -> None:
        try:
            request_id = self.engine.submit(prompt, sampling, request_id=request_id)
        except RequestError as error:
            self._finished()
            _settle(mailbox.loop, taken, error)
            return
        self._mailboxes[request_id] = mailbox
        _settle(mailbox.loop, taken, AnswerStream(self, self.engine.generation(request_id), mailbox))

    def _abort_of(self, mailbox: _Mailbox) -> None:
        for request_id, other in list(self._mailboxes.items()):
            if other is mailbox:
                self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        delta = self.engine.abort(request_id)
        if delta is not None:
            self._deliver(delta)

    def _deliver(self, delta: Delta) -> None:
        mailbox = self._mailboxes[delta.request_id]
        if delta.finish_reason is not None:
            del self._mailboxes[delta.request_id]
            self._finished()
        mailbox.put(delta)

    def _finished(self) -> None:
        with self._wake:
            self._num_unfinished -= 1


def _settle(loop: asyncio.AbstractEventLoop, future: asyncio.Future[AnswerStream], result: object) -> None:
    """Give a future its result or error from the engine's thread, unless its task was cancelled."""

    def settle() -> None:
        if future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # an AnswerStream, as no error is one

    loop.call_soon_threadsafe(settle)
