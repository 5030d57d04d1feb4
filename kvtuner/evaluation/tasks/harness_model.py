"""The harness's view of a backend. Needs the extra `eval`."""

from __future__ import annotations

import logging
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lm_eval.api.model import LM

from kvtuner.errors import CorpusError, EndpointError
from kvtuner.evaluation.backends.base import AnswerJournal, Backend, HitCount
from kvtuner.evaluation.tasks.question_sets import ANSWERING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lm_eval.api.instance import Instance

    from kvtuner.evaluation.backends.base import TextTokenizer
    from kvtuner.run_folder import RunFolder

JOURNAL: Final = "tasks.jsonl"
DEFAULT_MAX_TOKENS: Final = 256
UNSCORED: Final = -700.0
"""The log-likelihood of an answer that never came, nats: it is marked wrong, and metrics take no infinity."""

logger: Final = logging.getLogger("kvtuner")


def asks_for_sampling(options: Mapping[str, Any]) -> bool:
    """Whether a task's generation would be drawn at random, as the harness's own models read its options."""
    temperature = options.get("temperature")
    if options.get("do_sample") is None:
        return bool(temperature)
    return bool(options["do_sample"]) and temperature != 0


class HarnessModel(LM):  # type: ignore[misc]  # lm_eval is not typed
    """The harness's view of a backend: all of a context but its last token is one chunk, the rest another.

    So an answer reads its context as it is stored, its first token too: like after a prefix hit. A prompt that is
    longer than the model's context loses its beginning, with one warning. Answers are journalled.

    Hits in a server's cache, and questions whose generation or log-likelihood never came, are counted by task. `greedy`
    are tasks that ask for sampling. Once the model was asked, what fails is no longer the fault of tasks or prompts.
    """

    def __init__(
        self,
        backend: Backend,
        text: TextTokenizer,
        context_length: int,
        folder: RunFolder,
        identity: str,
    ) -> None:
        super().__init__()
        self._backend, self._text, self._tokenizer = backend, text, text.tokenizer
        self._context_length, self._has_warned = context_length, False
        self._journal = AnswerJournal(folder, JOURNAL, identity, version=ANSWERING)
        self.hits: defaultdict[str, HitCount] = defaultdict(HitCount)
        self.failed_texts: defaultdict[str, set[int]] = defaultdict(set)
        self.failed_scores: defaultdict[str, set[int]] = defaultdict(set)
        self.greedy: set[str] = set()
        self.was_asked = False

    @property
    def tokenizer_name(self) -> str:
        """The name in the harness's records."""
        return str(self._tokenizer.name_or_path)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's chat template, as the harness asks for it."""
        return str(self._tokenizer.chat_template) if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a chat, as the harness asks for it."""
        apply = self._tokenizer.apply_chat_template
        return str(apply(chat_history, tokenize=False, add_generation_prompt=add_generation_prompt))

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether it is the greedy one; an empty one is certain."""
        self.was_asked = True
        scores: list[tuple[float, bool]] = []
        pairs = [self._in_tokens(*request.args) for request in requests]
        asked = self._prepared("log_likelihood", [(["loglikelihood", *pair], pair) for pair in pairs if pair[1]])
        for request, (_, after) in zip(requests, pairs, strict=True):
            if not after:
                scores.append((0.0, True))
                continue
            _, (before, after) = next(asked)
            ask = partial(self._backend.log_likelihood, before, after)
            answer = self._ask(request, ["loglikelihood", before, after], ask)
            if answer is None:
                self.failed_scores[request.task_name].add(request.doc_id)
            log_p, is_greedy = (UNSCORED, False) if answer is None else answer
            scores.append((float(log_p), bool(is_greedy)))
        return scores

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """The log-probability of each text, in pieces as long as the context, whose first quarter is one chunk."""
        self.was_asked = True
        totals = []
        for request in requests:
            ids = self._text.context(request.args[0])
            ids = ids if ids[:1] == self._text.context("")[:1] != [] else [self._first_token(), *ids]
            total = 0.0
            for first in range(0, len(ids) - 1, self._context_length - 1):
                piece = ids[first : first + self._context_length]
                total += float(self._ask(request, ["whole", piece], partial(self._backend.whole_log_likelihood, piece)))
            totals.append(total)
        return totals

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The greedy text after each context, up to the first of the task's stops."""
        self.was_asked = True
        texts, asked = [], []
        for request in requests:
            context, options = request.args
            if asks_for_sampling(options):
                self.greedy.add(request.task_name)
            stops = options.get("until") or []
            stops = [stops] if isinstance(stops, str) else list(stops)
            num_tokens = int(options.get("max_gen_toks", DEFAULT_MAX_TOKENS))
            prompt = self._shortened(self._text.context(context) or [self._first_token()], num_tokens)
            arguments = (prompt, num_tokens, [stop for stop in stops if stop])
            asked.append((["generate", prompt, num_tokens, stops], arguments))
        prepared = self._prepared("generate_until", asked)
        for request, (question, arguments) in zip(requests, prepared, strict=True):
            answer = self._ask(request, question, partial(self._backend.generate_until, *arguments))
            if answer is None:
                self.failed_texts[request.task_name].add(request.doc_id)
            texts.append("" if answer is None else str(answer))
        return texts

    def failed(self, task: str) -> set[int]:
        """The questions of a task whose answer never came."""
        return self.failed_texts[task] | self.failed_scores[task]

    def _in_tokens(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of a context, as far as there is room, and of what follows it; none where that is empty."""
        stripped = context.rstrip()
        # A space belongs to the word after it, where there is one.
        after = self._text.after(stripped, context[len(stripped) :] + continuation) if continuation else []
        before = self._text.context(stripped) or [self._first_token()]
        return (self._shortened(before, len(after)), after) if after else ([], [])

    def _prepared(
        self, method: str, asked: Sequence[tuple[list[Any], tuple[Any, ...]]]
    ) -> Iterator[tuple[list[Any], tuple[Any, ...]]]:
        """Questions and arguments, of which the backend hears before, a batch at a time."""
        for (question,), arguments in self._journal.prepared(
            self._backend, method, [([question], arguments) for question, arguments in asked]
        ):
            yield question, arguments

    def _ask(self, request: Instance, question: list[Any], ask: Callable[[], Any]) -> Any:
        try:
            answer, hits = self._journal.ask(self._backend, [question], ask)
        except EndpointError as error:
            raise EndpointError(f"the task {request.task_name}: {error}") from error
        self.hits[request.task_name] += hits
        return answer

    def _shortened(self, context: list[int], num_tokens: int) -> list[int]:
        room = self._context_length - num_tokens
        if room < 1:
            raise CorpusError(f"a task asks for {num_tokens} tokens, which leaves no context; give a longer one")
        if len(context) > room and not self._has_warned:
            self._has_warned = True
            logger.warning("kvtuner: contexts longer than %d tokens lose their beginning", room)
        return context[-room:]

    def _first_token(self) -> int:
        for token in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id):
            if isinstance(token, int):
                return token
        raise CorpusError("a task asks about an empty context, but the tokenizer has no token to begin with")
