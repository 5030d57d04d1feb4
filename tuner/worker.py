"""A worker of a study: takes trials, measures them, gives back those that it cannot measure. Knows no models."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from optuna.distributions import IntDistribution
from optuna.trial import TrialState

from kvtuner.errors import NonFiniteActivationError
from kvtuner.precision import bytes_per_token, mean_bits
from kvtuner.search_spaces.space import pairs_of, predicted_score
from kvtuner.tuner.interrupts import InterruptGate
from kvtuner.tuner.liveness import WORKER, LivenessMonitor, heartbeat, worker_id
from kvtuner.tuner.samplers import FIXED_PARAMS, set_violation
from kvtuner.tuner.study_storage import STORAGE_ERRORS
from kvtuner.tuner.surrogate import Surrogate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import optuna
    from optuna.trial import FrozenTrial

    from kvtuner.search_spaces.budget import Constraint
    from kvtuner.search_spaces.space import Configuration, SearchSpace

POLL_S: Final = 0.2

# User attributes of a trial; optuna-dashboard shows them.
SOURCE: Final = "source"
OUTCOME: Final = "outcome"  # a dictionary: each attribute is a commit of its own
FAILURE: Final = "failure"  # in an outcome, where a KL is not finite
TICKET: Final = "ticket"

FAILURE_VIOLATION: Final = 1.0
"""The value that the sampler gets for a configuration without a finite KL: as bad as twice the budget."""


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One finished trial.

    Attributes:
        number: The number of the trial in the study, from 0.
        value: KL, nats per token, measured or estimated by a race; None outside the budget, where nothing is measured,
            and where the KL is not finite.
        source: whether it was a warm start or the sampler's idea.
        is_measured: whether it took a measurement of its own; else it broke the budget or repeated another.
        failure: why its KL is not finite; None where it is, or was not asked for.
    """

    number: int
    configuration: Configuration
    value: float | None
    source: Literal["warm", "sampler"]
    is_measured: bool
    failure: str | None = None

    @property
    def is_feasible(self) -> bool:
        """Whether it keeps the budget."""
        return self.value is not None or self.failure is not None


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
        self._watch = LivenessMonitor()
        self._gate = gate or InterruptGate()
        self._tried: dict[tuple[int, ...], float | None] = {}
        self._start: tuple[int, ...] | None = None
        self._id = worker_id()
        # A group with one choice is no parameter: samplers change each parameter at a rate of 1 / their number.
        self.distributions = {
            self._name(group): IntDistribution(0, size - 1) for group, size in enumerate(space.sizes) if size > 1
        }

    def enqueue(self, warm: Sequence[Configuration]) -> None:
        """Queue the warm starts that the study neither has nor will have."""
        if not self.distributions:
            warm = [self._space.configuration([0] * len(self._space.groups))]
        projected = dict.fromkeys(self._space.project(configuration) for configuration in warm)
        starts = [indices for indices in projected if self._is_feasible(indices)]
        self._start = starts[0] if starts else None
        for trial in self._trials():
            self._reclaim(trial)
        present = self._values_of(self._trials())
        for start in starts:
            if start not in present:
                self._study.enqueue_trial(self._params(start), user_attrs={SOURCE: "warm"})

    def work(
        self, num_trials: int, *, is_sampling: bool, on_trial: Callable[[TrialRecord], None] | None = None
    ) -> None:
        """Finish trials until the study has enough, waiting at the end for those that others still run."""
        while True:
            trials = [trial for trial in self._trials() if not self._reclaim(trial)]
            finished, running, waiting = (
                sum(trial.state == state for trial in trials)
                for state in (TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING)
            )
            if finished >= num_trials or not (is_sampling or running or waiting):
                return
            if finished + running >= num_trials or not (is_sampling or waiting):
                with self._gate.opened():
                    time.sleep(POLL_S)
                continue
            record = self._run_trial(num_trials, is_sampling=is_sampling)
            if record is not None and on_trial is not None:
                on_trial(record)

    def records(self) -> list[TrialRecord]:
        """All finished trials of the study."""
        return [self._record(trial) for trial in self._trials() if trial.state == TrialState.COMPLETE]

    def _run_trial(self, num_trials: int, *, is_sampling: bool) -> TrialRecord | None:
        trial = self._study.ask()
        try:
            trial.set_user_attr(WORKER, self._id)
            trials = self._trials()
            if _is_surplus(trials, trial.number, num_trials, is_sampling=is_sampling):
                self._release(trials[trial.number])
                return None
            self._tried = self._values_of(other for other in trials if other.number != trial.number)
            # Optuna asks the sampler only for parameters that are not fixed; it has to know of warm starts too.
            _ = trial.relative_params
            for name, distribution in self.distributions.items():
                trial.suggest_int(name, distribution.low, distribution.high)
            self._await_twins(trial, 1 + max(map(_ticket, trials)))
            return self._evaluate(trial)
        except BaseException as error:
            with contextlib.suppress(*STORAGE_ERRORS):
                is_own = self._release(self._trials()[trial.number])
                if not is_own and isinstance(error, RuntimeError):  # Optuna's, for changing an ended trial
                    return None
            raise

    def _await_twins(self, trial: optuna.Trial, ticket: int) -> None:
        """Wait for what others measure of the same configuration, and learn its value.

        Workers that propose at the same time may propose the same. Optuna's storages cannot compare and set, so workers
        queue by Lamport's bakery algorithm (CACM 17, 1974): who has decided takes a ticket above all that were there
        when its trial began, waits until those that run beside it have one, and then for those of the same
        configuration whose ticket is lower. A ticket is written after all parameters, but a database need not read both
        from one moment: a trial counts as decided when both are seen.
        """
        indices = self._indices(trial.params)
        trial.set_user_attr(TICKET, ticket)
        if not self._is_feasible(indices):
            return
        undecided: set[int] | None = None
        with heartbeat(trial):
            while self._tried.get(indices) is None:
                others = [other for other in self._trials() if other.number != trial.number]
                running = [o for o in others if o.state == TrialState.RUNNING and not self._reclaim(o)]
                still = {o.number for o in running if not (_ticket(o) and self._is_decided(o))}
                # Whoever began after this ticket was written has a higher one.
                undecided = still if undecided is None else undecided & still
                decided = (o for o in running if o.number not in still)
                ahead = [o for o in decided if (_ticket(o), o.number) < (ticket, trial.number)]
                if not undecided and not any(self._indices(_all_params(o)) == indices for o in ahead):
                    self._tried[indices] = self._values_of(others).get(indices)
                    return
                with self._gate.opened():
                    time.sleep(POLL_S / 4)

    def _evaluate(self, trial: optuna.Trial) -> TrialRecord | None:
        indices = self._indices(trial.params)
        configuration = self._space.configuration(indices)
        pairs = pairs_of(configuration)
        violation = self._constraint.violation(pairs)
        known = self._tried.get(indices)
        outcome: dict[str, Any] = {
            "mean_bits": float(mean_bits(pairs, self._constraint.shape)),
            "bytes_per_token": bytes_per_token(pairs, self._constraint.shape),
            "is_feasible": violation <= 0,
            "is_measured": violation <= 0 and known is None,
        }
        # A finished trial needs a value; its constraint keeps one that has no KL from winning.
        value = predicted_score(configuration)
        if violation <= 0:
            try:
                value = self._measure(trial, indices) if known is None else _finite(known)
            except NonFiniteActivationError as error:
                violation, outcome[FAILURE] = FAILURE_VIOLATION, str(error)
        set_violation(trial, violation)
        trial.set_user_attr(OUTCOME, outcome)
        ended = self._end(trial.number, value)
        return None if ended is None else self._record(ended)

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
        return {i: value for i, value in self._tried.items() if value is not None and math.isfinite(value)}

    def is_wanted(self, params: Mapping[str, Any]) -> bool:
        """Whether parameters keep the budget and are new to the study."""
        indices = self._indices(params)
        return indices not in self._tried and self._is_feasible(indices)

    def _is_feasible(self, indices: tuple[int, ...]) -> bool:
        return self._constraint.is_met(pairs_of(self._space.configuration(indices)))

    def suggest(self, seed: int, number: int) -> dict[str, Any] | None:
        """The best configuration under scores corrected by all measurements, for every other trial; else None."""
        if number % 2:
            return None
        rng = np.random.default_rng([seed, number])
        indices = self._surrogate.propose(self._measured(), lambda indices: self.is_wanted(self._params(indices)), rng)
        return None if indices is None else self._params(indices)

    def _reclaim(self, trial: FrozenTrial) -> bool:
        """Give up a running trial whose worker is lost; True if so."""
        is_lost = trial.state == TrialState.RUNNING and self._watch.is_lost(trial)
        if is_lost:
            self._release(trial)
        return is_lost

    def _release(self, trial: FrozenTrial) -> bool:
        """End a trial without a value, and queue what it was to measure; False if another worker has done so."""
        if self._end(trial.number) is None:
            return False
        if self.distributions and self._is_decided(trial):
            attributes = {SOURCE: trial.user_attrs.get(SOURCE, "sampler")}
            self._study.enqueue_trial(_all_params(trial), user_attrs=attributes)
        return True

    def _end(self, number: int, value: float | None = None) -> FrozenTrial | None:
        """Finish a trial, or fail it without a value; None if another worker has ended it."""
        try:
            return self._study.tell(number, value, state=TrialState.FAIL if value is None else None)
        except (ValueError, RuntimeError):
            return None

    def _record(self, trial: FrozenTrial) -> TrialRecord:
        outcome = trial.user_attrs[OUTCOME]
        failure = outcome.get(FAILURE)
        return TrialRecord(
            number=trial.number,
            configuration=self._space.configuration(self._indices(trial.params)),
            value=trial.value if outcome["is_feasible"] and failure is None else None,
            source=trial.user_attrs.get(SOURCE, "sampler"),
            is_measured=outcome["is_measured"],
            failure=failure,
        )

    def _is_decided(self, trial: FrozenTrial) -> bool:
        """Whether it is known what a trial measures."""
        return _all_params(trial).keys() == self.distributions.keys()

    def _values_of(self, trials: Iterable[FrozenTrial]) -> dict[tuple[int, ...], float | None]:
        """The KLs of trials, inf if not finite; None for a trial that is yet to be measured or breaks the budget."""
        values: dict[tuple[int, ...], float | None] = {}
        for trial in trials:
            if trial.state != TrialState.FAIL and self._is_decided(trial):
                indices = self._indices(_all_params(trial))
                values[indices] = _value_of(trial, values.get(indices))
        return values

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _name(self, group: int) -> str:
        layers = self._space.groups[group]
        return f"{'layer' if len(layers) == 1 else 'group'}_{layers[0]:03d}"

    def _indices(self, params: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(int(params.get(self._name(group), 0)) for group in range(len(self._space.groups)))

    def _params(self, indices: Sequence[int]) -> dict[str, Any]:
        params = {self._name(group): index for group, index in enumerate(indices)}
        return {name: params[name] for name in self.distributions}


def _is_surplus(trials: Sequence[FrozenTrial], number: int, num_trials: int, *, is_sampling: bool) -> bool:
    """Whether other workers took the last places before trial `number` began; the lower number keeps its place."""
    if not is_sampling and FIXED_PARAMS not in trials[number].system_attrs:
        return True
    finished = sum(trial.state == TrialState.COMPLETE for trial in trials)
    ahead = sum(trial.state == TrialState.RUNNING for trial in trials[:number])
    return finished + ahead >= num_trials


def _value_of(trial: FrozenTrial, otherwise: float | None) -> float | None:
    """The KL that a trial has measured, infinite if it was not finite; `otherwise` if there is none."""
    if trial.state != TrialState.COMPLETE or not trial.user_attrs[OUTCOME]["is_feasible"]:
        return otherwise
    return math.inf if FAILURE in trial.user_attrs[OUTCOME] else trial.value


def _finite(known: float) -> float:
    """A value that the study knows; refused if it is not finite."""
    if not math.isfinite(known):
        raise NonFiniteActivationError("it repeats a configuration whose KL is not finite")
    return known


def _ticket(trial: FrozenTrial) -> int:
    """A trial's place in the queue, from 1; 0 while it has none."""
    return int(trial.user_attrs.get(TICKET, 0))


def _all_params(trial: FrozenTrial) -> dict[str, Any]:
    """The parameters that a trial measures, or is to measure."""
    fixed: dict[str, Any] = trial.system_attrs.get(FIXED_PARAMS, {})
    return {**trial.params, **fixed}
