"""Tasks of lm-evaluation-harness, answered by a model whose cache is stored one way. Needs the extra `eval`."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from kvtuner.errors import CorpusError
from kvtuner.evaluation.answers import ANSWERING
from kvtuner.evaluation.likelihood import bounds
from kvtuner.evaluation.paired import Marks, mcnemar, sign_flip
from kvtuner.evaluation.statistics import bootstrap_mean, paired_difference
from kvtuner.exported_configs.evaluation import PROFILE, Cell, Difference, Result
from kvtuner.run_folder import sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from lm_eval.api.instance import Instance
    from transformers import PreTrainedTokenizerBase

    from kvtuner.evaluation.offline import Offline
    from kvtuner.evaluation.text import Text
    from kvtuner.run_folder import RunFolder

JOURNAL: Final = "tasks.jsonl"
DEFAULT_MAX_TOKENS: Final = 256
SEED: Final = 1234

logger: Final = logging.getLogger("kvtuner")


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """What is asked of the harness.

    Attributes:
        tasks: names, groups or tags that it knows.
        include_path: folder of task files besides its own, which may run code of theirs; None for none.
        limit: questions of each task; None for all.
        num_fewshot: examples before a question; None for what the task says.
        apply_chat_template: whether prompts go through the tokenizer's.
    """

    tasks: tuple[str, ...]
    include_path: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False


class HarnessModel(LM):  # type: ignore[misc]  # lm_eval is not typed
    """The harness's view of a model: all of a context but its last token is one chunk, the rest another.

    So an answer reads its context as it is stored, its first token too: as after a prefix hit.

    Args:
        offline: the model and its way to store the cache.
        text: its tokens.
        tokenizer: for chat templates.
        context_length: a longer context loses its beginning, which is said once.
        folder: of the journal.
        identity: of whatever decides answers besides the questions and the way.
    """

    def __init__(
        self,
        offline: Offline,
        text: Text,
        tokenizer: PreTrainedTokenizerBase,
        context_length: int,
        folder: RunFolder,
        identity: str,
    ) -> None:
        super().__init__()
        self._offline, self._text, self._tokenizer = offline, text, tokenizer
        self._context_length, self._folder, self._identity = context_length, folder, identity
        self._has_said_truncation = False
        self._known = {
            record["key"]: record["answer"] for record in folder.records(JOURNAL) if record.get("identity") == identity
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
        """Log-probability of each continuation after its context, and whether it is the greedy one."""
        found = []
        for request in requests:
            context, continuation = request.args
            stripped = context.rstrip()
            continuation = context[len(stripped) :] + continuation  # a space belongs to the word after it
            before = self._text.context(stripped) or [self._first_token()]
            after = self._text.after(stripped, continuation)
            before = self._shortened(before, len(after))
            log_p, is_greedy = self._journalled(
                ["loglikelihood", before, after], partial(self._offline.log_likelihood, before, after)
            )
            found.append((float(log_p), bool(is_greedy)))
        return found

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Log-probability of each text, in pieces as long as the context, of which the first quarter is one chunk."""
        found = []
        for request in requests:
            ids = self._text.context(request.args[0])
            ids = ids if ids[:1] == self._text.context("")[:1] != [] else [self._first_token(), *ids]
            total = 0.0
            for first in range(0, len(ids) - 1, self._context_length - 1):
                piece = ids[first : first + self._context_length]
                log_p, _ = self._journalled(
                    ["rolling", piece], partial(self._offline.log_likelihood, piece[:1], piece[1:], whole=True)
                )
                total += float(log_p)
            found.append(total)
        return found

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """What is said greedily after each context, up to the first of the task's stops."""
        found = []
        for request in requests:
            context, options = request.args
            stops = options.get("until") or []
            stops = [stops] if isinstance(stops, str) else list(stops)
            num_tokens = int(options.get("max_gen_toks", DEFAULT_MAX_TOKENS))
            prompt = self._shortened(self._text.context(context) or [self._first_token()], num_tokens)

            generate = partial(self._generate, prompt, num_tokens, [stop for stop in stops if stop])
            found.append(str(self._journalled(["generate", prompt, num_tokens, stops], generate)))
        return found

    def _generate(self, prompt: list[int], num_tokens: int, stops: list[str]) -> str:
        said = self._offline.continuation(prompt, num_tokens, lambda text: any(stop in text for stop in stops))
        return min((said.split(stop)[0] for stop in stops), key=len, default=said)

    def _journalled(self, asked: list[Any], answer: Callable[[], Any]) -> Any:
        key = sha256_of([ANSWERING, self._offline.key, asked])
        if key not in self._known:
            self._known[key] = answer()
            self._folder.append(JOURNAL, {"identity": self._identity, "key": key, "answer": self._known[key]})
        return self._known[key]

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


