"""Tasks of lm-evaluation-harness as cells of an evaluation: every scheme's scores of the same questions, paired."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from kvtuner.errors import CorpusError, EndpointError, KVTunerError
from kvtuner.evaluation.backends.base import Backend, unread_flag
from kvtuner.evaluation.cells import BinaryScores, CellKey, MeanScores, PairedScores, make_cell
from kvtuner.evaluation.tasks.corpus_score import CORPUS_METRICS, CorpusScore, sentences_of
from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME, Cell, Measure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvtuner.evaluation.tasks.harness_model import HarnessModel

SEED: Final = 1234
GREEDY: Final = " (greedy)"
"""The suffix of the name of a task that asks for sampling."""

logger: Final = logging.getLogger("kvtuner")


@dataclass(frozen=True, slots=True)
class TaskAnswers:
    """The harness's records of one scheme in one task, through one of its filters, in the order of the questions."""

    task: str
    rows: tuple[Mapping[str, Any], ...]
    lower_is_better: frozenset[str]


def task_cells(
    models: Mapping[str, HarnessModel],
    backends: Sequence[Backend],
    *,
    tasks: Sequence[str],
    include_path: str | None,
    seed: int,
    **more: Any,
) -> list[Cell]:
    """Every task's scores that are known answer by answer, or of the corpus, the profile's beside all others'.

    Tasks are names, groups or tags that the harness knows; `include_path` is a folder of further task files, which may
    run code of theirs; `more` are arguments of the harness besides, such as ``limit``.

    Raises:
        CorpusError: Tasks that the harness does not know, cannot load, or that score nothing that can be paired.
        EndpointError: A server is gone, or gives no log-likelihoods where a task needs them.
        KVTunerError: Whatever a model raises that is asked.
    """
    manager = TaskManager(include_path=include_path)  # reads thousands of files
    answers = {name: _evaluated(model, manager, tasks, more) for name, model in models.items()}
    greedy = set().union(*(model.greedy for model in models.values()))
    for task in sorted(greedy):
        logger.warning(
            "kvtuner: %s asks for sampling, but all schemes answer it greedily, as what is compared must", task
        )
    cells = []
    for label, of_profile in answers[PROFILE_SCHEME].items():
        task = of_profile.task
        suffix = GREEDY if task in greedy else ""
        flag = unread_flag(backends, {name: model.hits[task] for name, model in models.items()})
        failures = {name: len(model.failed(task)) for name, model in models.items()}
        for metric in of_profile.rows[0]["metrics"]:
            measure, scores = _scores(label, metric, {name: each[label] for name, each in answers.items()}, models)
            if not scores:
                logger.warning("kvtuner: %s of %s cannot be paired, and is left out", metric, label)
                continue
            name = f"{label} {metric}"[: 200 - len(suffix)] + suffix
            key = CellKey("task", task=name, flag=flag, failures=failures)
            cells.append(make_cell(measure, key, scores, seed))
    if not cells:
        raise CorpusError(f"{', '.join(tasks)} score no single answer, so that nothing can be paired")
    return cells


def _evaluated(
    model: HarnessModel, manager: TaskManager, tasks: Sequence[str], more: Mapping[str, Any]
) -> dict[str, TaskAnswers]:
    try:
        with _quiet():
            results = simple_evaluate(
                model=model,
                tasks=list(tasks),
                task_manager=manager,
                bootstrap_iters=0,
                log_samples=True,
                random_seed=SEED,
                numpy_random_seed=SEED,
                torch_random_seed=SEED,
                fewshot_random_seed=SEED,
                confirm_run_unsafe_code=False,
                **more,
            )
    except KVTunerError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        if model.was_asked:
            raise
        reason = " ".join(str(error).split())[:300]
        raise CorpusError(f"--tasks {','.join(tasks)} cannot be evaluated: {reason}") from error
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


def _scores(
    label: str, metric: str, answers: Mapping[str, TaskAnswers], models: Mapping[str, HarnessModel]
) -> tuple[Measure, Mapping[str, PairedScores]]:
    """The scores of all schemes: of a corpus, right or wrong, or any numbers; none where they cannot be paired."""
    values = {name: [row.get(metric) for row in each.rows] for name, each in answers.items()}
    if metric in CORPUS_METRICS:
        corpora = {name: sentences_of(each) for name, each in values.items()}
        scores = {name: CorpusScore(metric, corpus) for name, corpus in corpora.items() if corpus is not None}
        if len(scores) == len(answers):
            return CORPUS_METRICS[metric][0], scores
    flat = [value for each in values.values() for value in each]
    if not all(isinstance(value, int | float | np.number) for value in flat):
        return "score", {}
    is_right_or_wrong = all(value in (0, 1) for value in flat)
    if not is_right_or_wrong:
        _check_scored(metric, answers[PROFILE_SCHEME].task, models)
    num_questions = len(values[PROFILE_SCHEME])
    if num_questions < 2:
        raise CorpusError(f"{label} {metric} has one question; intervals need at least 2")
    if is_right_or_wrong:
        return "accuracy", {name: _marks(metric, each, models[name]) for name, each in answers.items()}
    counts = np.ones(num_questions, dtype=np.int64)
    return "score", {name: MeanScores(np.array(each, dtype=np.float64), counts) for name, each in values.items()}


def _check_scored(metric: str, task: str, models: Mapping[str, HarnessModel]) -> None:
    for name, model in models.items():
        if unscored := model.failed_scores[task]:
            raise EndpointError(
                f"{len(unscored)} log-likelihoods of {task} never came from {name}, and {metric} knows no wrong"
                " answer; run the same command again to ask for these again"
            )


def _marks(metric: str, answers: TaskAnswers, model: HarnessModel) -> BinaryScores:
    """Marks in which an answer that never came is wrong."""
    failed, wrong = model.failed(answers.task), metric in answers.lower_is_better
    return BinaryScores(tuple((wrong if row["doc_id"] in failed else bool(row[metric]),) for row in answers.rows))


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
