"""Refines measured quality inside a budget with Optuna: resumable, by any number of workers. Knows no models."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import optuna

from kvtuner.errors import NonFiniteActivationError, SearchSpaceError
from kvtuner.tuner.interrupts import InterruptGate
from kvtuner.tuner.samplers import POPULATION_SIZE, SamplerName, make_sampler
from kvtuner.tuner.study_storage import StorageErrors, bind_identity, open_storage, opening_lock
from kvtuner.tuner.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtuner.search_spaces.budget import Constraint
    from kvtuner.search_spaces.space import Configuration, SearchSpace
    from kvtuner.tuner.trials import TrialRecord

METRIC_NAME: Final = "KL, nats per token"
Guidance = Literal["none", "budget", "surrogate"]


@dataclass(frozen=True, slots=True)
class StudyResult:
    """The result of a study.

    Attributes:
        best: the configuration inside the budget with the least measured value; of equals the first tried.
        best_value: its measured KL, nats per token.
        trials: all finished trials, by number.
        population_size: individuals of a generation of NSGA-II; None for other samplers.
    """

    best: Configuration
    best_value: float
    trials: tuple[TrialRecord, ...]
    population_size: int | None


def refine(
    space: SearchSpace,
    constraint: Constraint,
    objective: Callable[[Configuration], float],
    *,
    warm: Sequence[Configuration],
    num_trials: int,
    sampler: SamplerName = "nsga2",
    seed: int = 0,
    storage: str | None = None,
    study_name: str = "kvtuner",
    identity: Mapping[str, Any] | None = None,
    guidance: Guidance = "surrogate",
    race: Callable[[Configuration, Configuration], float] | None = None,
    on_trial: Callable[[TrialRecord], None] | None = None,
    is_over: Callable[[], bool] | None = None,
) -> StudyResult:
    """Search the configuration of least measured KL inside the budget, from warm starts on.

    Ctrl-C ends it between two uses of the storage, a second one at once. Call it again with the same storage
    and name to resume, or elsewhere at the same time to help: all calls
    return when the study has `num_trials` finished trials. One worker that is not interrupted gives the same
    trials for the same seed.

    Args:
        space: menus and groups.
        constraint: the budget. What breaks it is a finished trial, but is never measured and never wins.
        objective: measures a configuration; deterministic, for nothing is measured twice in a study. One whose KL is
            not finite, by its value or by `NonFiniteActivationError`, is a finished trial that never wins.
        warm: tried first, in this order, as `SearchSpace.project` sees them; those that break the budget are
            left out.
        num_trials: finished trials of the whole study, not of this worker.
        sampler: proposes the rest; "none" ends after the warm starts.
        seed: The seed of the sampler.
        storage: URL for `open_storage`; None is memory.
        study_name: one per budget.
        identity: plain JSON values that must be equal whenever the study is opened: model, data, scores.
        guidance: "none" takes every proposal of the sampler, as the paper does; "budget" asks it again for what breaks
            the budget or was tried before; "surrogate" also takes every other proposal from `Surrogate` instead.
        race: measures a configuration beside the best one that the study has when its trial begins; of one that is
            worse it may give an estimate above the best one's value, and save time. The first warm start is not raced.
            None measures all of them with `objective`.
        on_trial: called after every trial that this worker finishes.
        is_over: asked before every trial after the first: whether to end with those that the study has.

    Raises:
        RunFolderError: The storage cannot be used, or its study is of another identity, space or budget.
        SearchSpaceError: No trial was inside the budget.
        NonFiniteActivationError: Nothing that was measured is finite.
    """
    gate, errors = InterruptGate(), StorageErrors(storage)
    with gate.closed(), errors.named():
        with opening_lock(storage):
            study = _open_study(storage, study_name)
            is_first = bind_identity(study, _identity(space, constraint, identity or {}), storage)
            worker = Worker(study, space, constraint, errors.outside(objective), gate, race and errors.outside(race))
            # Workers with one seed would propose the same trials: only the first one takes it as it is.
            own_seed = seed if is_first else (seed + os.getpid() + 1) % 2**32
            study.sampler = make_sampler(
                sampler,
                own_seed,
                worker.distributions,
                is_wanted=None if guidance == "none" else worker.is_wanted,
                suggest=partial(worker.suggest, own_seed) if guidance == "surrogate" else None,
            )
            if is_first:
                worker.describe()
            worker.enqueue(warm)
        is_sampling = sampler != "none" and bool(worker.distributions)
        worker.work(
            num_trials,
            is_sampling=is_sampling,
            on_trial=on_trial and errors.outside(on_trial),
            is_over=is_over and errors.outside(is_over),
        )
        records = worker.records()
    return _result(records, POPULATION_SIZE if sampler == "nsga2" else None)


def _open_study(storage: str | None, study_name: str) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=open_storage(storage), study_name=study_name, direction="minimize", load_if_exists=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if study.metric_names is None:
            study.set_metric_names([METRIC_NAME])
    return study


def _identity(space: SearchSpace, constraint: Constraint, identity: Mapping[str, Any]) -> dict[str, Any]:
    stages = [[stage.start, stage.stop, constraint.cap(i)] for i, stage in enumerate(constraint.stages)]
    return {**identity, "budget": constraint.budget.text, "caps": stages, "space": space.digest()}


def _result(records: Sequence[TrialRecord], population_size: int | None) -> StudyResult:
    values = {record.number: record.value for record in records if record.value is not None}
    failures = [record.failure for record in records if record.failure is not None]
    if failures and not values:
        raise NonFiniteActivationError(failures[0])
    if not values:
        raise SearchSpaceError(
            f"one trial at least must be inside the budget, but of {len(records)} none is;"
            " give warm starts, more trials or a larger budget"
        )
    best = min(values, key=lambda number: (values[number], number))
    by_number = {record.number: record for record in records}
    return StudyResult(by_number[best].configuration, values[best], tuple(records), population_size)