def task_cells(models: Mapping[str, HarnessModel], options: TaskOptions, reference: str, seed: int) -> list[Cell]:
    """Every task's scores that are known answer by answer, the profile's beside all other ways'.

    Args:
        models: by the name of the way.
        options: what to ask.
        reference: name of the unquantized way.
        seed: of the intervals.

    Raises:
        CorpusError: tasks that the harness does not know, cannot load, or that score no single answer.
    """
    include = None if options.include_path is None else str(options.include_path)
    manager = TaskManager(include_path=include)  # reads thousands of files
    found = {name: _evaluated(model, options, manager) for name, model in models.items()}
    cells = []
    for task, metric in _metrics(found[PROFILE]):
        scores = {
            name: np.array([float(sample[metric]) for sample in samples[task]]) for name, samples in found.items()
        }
        cells.append(_cell(f"{task} {metric}"[:200], scores, reference, seed))
    if not cells:
        raise CorpusError(f"{', '.join(options.tasks)} score no single answer, so that nothing can be paired")
    return cells


def _evaluated(model: HarnessModel, options: TaskOptions, manager: Any) -> dict[str, list[dict[str, Any]]]:
    """Of one way: samples of every task, in the order of its questions."""
    try:
        with _quiet():
            results = simple_evaluate(
                model=model,
                tasks=list(options.tasks),
                task_manager=manager,
                limit=options.limit,
                num_fewshot=options.num_fewshot,
                apply_chat_template=options.apply_chat_template,
                bootstrap_iters=0,
                log_samples=True,
                random_seed=SEED,
                numpy_random_seed=SEED,
                torch_random_seed=SEED,
                fewshot_random_seed=SEED,
                confirm_run_unsafe_code=False,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CorpusError(f"--tasks {','.join(options.tasks)} cannot be evaluated: {reason}") from error
    assert results is not None
    samples: dict[str, list[dict[str, Any]]] = {}
    for task, rows in results["samples"].items():
        filters = dict.fromkeys(row["filter"] for row in rows)
        for name in filters:
            label = task if len(filters) == 1 else f"{task} ({name})"
            samples[label] = sorted((row for row in rows if row["filter"] == name), key=lambda row: row["doc_id"])
    return samples


def _metrics(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[tuple[str, str]]:
    for task, rows in samples.items():
        for metric in rows[0]["metrics"]:
            if all(isinstance(row.get(metric), int | float | np.number) for row in rows):
                yield task, metric
            else:
                logger.warning("kvtuner: %s of %s is no score of single answers, and is left out", metric, task)


def _cell(task: str, scores: Mapping[str, np.ndarray[Any, Any]], reference: str, seed: int) -> Cell:
    counts = np.ones(len(scores[PROFILE]), dtype=np.int64)
    if len(counts) < 2:
        raise CorpusError(f"{task} has one question; intervals need at least 2")
    right_or_wrong = all(set(values.tolist()) <= {0.0, 1.0} for values in scores.values())
    place = {"num_tokens": None, "position": 0, "units": len(counts), "count": len(counts)}
    about: dict[str, Any] = {"level": "task", "task": task, **place}
    if right_or_wrong:
        marks = {name: Marks(tuple((bool(value),) for value in values)) for name, values in scores.items()}
        return Cell(
            **about,
            measure="accuracy",
            flag=marks[reference].flag,
            results=tuple(Result(subject=name, **bounds(each.interval()), failures=0) for name, each in marks.items()),
            differences=tuple(
                Difference(
                    other=name,
                    **bounds(marks[PROFILE].minus(each)),
                    p_value=marks[PROFILE].sign_flip(each, seed),
                    mcnemar=mcnemar(marks[PROFILE], each),
                )
                for name, each in marks.items()
                if name != PROFILE
            ),
        )
    return Cell(
        **about,
        measure="score",
        flag=None,
        results=tuple(
            Result(subject=name, **bounds(bootstrap_mean(values, counts, seed=seed)), failures=0)
            for name, values in scores.items()
        ),
        differences=tuple(
            Difference(
                other=name,
                **bounds(paired_difference(scores[PROFILE], values, counts, seed=seed)),
                p_value=sign_flip(scores[PROFILE] - values, seed),
                mcnemar=None,
            )
            for name, values in scores.items()
            if name != PROFILE
        ),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """The harness logs what it does; what is wrong it raises."""
    harness = logging.getLogger("lm_eval")
    level = harness.level
    harness.setLevel(logging.ERROR)
    try:
        yield
    finally:
        harness.setLevel(level)
