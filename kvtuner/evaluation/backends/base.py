"""The base of backends, which answer by one scheme each: texts as tokens, answers, and the journal of answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtuner.calibration.corpus import start_tokens
from kvtuner.exported_configs.scheme_names import REFERENCE
from kvtuner.journal import Journal
from kvtuner.run_folder import RunFolder, sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from kvtuner.evaluation.tasks.recall_and_needles import Problem
    from kvtuner.exported_configs.profile.evaluation_record import BackendRecord, Flag

    Asked = tuple[Sequence[Any], tuple[Any, ...]]
    """A question as a journal has it, and the arguments of the method that is asked."""


class TextTokenizer:
    """Texts as token ids of a model's tokenizer, and back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self._start = tokenizer, start_tokens(tokenizer)
        self._tokens_of: Counter[str] | None = None

    def context(self, text: str) -> list[int]:
        """The token ids of a text that a sequence begins with."""
        return self._start + self._ids(text)

    def after(self, context: str, text: str) -> list[int]:
        """The token ids that `text` adds to a context, as in the middle of a text where the tokenizer allows it.

        Some tokenizers begin every text with a space, which is not there in the middle.
        """
        before, whole = self._ids(context), self._ids(context + text)
        return whole[len(before) :] if whole[: len(before)] == before else self._ids(text)

    def count(self, text: str) -> int:
        """The number of tokens of a text, without special ones."""
        return len(self._ids(text))

    def of(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special ones."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def names_one_token(self, text: str) -> bool:
        """Whether exactly one token of the vocabulary, decoded by itself, is this text."""
        if self._tokens_of is None:
            self._tokens_of = Counter(self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))]))
        return self._tokens_of[text] == 1

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])


@dataclass(frozen=True, slots=True)
class HitCount:
    """Prompt tokens of which a server says whether they were in its cache, and how many were."""

    prompt: int = 0
    cached: int = 0

    def __add__(self, other: HitCount) -> HitCount:
        return HitCount(self.prompt + other.prompt, self.cached + other.cached)

    def __sub__(self, other: HitCount) -> HitCount:
        return HitCount(self.prompt - other.prompt, self.cached - other.cached)

    @property
    def share(self) -> float | None:
        """The share of prompt tokens that were in the cache; None where nothing is known of any."""
        return min(1.0, self.cached / self.prompt) if self.prompt else None


class Backend(ABC):
    """A model behind one scheme, which answers greedily; all of a prompt but its last token is read as it is stored.

    An answer is None where a server did not give it. Methods raise EndpointError once the server is gone.

    The name is that of the scheme; the dtype is None where a server does not say. Hits in a server's cache are of all
    prompts, those of a journal included.
    """

    name: str
    dtype: str | None
    hits: HitCount | None

    @property
    @abstractmethod
    def key(self) -> str | None:
        """The text that decides the answers besides the model and the questions; None where a server does not say."""

    def prepare(self, method: str, asked: Sequence[tuple[Any, ...]]) -> None:  # noqa: B027  # most need not
        """Hear what will be asked next of a method, by its arguments; a backend may answer all of it together."""

    @abstractmethod
    def answers(self, problem: Problem, *, offset: int = 0) -> list[str | None]:
        """The text after each question of a problem, whose context begins at a position where they are counted."""

    @abstractmethod
    def continuation(self, prompt: Sequence[int], num_tokens: int) -> str | None:
        """The text after a prompt, up to its end."""

    @abstractmethod
    def generate_until(self, prompt: Sequence[int], num_tokens: int, stops: Sequence[str]) -> str | None:
        """The text after a prompt up to the first of some stops."""

    @abstractmethod
    def log_likelihood(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool] | None:
        """The log-probability of a continuation, nats, and whether it is greedy; `EndpointError` if none is given."""

    @abstractmethod
    def whole_log_likelihood(self, ids: Sequence[int]) -> float:
        """The log-probability of all tokens of a text but the first, nats; `EndpointError` of a server."""

    @abstractmethod
    def record(self) -> BackendRecord:
        """The backend as an evaluation's file states it, when all is asked."""

    def is_unread(self, hits: HitCount) -> bool:
        """Whether prompts may have been read as they were before they were stored, which shows no damage."""
        return False


def unread_flag(backends: Sequence[Backend], hits: Mapping[str, HitCount]) -> Flag | None:
    """The flag of a cell whose quantized caches may not have been read, by the hits of each scheme's prompts."""
    quantized = [backend for backend in backends if backend.name != REFERENCE]
    return "unread" if any(backend.is_unread(hits[backend.name]) for backend in quantized) else None


AT_ONCE: Final = 64
"""The questions that a backend hears of together."""
_FORMER_FIELD: Final = "said"
"""The field of the answer in journals that earlier versions wrote."""


class AnswerJournal:
    """The answers that a run folder keeps; an answer that never came is not kept, and asked for again.

    The identity is the hash of everything that decides answers besides the backend and what is asked. Another version
    of how answers are made finds none of the others'.
    """

    def __init__(self, folder: RunFolder, name: str, identity: str, *, version: int) -> None:
        self._journal, self._version = Journal(folder, name, identity), version

    def prepared(self, backend: Backend, method: str, asked: Sequence[Asked]) -> Iterator[Asked]:
        """Questions in their order, of which the backend hears before, as far as they are new, a batch at a time.

        An interruption loses a batch at most.
        """
        for first in range(0, len(asked), AT_ONCE):
            batch = asked[first : first + AT_ONCE]
            keys = [self._key(backend, question) for question, _ in batch]
            new = [
                arguments
                for key, (_, arguments) in zip(keys, batch, strict=True)
                if key is None or self._journal.get(key) is None
            ]
            if new:
                backend.prepare(method, new)
            yield from batch

    def ask(
        self, backend: Backend, question: Sequence[Any], ask: Callable[[], Any], **facts: Any
    ) -> tuple[Any, HitCount]:
        """The answer, kept or asked for, and how much of its prompts was found in a cache.

        Question and answer are plain JSON, with None for what never came; facts are fields for a reader of the file.
        """
        key = self._key(backend, question)
        record = None if key is None else self._journal.get(key)
        if record is not None:
            hits = HitCount(*record.get("hits", ()))
            if backend.hits is not None:
                backend.hits += hits
            return record["answer" if "answer" in record else _FORMER_FIELD], hits
        before = backend.hits
        answer = ask()
        hits = HitCount() if backend.hits is None or before is None else backend.hits - before
        is_whole = answer is not None and not (isinstance(answer, list | tuple) and None in answer)
        if key is not None and is_whole:
            counted = {} if backend.hits is None else {"hits": [hits.prompt, hits.cached]}
            self._journal.append({"key": key, **facts, "answer": answer, **counted})
        return answer, hits

    def _key(self, backend: Backend, question: Sequence[Any]) -> str | None:
        return None if backend.key is None else sha256_of([self._version, backend.key, *question])
