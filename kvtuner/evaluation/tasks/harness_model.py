"""The harness's view of a model whose cache is stored one way. Needs the extra `eval`."""

from __future__ import annotations

import logging
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lm_eval.api.model import LM

from kvtuner.errors import CorpusError, EndpointError
from kvtuner.evaluation.backends.endpoint import HitCount
from kvtuner.evaluation.tasks.answers import ANSWERING
from kvtuner.run_folder import sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lm_eval.api.instance import Instance
    from transformers import PreTrainedTokenizerBase

    from kvtuner.evaluation.backends.takers import Taker
    from kvtuner.evaluation.token_text import Text
    from kvtuner.run_folder import RunFolder

JOURNAL: Final = "tasks.jsonl"
DEFAULT_MAX_TOKENS: Final = 256
UNSCORED: Final = -700.0
"""In place of a log-likelihood that never came, nats; its question is marked wrong, and metrics take no infinity."""

logger: Final = logging.getLogger("kvtuner")


def asks_for_sampling(options: Mapping[str, Any]) -> bool:
    """Whether a task's generation would be drawn at random, as the harness's own models read its options."""
    temperature = options.get("temperature")
    if options.get("do_sample") is None:
        return bool(temperature)
    return bool(options["do_sample"]) and temperature != 0


class HarnessModel(LM):  # type: ignore[misc]  # lm_eval is not typed
    """The harness's view of a model: all of a context but its last token is one chunk, the rest another.

    So an answer reads its context as it is stored, its first token too: as after a prefix hit.

    Args:
        taker: the model and its way to store the cache.
        text: its tokens.
        tokenizer: for chat templates.
        context_length: a longer context loses its beginning, which is said once.
        folder: of the journal.
        identity: of whatever decides answers besides the questions and the way.

    Attributes:
        hits: of every task, how much of its prompts was found in a server's cache.
        unsaid: of every task, questions with a generation that never came.
        unscored: of every task, questions with a log-likelihood that never came.
        greedy: tasks that ask for sampling, which are answered greedily all the same.
        was_asked: whether tasks are loaded and their prompts made, so that what fails is no longer their fault.
    """

    def __init__(
        self,
        taker: Taker,
        text: Text,
        tokenizer: PreTrainedTokenizerBase,
        context_length: int,
        folder: RunFolder,
        identity: str,
    ) -> None:
        super().__init__()
        self._taker, self._text, self._tokenizer = taker, text, tokenizer
        self._context_length, self._folder, self._identity = context_length, folder, identity
        self._has_said_truncation = False
        self.hits: defaultdict[str, HitCount] = defaultdict(HitCount)
        self.unsaid: defaultdict[str, set[int]] = defaultdict(set)
        self.unscored: defaultdict[str, set[int]] = defaultdict(set)
        self.greedy: set[str] = set()
        self.was_asked = False
        self._known = {
            record["key"]: record for record in folder.records(JOURNAL) if record.get("identity") == identity
        }

    @property
    def tokenizer_name(self) -> str:
        """For the harness's records."""
        return str(self._tokenizer.name_or_path)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """See the harness."""
        return str(self._tokenizer.chat_template) if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """See the harness."""
        return str(
            self._tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether it is the greedy one.

        Of an empty one 0, and that it is: certain.
        """
        self.was_asked = True
        found: list[tuple[float, bool]] = []
        for request in requests:
            context, continuation = request.args
            stripped = context.rstrip()
            # A space belongs to the word after it, where there is one.
            after = self._text.after(stripped, context[len(stripped) :] + continuation) if continuation else []
            if not after:
                found.append((0.0, True))
                continue
            before = self._text.context(stripped) or [self._first_token()]
            before = self._shortened(before, len(after))
            ask = partial(self._taker.log_likelihood, before, after)
            answer = self._journalled(request, ["loglikelihood", before, after], ask)
            if answer is None:
                self.unscored[request.task_name].add(request.doc_id)
            log_p, is_greedy = (UNSCORED, False) if answer is None else answer
            found.append((float(log_p), bool(is_greedy)))
        return found

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Log-probability of each text, in pieces as long as the context, of which the first quarter is one chunk."""
        self.was_asked = True
        found = []
        for request in requests:
            ids = self._text.context(request.args[0])
            ids = ids if ids[:1] == self._text.context("")[:1] != [] else [self._first_token(), *ids]
            total = 0.0
            for first in range(0, len(ids) - 1, self._context_length - 1):
                piece = ids[first : first + self._context_length]
                total += float(self._journalled(request, ["whole", piece], partial(self._taker.rolling, piece)))
            found.append(total)
        return found

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """What is said greedily after each context, up to the first of the task's stops."""
        self.was_asked = True
        found = []
        for request in requests:
            context, options = request.args
            if asks_for_sampling(options):
                self.greedy.add(request.task_name)
            stops = options.get("until") or []
            stops = [stops] if isinstance(stops, str) else list(stops)
            num_tokens = int(options.get("max_gen_toks", DEFAULT_MAX_TOKENS))
            prompt = self._shortened(self._text.context(context) or [self._first_token()], num_tokens)

            ask = partial(self._taker.said_until, prompt, num_tokens, [stop for stop in stops if stop])
            answer = self._journalled(request, ["generate", prompt, num_tokens, stops], ask)
            if answer is None:
                self.unsaid[request.task_name].add(request.doc_id)
            found.append("" if answer is None else str(answer))
        return found

    def _journalled(self, request: Instance, asked: list[Any], answer: Callable[[], Any]) -> Any:
        """An answer that is known, or that is asked for; None where it never came, which is not journalled."""
        taker = self._taker
        key = None if taker.key is None else sha256_of([ANSWERING, taker.key, asked])
        record = self._known.get(key)
        if record is None:
            before = HitCount() if taker.meter is None else taker.meter.hits
            record = {"answer": self._asked(request, answer)}
            if taker.meter is not None:
                hits = taker.meter.hits - before
                record["hits"] = [hits.prompt, hits.cached]
            if key is not None and record["answer"] is not None:
                self._known[key] = record
                self._folder.append(JOURNAL, {"identity": self._identity, "key": key, **record})
        elif taker.meter is not None:
            taker.meter.hits += HitCount(*record["hits"])
        self.hits[request.task_name] += HitCount(*record.get("hits", ()))
        return record["answer"]

    def _asked(self, request: Instance, answer: Callable[[], Any]) -> Any:
        try:
            return answer()
        except EndpointError as error:
            raise EndpointError(f"the task {request.task_name}: {error}") from error

    def _shortened(self, context: list[int], num_tokens: int) -> list[int]:
        room = self._context_length - num_tokens
        if room < 1:
            raise CorpusError(f"a task asks for {num_tokens} tokens, which leaves no context; give a longer one")
        if len(context) > room and not self._has_said_truncation:
            self._has_said_truncation = True
            logger.warning("kvtuner: contexts longer than %d tokens lose their beginning", room)
        return context[-room:]

    def _first_token(self) -> int:
        for token in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id):
            if isinstance(token, int):
                return token
        raise CorpusError("a task asks about an empty context, but the tokenizer has no token to begin with")
