"""Tasks of lm-evaluation-harness as cells of an evaluation: every way's scores of the same questions, paired."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from kvtuner.errors import CorpusError, EndpointError, KVTunerError
from kvtuner.evaluation.cells import bounds
from kvtuner.evaluation.paired import Marks, mcnemar, sign_flip
from kvtuner.evaluation.statistics import bootstrap_mean, paired_difference
from kvtuner.evaluation.tasks.corpus_scores import MEASURES, CorpusScores, corpus_of
from kvtuner.exported_configs.profile.evaluation_record import PROFILE, Cell, PairedDifference, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from kvtuner.evaluation.backends.endpoint import HitCount
    from kvtuner.evaluation.tasks.corpus_scores import TextPairs
    from kvtuner.evaluation.tasks.harness_model import HarnessModel

SEED: Final = 1234
GREEDY: Final = " (greedy)"
"""Behind the name of a task that asks for sampling."""

Found = TypeVar("Found")

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


@dataclass(frozen=True, slots=True)
class TaskAnswers:
    """What one way answered in one task, through one of its filters.

    Attributes:
        task: as the harness names it.
        rows: the harness's records, in the order of the questions.
        lower_is_better: metrics of which this is so.
    """

    task: str
    rows: tuple[Mapping[str, Any], ...]
    lower_is_better: frozenset[str]

    def numbers(self, metric: str) -> NDArray[np.float64] | None:
        """A score for each question; None where it is none."""
        values = [row.get(metric) for row in self.rows]
        if not all(isinstance(value, int | float | np.number) for value in values):
            return None
        return np.array(values, dtype=np.float64)

    def corpus(self, metric: str) -> TextPairs | None:
        """What a score of a corpus is made of; None where it is something else."""
        return corpus_of([row.get(metric) for row in self.rows]) if metric in MEASURES else None


@dataclass(frozen=True, slots=True)
class _About:
    """What a cell says besides its figures.

    Attributes:
        label: of the task and its metric.
        failures: by the name of the way, questions whose answer never came.
        is_unread: whether prompts may have been read as they were before they were stored.
        reference: name of the unquantized way, which may be none of them.
        seed: of what is drawn.
    """

    label: str
    failures: Mapping[str, int]
    is_unread: bool
    reference: str
    seed: int

    def fields(self, questions: int) -> dict[str, Any]:
        place = {"num_tokens": None, "position": 0, "units": questions, "count": questions}
        return {"level": "task", "task": self.label, **place}


def task_cells(
    models: Mapping[str, HarnessModel],
    options: TaskOptions,
    reference: str,
    *,
    seed: int,
    is_unread: Callable[[Mapping[str, HitCount]], bool],
) -> list[Cell]:
    """Every task's scores that are known answer by answer, or of the corpus, the profile's beside all other ways'.

    Args:
        models: by the name of the way.
        options: what to ask.
        reference: name of the unquantized way, which may be none of them.
        seed: of the intervals.
        is_unread: whether what was found in caches, by way, shows that prompts may not have been read as stored.

    Raises:
        CorpusError: tasks that the harness does not know, cannot load, or that score nothing that can be paired.
        EndpointError: a server is gone, or gives no log-likelihoods where a task needs them.
        KVTunerError: whatever a model raises that is asked.
    """
    include = None if options.include_path is None else str(options.include_path)
    manager = TaskManager(include_path=include)  # reads thousands of files
    found = {name: _evaluated(model, options, manager) for name, model in models.items()}
    greedy = set().union(*(model.greedy for model in models.values()))
    for task in sorted(greedy):
        logger.warning("kvtuner: %s asks for sampling, but all ways answer it greedily, as what is compared must", task)
    cells = []
    for label, answered in found[PROFILE].items():
        hits = {name: model.hits[answered.task] for name, model in models.items()}
        suffix = GREEDY if answered.task in greedy else ""
        for metric in answered.rows[0]["metrics"]:
            failures = {
                name: len(model.unsaid[answered.task] | model.unscored[answered.task]) for name, model in models.items()
            }
            about = _About(
                f"{label} {metric}"[: 200 - len(suffix)] + suffix, failures, is_unread(hits), reference, seed
            )
            ways = {name: samples[label] for name, samples in found.items()}
            corpora = _all_of({name: each.corpus(metric) for name, each in ways.items()})
            scores = _all_of({name: each.numbers(metric) for name, each in ways.items()})
            if corpora is not None:
                cells.append(_corpus_cell(about, metric, corpora))
            elif scores is not None:
                cells.append(_score_cell(about, _with_failures(metric, ways, scores, models)))
            else:
                logger.warning("kvtuner: %s of %s cannot be paired, and is left out", metric, label)
    if not cells:
        raise CorpusError(f"{', '.join(options.tasks)} score no single answer, so that nothing can be paired")
    return cells


def _evaluated(model: HarnessModel, options: TaskOptions, manager: Any) -> dict[str, TaskAnswers]:
    """Of one way: every task, through each of its filters."""
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
    found: dict[str, TaskAnswers] = {}
    for task, rows in results["samples"].items():
        better = results["higher_is_better"].get(task) or {}
        lower = frozenset(metric for metric, higher in better.items() if higher is False)
        filters = dict.fromkeys(row["filter"] for row in rows)
        for name in filters:
            label = task if len(filters) == 1 else f"{task} ({name})"
            mine = sorted((row for row in rows if row["filter"] == name), key=lambda row: row["doc_id"])
            found[label] = TaskAnswers(task, tuple(mine), lower)
    return found


def _all_of(found: Mapping[str, Found | None]) -> dict[str, Found] | None:
    """All of them; None where one is missing."""
    there = {name: each for name, each in found.items() if each is not None}
    return there if len(there) == len(found) else None


def _with_failures(
    metric: str,
    ways: Mapping[str, TaskAnswers],
    scores: Mapping[str, NDArray[np.float64]],
    models: Mapping[str, HarnessModel],
) -> dict[str, NDArray[np.float64]]:
    """Scores in which an answer that never came is wrong; a generation is scored as the task scores an empty one.

    Raises:
        EndpointError: log-likelihoods that never came, of a metric that knows no right and wrong.
    """
    right_or_wrong = all(set(values.tolist()) <= {0.0, 1.0} for values in scores.values())
    marked = {name: values.copy() for name, values in scores.items()}
    for name, each in ways.items():
        unsaid, unscored = models[name].unsaid[each.task], models[name].unscored[each.task]
        if unscored and not right_or_wrong:
            raise EndpointError(
                f"{len(unscored)} log-likelihoods of {each.task} never came from {name}, and {metric} knows no wrong"
                " answer; run the same command again to ask for these again"
            )
        for index, row in enumerate(each.rows):
            if right_or_wrong and row["doc_id"] in unsaid | unscored:
                marked[name][index] = float(metric in each.lower_is_better)
    return marked


def _score_cell(about: _About, scores: Mapping[str, NDArray[np.float64]]) -> Cell:
    counts = np.ones(len(scores[PROFILE]), dtype=np.int64)
    if len(counts) < 2:
        raise CorpusError(f"{about.label} has one question; intervals need at least 2")
    if all(set(values.tolist()) <= {0.0, 1.0} for values in scores.values()):
        return _accuracy_cell(
            about, {name: Marks(tuple((bool(value),) for value in values)) for name, values in scores.items()}
        )
    return Cell(
        **about.fields(len(counts)),
        measure="score",
        flag="unread" if about.is_unread else None,
        results=tuple(
            Result(
                subject=name,
                **bounds(bootstrap_mean(values, counts, seed=about.seed)),
                failures=about.failures[name],
            )
            for name, values in scores.items()
        ),
        differences=tuple(
            PairedDifference(
                other=name,
                **bounds(paired_difference(scores[PROFILE], values, counts, seed=about.seed)),
                p_value=sign_flip(scores[PROFILE] - values, about.seed),
                mcnemar=None,
            )
            for name, values in scores.items()
            if name != PROFILE
        ),
    )


def _accuracy_cell(about: _About, marks: Mapping[str, Marks]) -> Cell:
    mine = marks[PROFILE]
    flag = marks[about.reference].flag if about.reference in marks else None
    return Cell(
        **about.fields(mine.num_questions),
        measure="accuracy",
        flag="unread" if about.is_unread else flag,
        results=tuple(
            Result(subject=name, **bounds(each.interval()), failures=about.failures[name])
            for name, each in marks.items()
        ),
        differences=tuple(
            PairedDifference(
                other=name,
                **bounds(mine.minus(each)),
                p_value=mine.sign_flip(each, about.seed),
                mcnemar=mcnemar(mine, each),
            )
            for name, each in marks.items()
            if name != PROFILE
        ),
    )


def _corpus_cell(about: _About, metric: str, corpora: Mapping[str, TextPairs]) -> Cell:
    scores = CorpusScores(metric, corpora, about.seed)
    return Cell(
        **about.fields(len(corpora[PROFILE].said)),
        measure=MEASURES[metric],
        flag="unread" if about.is_unread else None,
        results=tuple(
            Result(subject=name, **bounds(scores.interval(name)), failures=about.failures[name]) for name in corpora
        ),
        differences=tuple(
            PairedDifference(
                other=name,
                **bounds(scores.minus(PROFILE, name)),
                p_value=scores.p_value(PROFILE, name),
                mcnemar=None,
            )
            for name in corpora
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
