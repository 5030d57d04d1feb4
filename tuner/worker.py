"""A worker of a study: takes trials, measures them, gives back those that it cannot measure. Knows no models.

Of one run folder a single worker at a time takes trials, by a claim. Here several may: those of two run folders with
one storage, or of one that was taken for lost and lives. For them are tickets, twins and the check for surplus trials;
that a trial's worker is lost is also what a study learns that is resumed after a kill.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from optuna.trial import TrialState

from kvtuner.errors import NonFiniteActivationError
from kvtuner.precision import bytes_per_token, mean_bits
from kvtuner.search_spaces.space import pairs_of, predicted_score
from kvtuner.tuner.interrupts import InterruptGate
from kvtuner.tuner.liveness import WORKER, LivenessMonitor, heartbeat
from kvtuner.tuner.samplers import set_violation
from kvtuner.tuner.study_storage import STORAGE_ERRORS
from kvtuner.tuner.surrogate import Surrogate
from kvtuner.tuner.trials import (
    FAILURE,
    LAYERS,
    OUTCOME,
    SOURCE,
    TICKET,
    TrialReader,
    TrialRecord,
    all_params,
    is_surplus,
    layer_texts,
    ticket_of,
)
from kvtuner.workers.worker_identity import worker_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import optuna
    from optuna.trial import FrozenTrial

    from kvtuner.search_spaces.budget import Constraint
    from kvtuner.search_spaces.space import Configuration, SearchSpace

POLL_S: Final = 0.2

FAILURE_VIOLATION: Final = 1.0
"""The value that the sampler gets for a configuration without a finite KL: as bad as twice the budget."""


class _GivenUpError(Exception):
    """The trial of this worker was ended by another one, which took it for lost."""


class Worker:
    """Runs trials of a study, beside any number of other workers."""

    def __init__(
        self,
        study: optuna.Study,
        space: SearchSpace,
        constraint: Constraint,
        objective: Callable[[Configuration], float],
        gate: InterruptGate | None = None,
        race: Callable[[Configuration, Configuration], float] | None = None,
    ) -> None:
        """Take part in `study`; Ctrl-C passes `gate` only while no storage is in use. For `race` see `refine`."""
        self._study = study
        self._space = space
        self._constraint = constraint
        self._objective = objective
        self._race = race
        self._surrogate = Surrogate(space, constraint)
        self._monitor = LivenessMonitor()
        self._gate = gate or InterruptGate()
        self._tried: dict[tuple[int, ...], float | None] = {}
        self._start: tuple[int, ...] | None = None
        self._id = worker_id()
        self._reader = TrialReader(space)
        self.distributions = self._reader.distributions

    def describe(self) -> None:
        """Write down what the numbers of each parameter mean, in an attribute each: MySQL's hold 64 KiB."""
        for name, texts in self._reader.menus().items():
            self._study.set_user_attr(name, texts)

    def enqueue(self, warm: Sequence[Configuration]) -> None:
        """Queue the warm starts that the study neither has nor will have."""
        if not self.distributions:
            warm = [self._space.configuration([0] * len(self._space.groups))]
        projected = dict.fromkeys(self._space.project(configuration) for configuration in warm)
        starts = [indices for indices in projected if self._is_feasible(indices)]
        self._start = starts[0] if starts else None
        for trial in self._trials():
            self._reclaim(trial)
        present = self._reader.values_of(self._trials())
        for start in starts:
            if start not in present:
                self._study.enqueue_trial(self._reader.params(start), user_attrs={SOURCE: "warm"})

    def work(
        self,
        num_trials: int,
        *,
        is_sampling: bool,
        on_trial: Callable[[TrialRecord], None] | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        """Finish trials until the study has enough, waiting at the end for those that others still run.

        It ends with fewer, at least one, where `is_over` says so.
        """
        while True:
            trials = [trial for trial in self._trials() if not self._reclaim(trial)]
            count = Counter(trial.state for trial in trials)
            if is_over is not None and count[TrialState.COMPLETE] and is_over():
                return
            is_open = is_sampling or count[TrialState.WAITING] > 0
            if count[TrialState.COMPLETE] >= num_trials or not (is_open or count[TrialState.RUNNING]):
                return
            if count[TrialState.COMPLETE] + count[TrialState.RUNNING] >= num_trials or not is_open:
                with self._gate.opened():
                    time.sleep(POLL_S)
                continue
            record = self._run_trial(num_trials, is_sampling=is_sampling)
            if record is not None and on_trial is not None:
                on_trial(record)

    def records(self) -> list[TrialRecord]:
        """All finished trials of the study."""
        return [self._reader.record(trial) for trial in self._trials() if trial.state == TrialState.COMPLETE]

    def _run_trial(self, num_trials: int, *, is_sampling: bool) -> TrialRecord | None:
        trial = self._study.ask()
        try:
            with self._changing(trial):
                is_decided = self._decide(trial, num_trials, is_sampling=is_sampling)
            return self._evaluate(trial) if is_decided else None
        except _GivenUpError:
            return None
        except BaseException:
            with contextlib.suppress(*STORAGE_ERRORS, OSError):
                self._release(self._trials()[trial.number])
            raise

    @contextlib.contextmanager
    def _changing(self, trial: optuna.Trial) -> Iterator[None]:
        """Change a trial, where nothing is measured; `_GivenUpError` if that fails since another worker ended it."""
        try:
            yield
        except RuntimeError as error:  # Optuna's, among others
            if not self._trials()[trial.number].state.is_finished():
                raise
            raise _GivenUpError from error

    def _decide(self, trial: optuna.Trial, num_trials: int, *, is_sampling: bool) -> bool:
        """Choose what a trial measures, and wait for those that measure the same; False if it came too late."""
        trial.set_user_attr(WORKER, self._id)
        trials = self._trials()
        if is_surplus(trials, trial.number, num_trials, is_sampling=is_sampling):
            self._release(trials[trial.number])
            return False
        self._tried = self._reader.values_of(other for other in trials if other.number != trial.number)
        # Optuna asks the sampler only for parameters that are not fixed; it has to know of warm starts too.
        _ = trial.relative_params
        for name, distribution in self.distributions.items():
            trial.suggest_int(name, distribution.low, distribution.high)
        self._await_twins(trial, 1 + max(map(ticket_of, trials)))
        return True

    def _await_twins(self, trial: optuna.Trial, ticket: int) -> None:
        """Wait for what others measure of the same configuration, and learn its value.

        Workers that propose at the same time may propose the same. Optuna's storages cannot compare and set, so workers
        queue by Lamport's bakery algorithm (CACM 17, 1974): who has decided takes a ticket above all that were there
        when its trial began, waits until those that run beside it have one, and then for those of the same
        configuration whose ticket is lower. A ticket is written after all parameters, but a database need not read both
        from one moment: a trial counts as decided when both are seen.
        """
        indices = self._reader.indices(trial.params)
        trial.set_user_attr(TICKET, ticket)
        if not self._is_feasible(indices):
            return
        undecided: set[int] | None = None
        with heartbeat(trial):
            while self._tried.get(indices) is None:
                others = [other for other in self._trials() if other.number != trial.number]
                running = [other for other in others if other.state == TrialState.RUNNING and not self._reclaim(other)]
                decided = [other for other in running if ticket_of(other) and self._reader.is_decided(other)]
                undecided_now = {other.number for other in running} - {other.number for other in decided}
                # Only those of the first look can come before this trial: its ticket was written by then, and whoever
                # begins later takes a higher one.
                undecided = undecided_now if undecided is None else undecided & undecided_now
                is_twin_ahead = any(
                    (ticket_of(other), other.number) < (ticket, trial.number)
                    and self._reader.indices(all_params(other)) == indices
                    for other in decided
                )
                if not undecided and not is_twin_ahead:
                    self._tried[indices] = self._reader.values_of(others).get(indices)
                    return
                with self._gate.opened():
                    time.sleep(POLL_S / 4)

    def _evaluate(self, trial: optuna.Trial) -> TrialRecord | None:
        indices = self._reader.indices(trial.params)
        configuration = self._space.configuration(indices)
        pairs = pairs_of(configuration)
        violation = self._constraint.violation(pairs)
        twin_kl = self._tried.get(indices)
        outcome: dict[str, Any] = {
            "mean_bits": float(mean_bits(pairs, self._constraint.shape)),
            "bytes_per_token": bytes_per_token(pairs, self._constraint.shape),
            "is_feasible": violation <= 0,
            "is_measured": violation <= 0 and twin_kl is None,
        }
        # A finished trial needs a value; its constraint keeps one that has no KL from winning.
        value = predicted_score(configuration)
        if violation <= 0:
            try:
                value = self._measure(trial, indices) if twin_kl is None else _finite(twin_kl)
            except NonFiniteActivationError as error:
                violation, outcome[FAILURE] = FAILURE_VIOLATION, str(error)
        with self._changing(trial):
            set_violation(trial, violation)
            trial.set_user_attr(LAYERS, layer_texts(configuration, [menu.layer for menu in self._space.menus]))
            trial.set_user_attr(OUTCOME, outcome)
        ended = self._end(trial.number, value)
        return None if ended is None else self._reader.record(ended)

    def _measure(self, trial: optuna.Trial, indices: tuple[int, ...]) -> float:
        configuration = self._space.configuration(indices)
        measured = self._measured()
        with heartbeat(trial), self._gate.opened():
            if self._race is None or not measured or indices == self._start:
                value = float(self._objective(configuration))
            else:
                best = min(measured, key=lambda other: (measured[other], other))
                value = float(self._race(configuration, self._space.configuration(best)))
        if not math.isfinite(value):
            raise NonFiniteActivationError(
                f"a measured KL must be finite, but is {value} in trial {trial.number}"
                f" ({', '.join(map(str, pairs_of(configuration)))}); run the model in a wider dtype"
            )
        return value

    def _measured(self) -> dict[tuple[int, ...], float]:
        """Finite values that the study had when the trial began."""
        return {indices: kl for indices, kl in self._tried.items() if kl is not None and math.isfinite(kl)}

    def is_wanted(self, params: Mapping[str, Any]) -> bool:
        """Whether parameters keep the budget and are new to the study."""
        return self._is_new(self._reader.indices(params))

    def _is_new(self, indices: tuple[int, ...]) -> bool:
        return indices not in self._tried and self._is_feasible(indices)

    def _is_feasible(self, indices: tuple[int, ...]) -> bool:
        return self._constraint.is_met(pairs_of(self._space.configuration(indices)))

    def suggest(self, seed: int, number: int) -> dict[str, Any] | None:
        """The best configuration under scores corrected by all measurements, for every other trial; else None."""
        if number % 2:
            return None
        rng = np.random.default_rng([seed, number])
        indices = self._surrogate.propose(self._measured(), self._is_new, rng)
        return None if indices is None else self._reader.params(indices)

    def _reclaim(self, trial: FrozenTrial) -> bool:
        """Give up a running trial whose worker is lost; True if so."""
        is_lost = trial.state == TrialState.RUNNING and self._monitor.is_lost(trial)
        if is_lost:
            self._release(trial)
        return is_lost

    def _release(self, trial: FrozenTrial) -> bool:
        """End a trial without a value, and queue what it was to measure; False if another worker has done so."""
        if self._end(trial.number) is None:
            return False
        if self.distributions and self._reader.is_decided(trial):
            attributes = {SOURCE: trial.user_attrs.get(SOURCE, "sampler")}
            self._study.enqueue_trial(all_params(trial), user_attrs=attributes)
        return True

    def _end(self, number: int, value: float | None = None) -> FrozenTrial | None:
        """Finish a trial, or fail it without a value; None if another worker has ended it."""
        try:
            return self._study.tell(number, value, state=TrialState.FAIL if value is None else None)
        except (ValueError, RuntimeError):
            # Others fail what is this worker's to finish. Where its sampler raises, Optuna finishes it all the same;
            # after a trial that failed samplers do nothing.
            state = self._trials()[number].state
            if not state.is_finished() or (value is not None and state == TrialState.COMPLETE):
                raise
            return None

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)


def _finite(kl: float) -> float:
    if not math.isfinite(kl):
        raise NonFiniteActivationError("it repeats a configuration whose KL is not finite")
    return kl
