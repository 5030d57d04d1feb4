"""Tasks of lm-evaluation-harness as cells of an evaluation: every scheme's scores of the same questions, paired."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from kvtuner.errors import CorpusError, EndpointError, KVTunerError
from kvtuner.evaluation.backends.base import is_unread
from kvtuner.evaluation.cells import Place, is_right_or_wrong, make_cell, score_cell
from kvtuner.evaluation.tasks.corpus_scores import MEASURES, CorpusScores, corpus_of
from kvtuner.exported_configs.profile.evaluation_record import PROFILE, Cell

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvtuner.evaluation.backends.base import Backend
    from kvtuner.evaluation.tasks.corpus_scores import TextPairs
    from kvtuner.evaluation.tasks.harness_model import HarnessModel

SEED: Final = 1234
GREEDY: Final = " (greedy)"
"""Stands behind the name of a task that asks for sampling."""

Value = TypeVar("Value")

logger: Final = logging.getLogger("kvtuner")


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """What is asked of the harness.

    Attributes:
        tasks: The names, groups or tags that the harness knows.
        include_path: The folder of further task files, which may run code of theirs; None for none.
        limit: The questions of each task; None for all.
        num_fewshot: The examples before a question; None leaves them to the task.
        apply_chat_template: Whether prompts go through the tokenizer's chat template.
    """

    tasks: tuple[str, ...]
    include_path: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class TaskAnswers:
    """The answers of one scheme in one task, through one of its filters.

    Attributes:
        task: The task as the harness names it.
        rows: The harness's records, in the order of the questions.
        lower_is_better: The metrics whose lower values are better.
    """

    task: str
    rows: tuple[Mapping[str, Any], ...]
    lower_is_better: frozenset[str]

    def numbers(self, metric: str) -> NDArray[np.float64] | None:
        """The score of each question; None where the metric is no number."""
        values = [row.get(metric) for row in self.rows]
        if not all(isinstance(value, int | float | np.number) for value in values):
            return None
        return np.array(values, dtype=np.float64)

    def corpus(self, metric: str) -> TextPairs | None:
        """The sentences that a score of a corpus is made of; None where the metric is another one."""
        return corpus_of([row.get(metric) for row in self.rows]) if metric in MEASURES else None


def task_cells(
    models: Mapping[str, HarnessModel], backends: Sequence[Backend], options: TaskOptions, *, seed: int
) -> list[Cell]:
    """Every task's scores that are known answer by answer, or of the corpus, the profile's beside all others'.

    Args:
        models: The harness's views of the backends, by the name of the scheme.
        backends: The backends.
        options: What to ask.
        seed: The seed of the intervals.

    Raises:
        CorpusError: tasks that the harness does not know, cannot load, or that score nothing that can be paired.
        EndpointError: a server is gone, or gives no log-likelihoods where a task needs them.
        KVTunerError: whatever a model raises that is asked.
    """
    include = None if options.include_path is None else str(options.include_path)
    manager = TaskManager(include_path=include)  # reads thousands of files
    answers = {name: _evaluated(model, options, manager) for name, model in models.items()}
    greedy = set().union(*(model.greedy for model in models.values()))
    for task in sorted(greedy):
        logger.warning(
            "kvtuner: %s asks for sampling, but all schemes answer it greedily, as what is compared must", task
        )
    cells = []
    for label, of_profile in answers[PROFILE].items():
        task = of_profile.task
        suffix = GREEDY if task in greedy else ""
        for metric in of_profile.rows[0]["metrics"]:
            place = Place(
                "task",
                task=f"{label} {metric}"[: 200 - len(suffix)] + suffix,
                flag="unread"
                if is_unread(backends, {name: model.hits[task] for name, model in models.items()})
                else None,
                failures={
                    name: len(model.failed_texts[task] | model.failed_scores[task]) for name, model in models.items()
                },
            )
            cell = _metric_cell(metric, place, {name: found[label] for name, found in answers.items()}, models, seed)
            if cell is None:
                logger.warning("kvtuner: %s of %s cannot be paired, and is left out", metric, label)
            else:
                cells.append(cell)
    if not cells:
        raise CorpusError(f"{', '.join(options.tasks)} score no single answer, so that nothing can be paired")
    return cells


def _metric_cell(
    metric: str, place: Place, answers: Mapping[str, TaskAnswers], models: Mapping[str, HarnessModel], seed: int
) -> Cell | None:
    """The cell of one metric of one task; None where its values cannot be paired."""
    corpora = _all_of({name: each.corpus(metric) for name, each in answers.items()})
    if corpora is not None:
        return make_cell(MEASURES[metric], place, CorpusScores(metric, corpora, seed))
    scores = _all_of({name: each.numbers(metric) for name, each in answers.items()})
    return None if scores is None else score_cell(place, _with_failures(metric, answers, scores, models), seed)


def _evaluated(model: HarnessModel, options: TaskOptions, manager: Any) -> dict[str, TaskAnswers]:
    """The answers of one scheme to every task, through each of its filters."""
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
    except KVTunerError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        if model.was_asked:
            raise
        reason = " ".join(str(error).split())[:300]
        raise CorpusError(f"--tasks {','.join(options.tasks)} cannot be evaluated: {reason}") from error
    assert results is not None
    answers: dict[str, TaskAnswers] = {}
    for task, rows in results["samples"].items():
        better = results["higher_is_better"].get(task) or {}
        lower = frozenset(metric for metric, higher in better.items() if higher is False)
        filters = dict.fromkeys(row["filter"] for row in rows)
        for name in filters:
            label = task if len(filters) == 1 else f"{task} ({name})"
            kept = sorted((row for row in rows if row["filter"] == name), key=lambda row: row["doc_id"])
            answers[label] = TaskAnswers(task, tuple(kept), lower)
    return answers


def _all_of(values: Mapping[str, Value | None]) -> dict[str, Value] | None:
    """The values; None where one is missing."""
    there = {name: value for name, value in values.items() if value is not None}
    return there if len(there) == len(values) else None


def _with_failures(
    metric: str,
    answers: Mapping[str, TaskAnswers],
    scores: Mapping[str, NDArray[np.float64]],
    models: Mapping[str, HarnessModel],
) -> dict[str, NDArray[np.float64]]:
    """Scores in which an answer that never came is wrong; a generation is scored as the task scores an empty one.

    Raises:
        EndpointError: log-likelihoods that never came, of a metric that knows no right and wrong.
    """
    right_or_wrong = is_right_or_wrong(scores)
    marked = {name: values.copy() for name, values in scores.items()}
    for name, each in answers.items():
        unsaid, unscored = models[name].failed_texts[each.task], models[name].failed_scores[each.task]
        failed = unsaid | unscored
        if unscored and not right_or_wrong:
            raise EndpointError(
                f"{len(unscored)} log-likelihoods of {each.task} never came from {name}, and {metric} knows no wrong"
                " answer; run the same command again to ask for these again"
            )
        for index, row in enumerate(each.rows):
            if right_or_wrong and row["doc_id"] in failed:
                marked[name][index] = float(metric in each.lower_is_better)
    return marked


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness's log: it logs what it does, and raises what is wrong."""
    harness = logging.getLogger("lm_eval")
    level = harness.level
    harness.setLevel(logging.ERROR)
    try:
        yield
    finally:
        harness.setLevel(level)
