"""Who takes tasks: a model loaded here or a server, asked alike. Knows nothing of the harness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvtuner.errors import EndpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.evaluation.backends.endpoint import Endpoint
    from kvtuner.evaluation.backends.local_model import Offline
    from kvtuner.evaluation.tasks.answers import Metered


class Taker(Protocol):
    """A model behind one way to store its cache, which reads all of a prompt but its last token as it is stored."""

    @property
    def name(self) -> str:
        """Of the way."""
        ...

    @property
    def key(self) -> str | None:
        """What decides its answers besides what is asked and the model; None where nobody knows."""
        ...

    @property
    def meter(self) -> Metered | None:
        """What counts how much of prompts was found in a cache; of servers."""
        ...

    def log_likelihood(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool] | None:
        """Log-probability of a continuation, nats, and whether it is what would be said greedily.

        Returns:
            None where it did not come.

        Raises:
            EndpointError: a server that does not say it, or is gone.
        """
        ...

    def rolling(self, ids: Sequence[int]) -> float:
        """Log-probability of all tokens of a text but the first, nats.

        Raises:
            EndpointError: a server.
        """
        ...

    def said_until(self, prompt: Sequence[int], num_tokens: int, stops: Sequence[str]) -> str | None:
        """What is said greedily up to the first of some texts; None where nothing came.

        Raises:
            EndpointError: a server is gone.
        """
        ...


class OfflineTaker:
    """A model loaded here.

    Args:
        offline: the model and its way to store the cache.
    """

    meter: Metered | None = None

    def __init__(self, offline: Offline) -> None:
        self._offline = offline

    @property
    def name(self) -> str:
        """See `Taker.name`."""
        return self._offline.name

    @property
    def key(self) -> str:
        """See `Taker.key`."""
        return self._offline.key

    def log_likelihood(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """See `Taker.log_likelihood`; the context's last token and the continuation are one chunk."""
        return self._offline.log_likelihood(context, continuation)

    def rolling(self, ids: Sequence[int]) -> float:
        """See `Taker.rolling`; the first quarter is one chunk."""
        return self._offline.log_likelihood(ids[:1], ids[1:], whole=True)[0]

    def said_until(self, prompt: Sequence[int], num_tokens: int, stops: Sequence[str]) -> str:
        """See `Taker.said_until`."""
        said = self._offline.continuation(prompt, num_tokens, lambda text: any(stop in text for stop in stops))
        return min((said.split(stop)[0] for stop in stops), key=len, default=said)


class ServedTaker:
    """A server.

    Args:
        endpoint: how it is spoken to.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.meter: Metered | None = endpoint

    @property
    def name(self) -> str:
        """See `Taker.name`."""
        return self._endpoint.name

    @property
    def key(self) -> str | None:
        """See `Taker.key`."""
        return self._endpoint.key

    def log_likelihood(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool] | None:
        """See `Taker.log_likelihood`; every token of the continuation is a request of its own."""
        if self._endpoint.api == "openai":
            raise EndpointError(
                "OpenAI's API names likely tokens only, so that a text has no log-likelihood; give --api sglang, or"
                " tasks that generate"
            )
        ids, total, is_greedy = [*context], 0.0, True
        self._prime(ids)
        for token in continuation:
            said = self._endpoint.next_token(ids, top=1, asked=[token])
            if said is None:
                return None
            total, is_greedy = total + said.asked[token], is_greedy and said.best == token
            ids.append(token)
        return total, is_greedy

    def rolling(self, ids: Sequence[int]) -> float:
        """See `Taker.rolling`."""
        raise EndpointError(
            "a server would be asked for every token of a text by itself; evaluate tasks that score whole texts without"
            " --endpoint"
        )

    def said_until(self, prompt: Sequence[int], num_tokens: int, stops: Sequence[str]) -> str | None:
        """See `Taker.said_until`."""
        self._prime(prompt)
        return self._endpoint.said_until(prompt, num_tokens, stops)

    def _prime(self, prompt: Sequence[int]) -> None:
        if prompt[:-1]:
            self._endpoint.prime(prompt[:-1])
